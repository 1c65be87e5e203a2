/* trace.c - reads `traceparent`; writes a request's line (trace.h). Loop thread. */
#include "server/gateway/trace.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "server/gateway/infer.h"
#include "server/log.h"

#define VERSION_00_BYTES 55 /* 00-32 digits-16 digits-2 digits */

/* Lower-case hex digits; the recommendation knows no others. *ret_zero: all of them are 0. */
static bool take_digits(const char **at, unsigned count, char *ret_digits, bool *ret_zero) {
    *ret_zero = true;
    for (unsigned i = 0; i < count; i++) {
        char c = (*at)[i];
        if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f')))
            return false;
        *ret_zero = *ret_zero && c == '0';
        ret_digits[i] = c;
    }
    ret_digits[count] = '\0';
    *at += count;
    return true;
}

static bool take_dash(const char **at) { return *(*at)++ == '-'; }

static unsigned value_of(const char *digits) {
    unsigned value = 0;
    for (; *digits; digits++)
        value = value * 16 + (unsigned)(*digits <= '9' ? *digits - '0' : *digits - 'a' + 10);
    return value;
}

bool kld_trace_read(const char *value, struct kld_trace *ret_trace) {
    struct kld_trace trace;
    char version[3], flags[3];
    bool no_version, no_id, no_span, no_flags;
    memset(ret_trace, 0, sizeof *ret_trace);
    if (!value || strnlen(value, VERSION_00_BYTES) < VERSION_00_BYTES)
        return false;
    const char *at = value;
    if (!take_digits(&at, 2, version, &no_version) || !take_dash(&at) ||
        !take_digits(&at, KLD_TRACE_ID_DIGITS, trace.id, &no_id) || !take_dash(&at) ||
        !take_digits(&at, KLD_TRACE_SPAN_DIGITS, trace.span, &no_span) || !take_dash(&at) ||
        !take_digits(&at, 2, flags, &no_flags))
        return false;
    /* ff is no version; a later one may say more, behind another dash. */
    if (strcmp(version, "ff") == 0 || no_id || no_span || (*at && (no_version || *at != '-')))
        return false;
    trace.flags = (uint8_t)value_of(flags);
    *ret_trace = trace;
    return true;
}

void kld_trace_take(const struct kld_exchange *exchange, struct kld_trace *ret_trace) {
    memset(ret_trace, 0, sizeof *ret_trace);
    if (kld_log_wants(KLD_LOG_DEBUG))
        (void)kld_trace_read(kld_exchange_header_alone(exchange, "traceparent"), ret_trace);
}

/* " op=forward_kl shape=2x1000 dtype=BF16", or nothing of what was never understood. */
static void describe(const struct kld_infer *infer, char *ret_text, size_t capacity) {
    const struct kld_op *op = &infer->request.op;
    const struct kld_geometry *geometry = &infer->request.geometry;
    const char *predictions = kld_dtype_name(op->tensor[KLD_SLOT_PREDICTIONS].dtype);
    const char *targets = kld_dtype_name(op->tensor[KLD_SLOT_TARGETS].dtype);
    bool same = strcmp(predictions, targets) == 0;
    ret_text[0] = '\0';
    if (infer->parsed)
        snprintf(ret_text, capacity, " op=%s shape=%" PRIu64 "x%" PRIu64 " dtype=%s%s%s",
                 kld_divergence_name(op->divergence), geometry->rows, geometry->classes,
                 predictions, same ? "" : ",", same ? "" : targets);
}

void kld_infer_log(const struct kld_infer *infer, enum kld_status status, uint64_t total_ns) {
    if (!kld_log_wants(KLD_LOG_DEBUG))
        return;
    const struct kld_result *result = &infer->result;
    const struct kld_trace *trace = &infer->trace;
    uint64_t started_ns = infer->exchange->started_ns;
    char asked[160], traced[sizeof " trace_id= span= sampled=1" + sizeof *trace] = "";
    describe(infer, asked, sizeof asked);
    if (trace->id[0])
        snprintf(traced, sizeof traced, " trace_id=%s span=%s sampled=%u", trace->id, trace->span,
                 trace->flags & 1u);
    kld_log(KLD_LOG_DEBUG, "request",
            "transport=http status=%s%s total_us=%" PRIu64 " receive_us=%" PRIu64
            " queue_us=%" PRIu64 " copy_us=%" PRIu64 " kernel_us=%" PRIu64 "%s",
            kld_status_name(status), asked, total_ns / 1000,
            infer->body_end_ns ? (infer->body_end_ns - started_ns) / 1000 : total_ns / 1000,
            result->queue_ns / 1000, result->copy_ns / 1000, result->kernel_ns / 1000, traced);
}
