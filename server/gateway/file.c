/* file.c - reads a small file that may hold secrets, and forgets it (file.h).
 * Main thread, at start. */
#include "server/gateway/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum kld_status kld_file_read(const char *setting, const char *path, size_t bytes_max,
                              char **ret_text, struct kld_error *err) {
    FILE *file = fopen(path, "re");
    if (!file)
        return kld_error_set(err, KLD_INVALID, "%s: the file cannot be opened: %s", setting,
                             strerror(errno));
    setvbuf(file, NULL, _IONBF, 0); /* no second copy */
    char *text = calloc(1, bytes_max + 2);
    size_t bytes = text ? fread(text, 1, bytes_max + 1, file) : 0;
    int failed = ferror(file);
    fclose(file);
    enum kld_status status = KLD_OK;
    if (!text)
        status = kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    else if (failed)
        status = kld_error_set(err, KLD_INVALID, "%s: the file cannot be read", setting);
    else if (bytes > bytes_max)
        status = kld_error_set(err, KLD_TOO_LARGE, "%s: the file has more than %zu bytes", setting,
                               bytes_max);
    else if (memchr(text, '\0', bytes))
        status = kld_error_set(err, KLD_INVALID, "%s: the file is not text", setting);
    if (status) {
        free(text);
        return status;
    }
    *ret_text = text;
    return KLD_OK;
}

void kld_file_forget(char *text) {
    if (!text)
        return;
    explicit_bzero(text, strlen(text));
    free(text);
}
