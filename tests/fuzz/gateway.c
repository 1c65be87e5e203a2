/* gateway.c - libFuzzer over what the gateway reads that is neither JSON nor libmicrohttpd's: the
 * file of tokens and a caller's header, the query of an upload, Accept-Encoding, traceparent.
 *
 * Input: 1 byte that chooses; then, for tokens, the header up to a NUL and the file; for an upload
 * its four arguments, each ended by a NUL and absent where it is empty; else the header. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/kld.h"
#include "server/gateway/auth.h"
#include "server/gateway/compress.h"
#include "server/gateway/trace.h"
#include "server/gateway/upload_query.h"
#include "tests/fuzz/common/fuzz.h"

#define LIFETIME_MAX 3600000
#define DEVICES 3

/* Up to a NUL, of which there is one at the end. */
static const char *next(const char **at, const char *end) {
    const char *text = *at;
    if (text >= end)
        return "";
    *at += strlen(text) + 1;
    return text;
}

static void tokens(const char *at, const char *end) {
    static struct kld_config config = {.token_requests_max = 1};
    struct kld_auth *auth = NULL;
    struct kld_caller *caller = NULL;
    struct kld_error err;
    const char *header = next(&at, end);
    size_t left = at < end ? (size_t)(end - at) : 0;
    char *text = calloc(1, left + 1);
    unsigned rights = 0;
    require(text != NULL);
    memcpy(text, at, left);
    enum kld_status status = kld_auth_open(&config, text, &auth, &err);
    free(text);
    if (status) {
        require_error(status, &err);
        return;
    }
    if ((status = kld_auth_find(auth, header, &caller, &rights, &err)))
        require_error(status, &err);
    else
        require(caller->name[0] && rights & KLD_RIGHT_ANY);
    require(kld_auth_find(auth, NULL, &caller, &rights, &err) == KLD_UNAUTHENTICATED);
    kld_auth_close(auth);
}

static void query(const char *at, const char *end) {
    const char *text[4];
    struct kld_upload_tensor tensor;
    struct kld_error err;
    for (int i = 0; i < 4; i++) {
        text[i] = next(&at, end);
        text[i] = *text[i] ? text[i] : NULL;
    }
    const struct kld_upload_query asked = {text[0], text[1], text[2], text[3]};
    enum kld_status status = kld_upload_query_read(&asked, LIFETIME_MAX, DEVICES, &tensor, &err);
    if (status) {
        require_error(status, &err);
        return;
    }
    uint64_t elements = 1;
    require(tensor.rank >= 1 && tensor.rank <= KLD_RANK_MAX);
    for (uint32_t i = 0; i < tensor.rank; i++)
        require(tensor.shape[i] && !__builtin_mul_overflow(elements, tensor.shape[i], &elements));
    require(elements <= KLD_ELEMENTS_MAX &&
            tensor.bytes == elements * kld_dtype_bytes((enum kld_dtype)tensor.dtype));
    require(tensor.lifetime_ms >= 1 && tensor.lifetime_ms <= LIFETIME_MAX);
    require(tensor.device < DEVICES || tensor.device == UINT32_MAX);
    require((text[2] != NULL) || tensor.lifetime_ms == LIFETIME_MAX);
}

/* What is taken is what the recommendation allows, and is handed on in full. */
static void trace(const char *header) {
    static const struct kld_trace_context none;
    struct kld_trace trace;
    struct kld_trace_context context;
    bool there = kld_trace_read(header, &trace);
    require(strlen(trace.id) == (there ? KLD_TRACE_ID_DIGITS : 0));
    require(strlen(trace.span) == (there ? KLD_TRACE_SPAN_DIGITS : 0));
    kld_trace_pass(&trace, &context);
    require((memcmp(context.id, none.id, sizeof none.id) != 0) == there);
    require((memcmp(context.span, none.span, sizeof none.span) != 0) == there);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (!bytes)
        return 0;
    char *text = malloc(bytes);
    require(text != NULL);
    memcpy(text, data + 1, bytes - 1);
    text[bytes - 1] = 0;
    switch (data[0] % 4) {
    case 0: tokens(text, text + bytes - 1); break;
    case 1: query(text, text + bytes - 1); break;
    case 2: require(kld_coding_name(kld_coding_choose(text)) != NULL); break;
    default: trace(text);
    }
    free(text);
    return 0;
}
