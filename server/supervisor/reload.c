/* reload.c - SIGHUP: reads configuration and files again, has the gateway check and take over what
 * is in them, then tells everybody the log level; or, where anything is wrong, leaves all as it
 * was. It does not look into the files. Supervisor's loop thread; read_again() on uv's pool,
 * because a file may lie on a disk that does not answer. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "server/log.h"
#include "server/supervisor/supervisor.h"

static enum kld_status gather(const struct kld_config *config, int *ret_fd, struct kld_error *err) {
    struct kld_secrets secrets;
    enum kld_status status = kld_secrets_read(config, &secrets, err);
    if (status)
        return status;
    status = kld_secrets_pack(&secrets, ret_fd, err);
    kld_secrets_forget(&secrets);
    return status;
}

enum kld_status kld_reload_open(struct kld_supervisor *supervisor, const struct kld_config *config,
                                const struct kld_start *start, struct kld_error *err) {
    struct kld_reload *reload = &supervisor->reload;
    reload->start = start;
    reload->in_use = *config;
    reload->secrets_fd = reload->next_fd = -1;
    return supervisor->http.fd < 0 ? KLD_OK : gather(config, &reload->secrets_fd, err);
}

void kld_reload_close(struct kld_supervisor *supervisor) {
    if (supervisor->reload.secrets_fd >= 0)
        close(supervisor->reload.secrets_fd);
    supervisor->reload.secrets_fd = -1;
}

/* ---- How it ends ----------------------------------------------------------------------------- */

static void forget_next(struct kld_reload *reload) {
    if (reload->next_fd >= 0)
        close(reload->next_fd);
    reload->next_fd = -1;
    reload->state = KLD_RELOAD_IDLE;
}

static void finish(struct kld_supervisor *supervisor, const char *problem) {
    forget_next(&supervisor->reload);
    if (supervisor->draining)
        return; /* the service manager knows of that */
    kld_supervisor_tell_ready(supervisor, problem);
    kld_reload_proceed(supervisor);
}

static void fail(struct kld_supervisor *supervisor, const char *reason) {
    kld_log(KLD_LOG_ERROR, "reload failed",
            "reason=\"%s\" text=\"nothing was changed: what was in use stays\"", reason);
    kld_stats_add(&supervisor->page->common, KLD_STAT_config_reloads_failed_total, 1);
    kld_stats_set(&supervisor->page->common, KLD_STAT_config_last_reload_failed, 1);
    finish(supervisor, "the last reload failed, see the log");
}

/* details: of the gateway; "": there is none. */
static void commit(struct kld_supervisor *supervisor, const char *details) {
    struct kld_reload *reload = &supervisor->reload;
    char unused[KLD_KEPT_TEXT_MAX];
    if (reload->next_fd >= 0) {
        close(reload->secrets_fd);
        reload->secrets_fd = reload->next_fd;
        reload->next_fd = -1;
    }
    reload->in_use = reload->next;
    /* Of that one more is settled than was configured, and what is settled stays. */
    kld_config_adopt(&supervisor->config, &reload->next, unused, sizeof unused);
    if (!kld_log_wants(KLD_LOG_INFO)) /* the line below is at the louder of the two levels */
        kld_log_set_level(supervisor->config.log_level);
    kld_log(KLD_LOG_INFO, "reloaded", "log_level=%s%s%s", supervisor->config.log_level,
            *details ? " " : "", details);
    kld_log_set_level(supervisor->config.log_level);
    for (uint32_t i = 0; i < supervisor->workers; i++)
        if (!kld_watched_order(&supervisor->worker[i], KLD_ORDER_LOG_LEVEL,
                               supervisor->config.log_level, -1) &&
            supervisor->worker[i].state == KLD_CHILD_READY)
            kld_log(KLD_LOG_WARN, "log level not told", "child=%s", supervisor->worker[i].name);
    if (reload->kept[0])
        kld_log(KLD_LOG_WARN, "needs a restart",
                "settings=%s text=\"these have other values now, which a restart will use; only "
                "%s are taken over while the server runs, and tokens, TLS and client certificates "
                "not turned on or off\"",
                reload->kept, KLD_CONFIG_RELOADED);
    kld_stats_add(&supervisor->page->common, KLD_STAT_config_reloads_total, 1);
    kld_stats_set(&supervisor->page->common, KLD_STAT_config_last_reload_failed, 0);
    kld_stats_set(&supervisor->page->common, KLD_STAT_config_reload_success_timestamp_seconds,
                  (uint64_t)time(NULL));
    finish(supervisor, NULL);
}

/* ---- How it goes ----------------------------------------------------------------------------- */

static void read_again(uv_work_t *work) {
    struct kld_supervisor *supervisor = work->data;
    struct kld_reload *reload = &supervisor->reload;
    const struct kld_start *start = reload->start;
    struct kld_config parsed;
    enum kld_config_action action;
    reload->error.status = kld_config_parse(start->argc, start->argv, start->environment, &parsed,
                                            &action, &reload->error);
    if (reload->error.status)
        return;
    reload->next = reload->in_use;
    kld_config_adopt(&reload->next, &parsed, reload->kept, sizeof reload->kept);
    if (supervisor->http.fd >= 0) /* constant since the start */
        reload->error.status = gather(&reload->next, &reload->next_fd, &reload->error);
}

static void on_read(uv_work_t *work, int result) {
    struct kld_supervisor *supervisor = work->data;
    struct kld_reload *reload = &supervisor->reload;
    if (supervisor->draining) {
        kld_log(KLD_LOG_INFO, "reload given up", "reason=\"the server is ending\"");
        forget_next(reload);
    } else if (reload->error.status) {
        fail(supervisor, reload->error.text);
    } else if (supervisor->http.fd < 0) {
        commit(supervisor, "");
    } else if (supervisor->gateway.state != KLD_CHILD_READY) {
        forget_next(reload); /* it is just being replaced: once more, with the next one */
        kld_reload_want(supervisor);
    } else if (kld_watched_order(&supervisor->gateway, KLD_ORDER_RELOAD, reload->next.log_level,
                                 reload->next_fd)) {
        reload->state = KLD_RELOAD_ASKING;
    } else {
        fail(supervisor, "the gateway cannot be told");
    }
}

void kld_reload_answered(struct kld_supervisor *supervisor, const struct kld_child_report *report) {
    if (supervisor->reload.state != KLD_RELOAD_ASKING)
        return;
    if (report->status == KLD_OK)
        commit(supervisor, report->text);
    else
        fail(supervisor, report->text);
}

/* Its successor has what was in use before; so nothing was changed. */
void kld_reload_gateway_gone(struct kld_supervisor *supervisor) {
    if (supervisor->reload.state == KLD_RELOAD_ASKING)
        fail(supervisor, "the gateway ended before it had taken over");
}

void kld_reload_proceed(struct kld_supervisor *supervisor) {
    struct kld_reload *reload = &supervisor->reload;
    bool up = supervisor->announced &&
              (supervisor->http.fd < 0 || supervisor->gateway.state == KLD_CHILD_READY);
    if (!reload->wanted || !up || reload->state != KLD_RELOAD_IDLE || supervisor->draining)
        return;
    char state[64];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    snprintf(state, sizeof state, "RELOADING=1\nMONOTONIC_USEC=%" PRIu64,
             (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000);
    kld_notify_send(&supervisor->notify, state);
    reload->wanted = false;
    reload->state = KLD_RELOAD_READING;
    reload->error.status = KLD_OK;
    reload->work.data = supervisor;
    uv_queue_work(&supervisor->loop, &reload->work, read_again, on_read);
}

void kld_reload_want(struct kld_supervisor *supervisor) {
    supervisor->reload.wanted = true;
    kld_reload_proceed(supervisor);
}
