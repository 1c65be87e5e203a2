/* tensor_file.c - opens the files that npy.c and safetensors.c describe, and says how those of
 * results begin. */
#include "client/cli/tensor_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/cli/safetensors.h"

#define SAFETENSORS ".safetensors"

static bool ends_with(const char *text, const char *end) {
    size_t length = strlen(text), end_length = strlen(end);
    return length > end_length && strcmp(text + length - end_length, end) == 0;
}

/* "a.safetensors:b" -> "a.safetensors" and "b"; *ret_tensor is NULL where none is named. */
static enum kld_status split_name(const char *name, char path[PATH_MAX], const char **ret_tensor,
                                  struct kld_error *err) {
    const char *found = strstr(name, SAFETENSORS ":");
    size_t length = found ? (size_t)(found - name) + strlen(SAFETENSORS) : strlen(name);
    if (length == 0 || length >= PATH_MAX)
        return kld_error_set(err, KLD_INVALID, "a file name of %zu bytes", length);
    memcpy(path, name, length);
    path[length] = '\0';
    *ret_tensor = found ? name + length + 1 : NULL;
    return KLD_OK;
}

static enum kld_status map_file(const char *path, struct kld_tensor_file *file,
                                struct kld_error *err) {
    struct stat about;
    /* A FIFO would have who opens it wait for its writer. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return kld_error_set(err, KLD_NOT_FOUND, "%s", strerror(errno));
    if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode) || about.st_size == 0) {
        close(fd);
        return kld_error_set(err, KLD_INVALID, "%s",
                             S_ISREG(about.st_mode)
                                 ? "a file without anything in it"
                                 : "not a file; expected one, which is mapped: no pipe, no device");
    }
    file->mapping_bytes = (uint64_t)about.st_size;
    file->mapping = mmap(NULL, file->mapping_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (file->mapping == MAP_FAILED) {
        file->mapping = NULL;
        return kld_error_set(err, KLD_NO_MEMORY, "cannot map the file: %s", strerror(errno));
    }
    return KLD_OK;
}

/* Headers need not end at a multiple of the element. */
static enum kld_status align(struct kld_tensor_file *file, struct kld_error *err) {
    const char *at = (const char *)file->mapping + file->array.offset_bytes;
    file->data = at;
    if (file->array.offset_bytes % kld_dtype_bytes(file->array.dtype) == 0)
        return KLD_OK;
    file->copy = malloc(file->array.bytes);
    if (!file->copy)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for %llu bytes",
                             (unsigned long long)file->array.bytes);
    file->data = memcpy(file->copy, at, file->array.bytes);
    return KLD_OK;
}

/* Puts the file's name before what is wrong with it. */
static enum kld_status name_error(const char *name, struct kld_error *err) {
    struct kld_error plain = *err;
    return kld_error_set(err, plain.status, "%.100s: %s", name, plain.text);
}

enum kld_status kld_tensor_file_open(const char *name, struct kld_tensor_file *ret_file,
                                     struct kld_error *err) {
    char path[PATH_MAX];
    const char *tensor = NULL;
    memset(ret_file, 0, sizeof *ret_file);
    enum kld_status status = split_name(name, path, &tensor, err);
    if (!status)
        status = map_file(path, ret_file, err);
    if (!status)
        status =
            tensor || ends_with(path, SAFETENSORS)
                ? kld_safetensors_parse(ret_file->mapping, ret_file->mapping_bytes, tensor,
                                        &ret_file->array, err)
                : kld_npy_parse(ret_file->mapping, ret_file->mapping_bytes, &ret_file->array, err);
    if (!status)
        status = align(ret_file, err);
    if (!status)
        return KLD_OK;
    kld_tensor_file_close(ret_file);
    return name_error(name, err);
}

void kld_tensor_file_close(struct kld_tensor_file *file) {
    if (file->mapping)
        munmap(file->mapping, file->mapping_bytes);
    free(file->copy);
    memset(file, 0, sizeof *file);
}

enum kld_status kld_tensor_file_check(const char *name, enum kld_dtype dtype,
                                      struct kld_error *err) {
    if (ends_with(name, SAFETENSORS))
        return KLD_OK;
    if (!ends_with(name, ".npy"))
        return kld_error_set(err, KLD_INVALID,
                             "%.100s: a result goes to a .npy or a .safetensors file", name);
    return dtype != KLD_DTYPE_BF16
               ? KLD_OK
               : kld_error_set(err, KLD_INVALID,
                               "%.100s: NumPy has no BF16; name a .safetensors file instead", name);
}

size_t kld_tensor_file_header(const char *name, const char *tensor, const struct kld_array *array,
                              char ret_header[KLD_TENSOR_FILE_HEADER_BYTES]) {
    return ends_with(name, SAFETENSORS) ? kld_safetensors_header(array, tensor, ret_header)
                                        : kld_npy_header(array, ret_header);
}
