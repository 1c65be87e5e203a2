/* trace.c - reads `traceparent`; writes a request's line (trace.h). Loop thread. */
#include "server/gateway/trace.h"

#include <arpa/inet.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "server/gateway/auth.h"
#include "server/gateway/infer.h"
#include "server/gateway/tensors.h"
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

static void put_bytes(const char *digits, uint8_t *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        bytes[i] = (uint8_t)value_of((char[]){digits[2 * i], digits[2 * i + 1], '\0'});
}

void kld_trace_pass(const struct kld_trace *trace, struct kld_trace_context *ret_context) {
    memset(ret_context, 0, sizeof *ret_context);
    if (!trace->id[0])
        return;
    put_bytes(trace->id, ret_context->id, sizeof ret_context->id);
    put_bytes(trace->span, ret_context->span, sizeof ret_context->span);
    ret_context->flags = trace->flags;
}

void kld_trace_take(const struct kld_exchange *exchange, struct kld_trace *ret_trace) {
    memset(ret_trace, 0, sizeof *ret_trace);
    if (kld_log_wants(KLD_LOG_INFO))
        (void)kld_trace_read(kld_exchange_header_alone(exchange, "traceparent"), ret_trace);
}

/* " op=forward_kl shape=2x1000 dtype=BF16", or nothing of what was never understood. */
static void describe(const struct kld_infer *infer, char *ret_text, size_t capacity) {
    const struct kld_op *op = &infer->request.op;
    const struct kld_geometry *geometry = &infer->request.geometry;
    ret_text[0] = '\0';
    if (!infer->parsed) /* and the thread pool may be writing what it understands */
        return;
    const char *predictions = kld_dtype_name(op->tensor[KLD_SLOT_PREDICTIONS].dtype);
    const char *targets = kld_dtype_name(op->tensor[KLD_SLOT_TARGETS].dtype);
    bool same = strcmp(predictions, targets) == 0;
    snprintf(ret_text, capacity, " op=%s shape=%" PRIu64 "x%" PRIu64 " dtype=%s%s%s",
             kld_divergence_name(op->divergence), geometry->rows, geometry->classes, predictions,
             same ? "" : ",", same ? "" : targets);
}

#define TRACED_BYTES_MAX (sizeof " trace_id= span= sampled=1" + sizeof(struct kld_trace))

static void describe_trace(const struct kld_trace *trace, char ret_text[TRACED_BYTES_MAX]) {
    ret_text[0] = '\0';
    if (trace->id[0])
        snprintf(ret_text, TRACED_BYTES_MAX, " trace_id=%s span=%s sampled=%u", trace->id,
                 trace->span, trace->flags & 1u);
}

/* What failed has its line at info. *ret_level: of the line. */
static bool wants_line(struct kld_gateway *gateway, enum kld_status status,
                       enum kld_log_level *ret_level) {
    *ret_level = status ? KLD_LOG_INFO : KLD_LOG_DEBUG;
    return kld_log_wants(*ret_level) && (!status || kld_failed_lines_take(&gateway->failed_lines));
}

#define CALLER_BYTES_MAX (sizeof " token=\"\"" + KLD_AUTH_NAME_MAX)

/* The name of his token; "": there are none, or it is not known. In quotes, so that one that is
 * called 123 is no number in JSON. */
static void describe_caller(const struct kld_caller *caller, char ret_text[CALLER_BYTES_MAX]) {
    ret_text[0] = '\0';
    if (caller && caller->name[0])
        snprintf(ret_text, CALLER_BYTES_MAX, " token=\"%s\"", caller->name);
}

#define PEER_BYTES_MAX (sizeof " peer=\"[]:65535\"" + INET6_ADDRSTRLEN)

/* Where what failed came from: a proxy, where there is one. An address of IPv4 that came to a
 * socket of IPv6 is written as what it is. MHD may have taken the connection's end (http.c). */
static void describe_peer(const struct kld_exchange *exchange, enum kld_status status,
                          char ret_text[PEER_BYTES_MAX]) {
    const union MHD_ConnectionInfo *info =
        status && exchange->connection
            ? MHD_get_connection_info(exchange->connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS)
            : NULL;
    const struct sockaddr *address = info ? info->client_addr : NULL;
    char host[INET6_ADDRSTRLEN];
    ret_text[0] = '\0';
    if (address && address->sa_family == AF_INET) {
        const struct sockaddr_in *ip = (const struct sockaddr_in *)(const void *)address;
        if (inet_ntop(AF_INET, &ip->sin_addr, host, sizeof host))
            snprintf(ret_text, PEER_BYTES_MAX, " peer=\"%s:%u\"", host, ntohs(ip->sin_port));
    } else if (address && address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *ip = (const struct sockaddr_in6 *)(const void *)address;
        bool mapped = IN6_IS_ADDR_V4MAPPED(&ip->sin6_addr);
        if (inet_ntop(mapped ? AF_INET : AF_INET6, &ip->sin6_addr.s6_addr[mapped ? 12 : 0], host,
                      sizeof host))
            snprintf(ret_text, PEER_BYTES_MAX, mapped ? " peer=\"%s:%u\"" : " peer=\"[%s]:%u\"",
                     host, ntohs(ip->sin6_port));
    }
}

void kld_refused_log(const struct kld_exchange *exchange, enum kld_status status) {
    enum kld_log_level level;
    char caller[CALLER_BYTES_MAX], peer[PEER_BYTES_MAX], traced[TRACED_BYTES_MAX];
    struct kld_trace trace;
    if (!wants_line(exchange->gateway, status, &level))
        return;
    kld_trace_take(exchange, &trace);
    describe_caller(exchange->caller, caller);
    describe_peer(exchange, status, peer);
    describe_trace(&trace, traced);
    kld_log(level, "refused", "transport=http%s%s status=%s%s", caller, peer,
            kld_status_name(status), traced);
}

/* Behind its status: a request that the server gave up is cancelled, too. */
static const char *reason(const struct kld_exchange *exchange) {
    return exchange->too_slow ? " reason=slow" : "";
}

void kld_infer_log(const struct kld_infer *infer, enum kld_status status, uint64_t total_ns) {
    enum kld_log_level level;
    if (!wants_line(infer->gateway, status, &level))
        return;
    const struct kld_result *result = &infer->result;
    uint64_t started_ns = infer->exchange->started_ns;
    char asked[160], caller[CALLER_BYTES_MAX], peer[PEER_BYTES_MAX], traced[TRACED_BYTES_MAX];
    describe(infer, asked, sizeof asked);
    describe_caller(infer->caller, caller);
    describe_peer(infer->exchange, status, peer);
    describe_trace(&infer->trace, traced);
    kld_log(level, "request",
            "transport=http%s%s status=%s%s%s total_us=%" PRIu64 " receive_us=%" PRIu64
            " queue_us=%" PRIu64 " copy_us=%" PRIu64 " kernel_us=%" PRIu64 "%s",
            caller, peer, kld_status_name(status), reason(infer->exchange), asked, total_ns / 1000,
            infer->body_end_ns ? (infer->body_end_ns - started_ns) / 1000 : total_ns / 1000,
            result->queue_ns / 1000, result->copy_ns / 1000, result->kernel_ns / 1000, traced);
}

/* " shape="2x3x1000" dtype=FP32 bytes=24000", in quotes so that one of rank 1 is no number in JSON.
 */
static void describe_tensor(const struct kld_stored *tensor, char *ret_text, size_t capacity) {
    size_t used = (size_t)snprintf(ret_text, capacity, " shape=\"");
    for (uint32_t i = 0; i < tensor->rank && used < capacity; i++)
        used += (size_t)snprintf(ret_text + used, capacity - used, "%s%" PRIu64, i ? "x" : "",
                                 tensor->shape[i]);
    if (used < capacity)
        snprintf(ret_text + used, capacity - used, "\" dtype=%s bytes=%" PRIu64,
                 kld_dtype_name(tensor->dtype), tensor->bytes);
}

void kld_tensor_log(const struct kld_exchange *exchange, const struct kld_trace *trace,
                    const char *op, enum kld_status status, const struct kld_stored *tensor,
                    uint64_t body_end_ns) {
    enum kld_log_level level;
    if (!wants_line(exchange->gateway, status, &level))
        return;
    uint64_t started_ns = exchange->started_ns, total_ns = uv_hrtime() - started_ns;
    char stored[48 + 21 * (KLD_RANK_MAX + 1)] = "", caller[CALLER_BYTES_MAX];
    char peer[PEER_BYTES_MAX], traced[TRACED_BYTES_MAX];
    if (tensor)
        describe_tensor(tensor, stored, sizeof stored);
    describe_caller(exchange->caller, caller);
    describe_peer(exchange, status, peer);
    describe_trace(trace, traced);
    kld_log(level, "request",
            "transport=http%s%s status=%s%s op=%s%s total_us=%" PRIu64 " receive_us=%" PRIu64 "%s",
            caller, peer, kld_status_name(status), reason(exchange), op, stored, total_ns / 1000,
            (body_end_ns ? body_end_ns - started_ns : total_ns) / 1000, traced);
}
