/* result_file.h - a file that a result goes to. It is opened before there is a result, so that one
 * that cannot be written is known by then, and has no name until all is in it: whatever ends the
 * tool before leaves nothing, and what was there stays as it was. Symbolic links are followed, and
 * the permissions of a file that is replaced are kept. One thread. */
#ifndef KLD_CLIENT_CLI_RESULT_FILE_H
#define KLD_CLIENT_CLI_RESULT_FILE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#include "proto/status.h"

#define KLD_RESULT_BESIDE_BYTES 24

struct kld_result_file {
    const char *name; /* as the caller calls it, and the caller's; NULL: it is not open */
    int folder;
    char base[NAME_MAX + 1];    /* its name there */
    struct stat folder_is, was; /* was: what it replaces, if it does */
    bool replaces;
    int fd;                               /* -1: the file system has no files without a name */
    char beside[KLD_RESULT_BESIDE_BYTES]; /* its name until then, there; "": none */
};

/* Room for the bytes is taken where the file system does that. */
enum kld_status kld_result_file_open(const char *name, uint64_t bytes,
                                     struct kld_result_file *ret_file, struct kld_error *err);
/* Do the two names lead to one place? */
bool kld_result_file_same(const struct kld_result_file *file, const struct kld_result_file *other);
/* Once, each; then kld_result_file_place() gives it its name. */
enum kld_status kld_result_file_write(struct kld_result_file *file, const void *header,
                                      size_t header_bytes, const void *data, uint64_t bytes,
                                      struct kld_error *err);
enum kld_status kld_result_file_place(struct kld_result_file *file, struct kld_error *err);
void kld_result_file_close(struct kld_result_file *file); /* a zeroed one is allowed */

#endif
