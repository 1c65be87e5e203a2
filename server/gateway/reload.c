/* reload.c - checks what the supervisor handed over on uv's pool, then swaps it in (reload.h). What
 * each part does with requests that are on their way is the part's: auth.h, tls.h, regions.h. The
 * first loop's thread; check() on uv's pool. */
#include "server/gateway/reload.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "server/gateway/auth.h"
#include "server/gateway/regions.h"
#include "server/gateway/tls.h"
#include "server/log.h"

#define LOOK_MS 500 /* for regions of callers who left */

static void look(uv_timer_t *timer) {
    struct kld_gateway_reload *reload = timer->data;
    if (!kld_regions_drop_left(reload->gateway->regions, &reload->gateway->loop))
        uv_timer_stop(timer);
}

void kld_gateway_reload_open(struct kld_gateway_reload *reload, struct kld_gateway *gateway) {
    memset(reload, 0, sizeof *reload);
    reload->gateway = gateway;
    reload->fd = -1;
    uv_timer_init(&gateway->loop, &reload->timer);
    reload->timer.data = reload->work.data = reload;
}

void kld_gateway_reload_close(struct kld_gateway_reload *reload) {
    uv_close((uv_handle_t *)&reload->timer, NULL);
}

/* A key of 4096 bits takes milliseconds. */
static void check(uv_work_t *work) {
    struct kld_gateway_reload *reload = work->data;
    const struct kld_gateway *gateway = reload->gateway;
    struct kld_secrets secrets;
    struct kld_error *err = &reload->error;
    reload->tokens = NULL;
    reload->keys = NULL;
    err->status = kld_secrets_unpack(reload->fd, &secrets, err);
    if (err->status)
        return;
    err->status = kld_tls_read(gateway->tls, &secrets, &reload->keys, err);
    if (err->status == KLD_OK)
        err->status = kld_auth_read(gateway->auth, secrets.tokens, &reload->tokens, err);
    kld_secrets_forget(&secrets);
}

/* What was taken over, for the supervisor's line. */
static void describe(const struct kld_auth_change *change, bool tls, int64_t until,
                     char text[KLD_ERROR_TEXT_MAX]) {
    size_t used = 0;
    text[0] = '\0';
    if (change->tokens)
        used =
            (size_t)snprintf(text, KLD_ERROR_TEXT_MAX,
                             "tokens=%" PRIu32 " tokens_added=%" PRIu32 " tokens_removed=%" PRIu32,
                             change->tokens, change->added, change->removed);
    struct tm utc;
    time_t at = (time_t)until;
    char day[24] = "";
    if (tls && gmtime_r(&at, &utc) && strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%SZ", &utc))
        snprintf(text + used, KLD_ERROR_TEXT_MAX - used, "%scertificate_until=%s", used ? " " : "",
                 day);
}

static void swap(struct kld_gateway_reload *reload, char text[KLD_ERROR_TEXT_MAX]) {
    struct kld_gateway *gateway = reload->gateway;
    struct kld_auth_change change;
    bool tls = reload->keys != NULL;
    int64_t until = tls ? kld_tls_until(reload->keys) : 0;
    kld_tls_replace(gateway->tls, reload->keys);
    kld_auth_replace(gateway->auth, reload->tokens, &change);
    kld_log_set_level(reload->order.log_level);
    describe(&change, tls, until, text);
    if (change.removed && !uv_is_closing((uv_handle_t *)&reload->timer))
        uv_timer_start(&reload->timer, look, 0, LOOK_MS);
}

static void checked(uv_work_t *work, int result) {
    struct kld_gateway_reload *reload = work->data;
    char text[KLD_ERROR_TEXT_MAX];
    const struct kld_gateway *gateway = reload->gateway;
    close(reload->fd);
    reload->fd = -1;
    if (kld_tls_end_if_broken(gateway->tls, gateway->common->draining)) {
        kld_tls_release(reload->keys);
        kld_tokens_release(reload->tokens);
        return; /* to the supervisor its end is the answer: the next one is asked */
    }
    if (reload->error.status) {
        kld_tls_release(reload->keys);
        kld_tokens_release(reload->tokens);
        kld_child_reload_send(reload->error.status, reload->error.text);
        return;
    }
    swap(reload, text);
    kld_child_reload_send(KLD_OK, text);
}

void kld_gateway_reload_begin(struct kld_gateway_reload *reload,
                              const struct kld_child_order *order, int fd) {
    if (reload->fd >= 0 || fd < 0) { /* the supervisor does not do that */
        kld_child_reload_send(KLD_INTERNAL, "the gateway was told to reload out of turn");
        if (fd >= 0)
            close(fd);
        return;
    }
    reload->fd = fd;
    reload->order = *order;
    reload->error.status = KLD_OK;
    uv_queue_work(&reload->gateway->loop, &reload->work, check, checked);
}
