/* safetensors.h - .safetensors files: their headers. No I/O; the JSON is parsed by cJSON. Format:
 * 8 bytes of little-endian header length, a JSON object of tensors, their bytes. */
#ifndef KLD_CLIENT_CLI_SAFETENSORS_H
#define KLD_CLIENT_CLI_SAFETENSORS_H

#include "client/cli/npy.h"

/* The tensor called `name` (NULL: the only one in the file) of a file of `bytes` bytes. */
enum kld_status kld_safetensors_parse(const void *data, uint64_t bytes, const char *name,
                                      struct kld_array *ret_array, struct kld_error *err);

#define KLD_SAFETENSORS_HEADER_BYTES 512
/* The header of a file with this one tensor; how many of the bytes are used. */
size_t kld_safetensors_header(const struct kld_array *array, const char *name,
                              char ret_header[KLD_SAFETENSORS_HEADER_BYTES]);

#endif
