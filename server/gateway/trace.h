/* trace.h - what a caller's `traceparent` says (W3C Trace Context), and the line that the log has
 * of each request that computes, stores a tensor or deletes one, or is refused before. No span is
 * made here: the line names the caller's. It is not sent back: only a draft has a header for that.
 * Loop thread; the reader is pure. */
#ifndef KLD_SERVER_GATEWAY_TRACE_H
#define KLD_SERVER_GATEWAY_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

#define KLD_TRACE_ID_DIGITS 32
#define KLD_TRACE_SPAN_DIGITS 16

struct kld_trace {
    char id[KLD_TRACE_ID_DIGITS + 1];     /* lower-case digits; "": none */
    char span[KLD_TRACE_SPAN_DIGITS + 1]; /* the caller's */
    uint8_t flags;
};

/* value: of the header; NULL: it has none. False, and *ret_trace empty: none, or not one that the
 * recommendation allows, which is then to be ignored. */
bool kld_trace_read(const char *value, struct kld_trace *ret_trace);

/* For libkld, which takes it to the worker's line; *ret_context all 0 where there is none. */
struct kld_trace_context;
void kld_trace_pass(const struct kld_trace *trace, struct kld_trace_context *ret_context);

struct kld_infer;
struct kld_exchange;
struct kld_stored;
/* Of the exchange's headers, where a line will be written: at its beginning, for the headers may be
 * gone at its end. */
void kld_trace_take(const struct kld_exchange *exchange, struct kld_trace *ret_trace);
/* At level debug, at info where it failed (there KLD_FAILED_LINES_MAX a second and loop): what was
 * asked for, how it ended, how long it took, the name of the caller's token and, where it failed,
 * his address; no data, no name or id of the caller's choice. */
void kld_infer_log(const struct kld_infer *infer, enum kld_status status, uint64_t total_ns);
/* Who may not ask, or whose path, method or headers refuse him: at info, as above. */
void kld_refused_log(const struct kld_exchange *exchange, enum kld_status status);
/* The same of a tensor, once when its outcome is known, before its reply. op: "put_tensor",
 * "delete_tensor". tensor: as it was understood, NULL: it was not. body_end_ns: uv_hrtime() of the
 * end of its body, 0: not all of it came, or it has none. */
void kld_tensor_log(const struct kld_exchange *exchange, const struct kld_trace *trace,
                    const char *op, enum kld_status status, const struct kld_stored *tensor,
                    uint64_t body_end_ns);

#endif
