/* file.h - reads a small file that may hold secrets. At start, main thread. */
#ifndef KLD_SERVER_GATEWAY_FILE_H
#define KLD_SERVER_GATEWAY_FILE_H

#include <stddef.h>

#include "proto/status.h"

/* The whole file as a NUL-terminated text. setting: named in errors, which never show the path's
 * contents. A file with a NUL byte, or longer than bytes_max, is refused. */
enum kld_status kld_file_read(const char *setting, const char *path, size_t bytes_max,
                              char **ret_text, struct kld_error *err);
/* Overwrites and frees it. NULL is allowed. */
void kld_file_forget(char *text);

#endif
