/* recent.c - a ring of seconds and a ring of errors (recent.h). Any thread: under a mutex. */
#include "server/gateway/recent.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#define SECONDS 64
#define NS_OF_SECOND UINT64_C(1000000000)

struct kld_recent {
    uv_mutex_t mutex; /* of all below */
    struct {
        uint64_t second, requests;
    } ring[SECONDS];
    struct kld_recent_error error[KLD_RECENT_ERRORS];
    uint64_t errors; /* ever; the last is at (errors - 1) % KLD_RECENT_ERRORS */
};

struct kld_recent *kld_recent_open(void) {
    struct kld_recent *recent = calloc(1, sizeof *recent);
    if (recent && uv_mutex_init(&recent->mutex) != 0) {
        free(recent);
        return NULL;
    }
    return recent;
}

void kld_recent_close(struct kld_recent *recent) {
    if (!recent)
        return;
    uv_mutex_destroy(&recent->mutex);
    free(recent);
}

void kld_recent_request(struct kld_recent *recent, uint64_t now_ns) {
    uint64_t second = now_ns / NS_OF_SECOND;
    uv_mutex_lock(&recent->mutex);
    if (recent->ring[second % SECONDS].second != second) {
        recent->ring[second % SECONDS].second = second;
        recent->ring[second % SECONDS].requests = 0;
    }
    recent->ring[second % SECONDS].requests++;
    uv_mutex_unlock(&recent->mutex);
}

double kld_recent_rate(struct kld_recent *recent, uint64_t now_ns, unsigned seconds) {
    uint64_t now = now_ns / NS_OF_SECOND, sum = 0;
    uv_mutex_lock(&recent->mutex);
    for (int i = 0; i < SECONDS; i++) {
        uint64_t second = recent->ring[i].second;
        if (recent->ring[i].requests && second < now && now - second <= seconds)
            sum += recent->ring[i].requests;
    }
    uv_mutex_unlock(&recent->mutex);
    return (double)sum / seconds;
}

static void put(char to[KLD_RECENT_TEXT_MAX], size_t *length, char c) {
    if (*length < KLD_RECENT_TEXT_MAX - 1)
        to[(*length)++] = c;
}

/* What a client sent stands between quotation marks, and may hold some itself. */
static void keep_ours(const char *text, char to[KLD_RECENT_TEXT_MAX]) {
    const char *first = strchr(text, '\''), *last = strrchr(text, '\'');
    size_t length = 0;
    for (const char *at = text; *at; at++) {
        bool digit = *at >= '0' && *at <= '9';
        if (digit && (length == 0 || to[length - 1] != '#'))
            put(to, &length, '#');
        else if (!digit && *at >= 0x20 && *at < 0x7f)
            put(to, &length, *at);
        if (at != first || last == first)
            continue;
        for (int i = 0; i < 3; i++)
            put(to, &length, '.');
        at = last - 1;
        first = NULL;
    }
    to[length] = '\0';
}

void kld_recent_error(struct kld_recent *recent, uint64_t now_ns, const struct kld_error *error) {
    uv_mutex_lock(&recent->mutex);
    struct kld_recent_error *to = &recent->error[recent->errors++ % KLD_RECENT_ERRORS];
    to->at_ns = now_ns;
    to->status = error->status;
    keep_ours(error->text[0] ? error->text : kld_status_text(error->status), to->text);
    uv_mutex_unlock(&recent->mutex);
}

unsigned kld_recent_errors(struct kld_recent *recent,
                           struct kld_recent_error ret_errors[KLD_RECENT_ERRORS]) {
    uv_mutex_lock(&recent->mutex);
    uint64_t errors = recent->errors;
    unsigned count = errors < KLD_RECENT_ERRORS ? (unsigned)errors : KLD_RECENT_ERRORS;
    for (unsigned i = 0; i < count; i++)
        ret_errors[i] = recent->error[(errors - 1 - i) % KLD_RECENT_ERRORS];
    uv_mutex_unlock(&recent->mutex);
    return count;
}
