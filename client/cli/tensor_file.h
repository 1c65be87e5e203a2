/* tensor_file.h - tensors in files: .npy, and .safetensors as FILE.safetensors:NAME. Files are read
 * by mapping them; result_file.h has those that are written. */
#ifndef KLD_CLIENT_CLI_TENSOR_FILE_H
#define KLD_CLIENT_CLI_TENSOR_FILE_H

#include "client/cli/npy.h"

struct kld_tensor_file {
    struct kld_array array;
    const void *data; /* aligned to its element; read-only */
    void *mapping;    /* owned */
    uint64_t mapping_bytes;
    void *copy; /* owned: where the file's values are not aligned */
};

/* Opens what `name` names for reading. */
enum kld_status kld_tensor_file_open(const char *name, struct kld_tensor_file *ret_file,
                                     struct kld_error *err);
void kld_tensor_file_close(struct kld_tensor_file *file); /* a zeroed one is allowed */

/* Can an array of this dtype be written under this name? */
enum kld_status kld_tensor_file_check(const char *name, enum kld_dtype dtype,
                                      struct kld_error *err);
#define KLD_TENSOR_FILE_HEADER_BYTES 512
/* What is before the values in a file of this name; how many of the bytes are used. tensor: the
 * array's name inside a .safetensors file. */
size_t kld_tensor_file_header(const char *name, const char *tensor, const struct kld_array *array,
                              char ret_header[KLD_TENSOR_FILE_HEADER_BYTES]);

#endif
