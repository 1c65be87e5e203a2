/* upload.h - PUT /v2/tensors/NAME: the body is the tensor, its bytes as they are, and goes piece by
 * piece to the device while it arrives. What it is stands in the query: datatype, shape by comma,
 * lifetime_ms, device. Loop thread. */
#ifndef KLD_SERVER_GATEWAY_UPLOAD_H
#define KLD_SERVER_GATEWAY_UPLOAD_H

#include "server/gateway/http.h"

void kld_upload_begin(struct kld_exchange *exchange, const char *name);
size_t kld_upload_feed(struct kld_exchange *exchange, const char *data, size_t size);
void kld_upload_finish(struct kld_exchange *exchange);
void kld_upload_refuse(struct kld_exchange *exchange, const struct kld_error *error);
void kld_upload_end(struct kld_exchange *exchange);

#endif
