/* compress.h - replies in text for clients that ask for them compressed. No state; any thread. */
#ifndef KLD_SERVER_GATEWAY_COMPRESS_H
#define KLD_SERVER_GATEWAY_COMPRESS_H

#include <stdbool.h>
#include <stddef.h>

#define KLD_COMPRESS_BYTES_MIN 1024 /* less is sent as it is */

enum kld_coding { KLD_CODING_NONE, KLD_CODING_GZIP, KLD_CODING_DEFLATE };

/* accept: the value of Accept-Encoding, or NULL. The one liked best, gzip before deflate. */
enum kld_coding kld_coding_choose(const char *accept);
const char *kld_coding_name(enum kld_coding coding); /* as in Content-Encoding */

/* Writes at most `bytes` bytes to `to` and returns how many; 0: no memory, or it would not get
 * smaller. */
size_t kld_compress(enum kld_coding coding, const void *data, size_t bytes, void *to);

#endif
