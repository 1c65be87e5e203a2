/* reload.c - SIGHUP: reads configuration and files again, has the gateway check and take over what
 * is in them, then tells everybody the log level; or, where anything is wrong, leaves all as it
 * was. It does not look into the files. Supervisor's loop thread; read_again() on uv's pool,
 * because a file may lie on a disk that does not answer. Such a reading is given up after
 * reload_ms; what it holds is its own, so that the next one does not wait for it. A gateway that
 * does not answer for so long is killed. */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "server/log.h"
#include "server/supervisor/supervisor.h"

#define RETELL_MS 50

/* The pool's until on_read(). */
struct kld_reading {
    uv_work_t work;
    struct kld_supervisor *supervisor;
    const struct kld_start *start;
    struct kld_inherited inherited;
    bool http;              /* there are files to read */
    struct kld_config next; /* first what is in use */
    int next_fd;
    char kept[KLD_KEPT_TEXT_MAX];
    struct kld_error error;
};

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
    uv_timer_stop(&reload->patience);
    if (reload->next_fd >= 0)
        close(reload->next_fd);
    reload->next_fd = -1;
    reload->state = KLD_RELOAD_IDLE;
}

static void give_up(struct kld_reload *reload) {
    kld_log(KLD_LOG_INFO, "reload given up", "reason=\"the server is ending\"");
    forget_next(reload);
}

static void finish(struct kld_supervisor *supervisor, const char *problem) {
    forget_next(&supervisor->reload);
    supervisor->reload.repeated = false;
    if (supervisor->draining)
        return; /* the service manager knows of that */
    kld_supervisor_tell_ready(supervisor, problem);
    kld_reload_proceed(supervisor);
}

static void fail(struct kld_supervisor *supervisor, const char *reason) {
    kld_stats_add(&supervisor->page->common, KLD_STAT_config_reloads_failed_total, 1);
    kld_stats_set(&supervisor->page->common, KLD_STAT_config_last_reload_failed, 1);
    kld_log(KLD_LOG_ERROR, "reload failed",
            "reason=\"%s\" text=\"nothing was changed: what was in use stays\"", reason);
    finish(supervisor, "the last reload failed, see the log");
}

static void on_retell(uv_timer_t *timer);

/* False: there is one that is due for it, and could not be sent to just now. One that has ended is
 * not: its successor is started with it. */
static bool tell_level(struct kld_supervisor *supervisor) {
    bool all = true;
    for (uint32_t i = 0; i < supervisor->workers; i++) {
        struct kld_watched *worker = &supervisor->worker[i];
        if (worker->level_due)
            worker->level_due =
                !kld_watched_order(worker, KLD_ORDER_LOG_LEVEL, supervisor->config.log_level, -1) &&
                errno != EPIPE;
        all = all && !worker->level_due;
    }
    if (!all)
        uv_timer_start(&supervisor->reload.retell, on_retell, RETELL_MS, 0);
    return all;
}

static void on_retell(uv_timer_t *timer) {
    struct kld_supervisor *supervisor = timer->data;
    if (!supervisor->draining)
        tell_level(supervisor);
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
    for (uint32_t i = 0; i < supervisor->workers; i++)
        supervisor->worker[i].level_due = true;
    bool told = tell_level(supervisor);
    kld_stats_add(&supervisor->page->common, KLD_STAT_config_reloads_total, 1);
    kld_stats_set(&supervisor->page->common, KLD_STAT_config_last_reload_failed, 0);
    kld_stats_set(&supervisor->page->common, KLD_STAT_config_reload_success_timestamp_seconds,
                  (uint64_t)time(NULL));
    /* "reloaded" comes last: who waits for that line finds the figures and the warnings there. */
    if (!kld_log_wants(KLD_LOG_INFO)) /* these lines are at the louder of the two levels */
        kld_log_set_level(supervisor->config.log_level);
    if (!told)
        kld_log(KLD_LOG_WARN, "log level not told",
                "text=\"a worker cannot be sent to; it is told again\"");
    if (reload->kept[0])
        kld_log(KLD_LOG_WARN, "needs a restart",
                "settings=%s text=\"these have other values now, which a restart will use; only "
                "%s are taken over while the server runs, and tokens, TLS and client certificates "
                "not turned on or off\"",
                reload->kept, KLD_CONFIG_RELOADED);
    kld_log(KLD_LOG_INFO, "reloaded", "log_level=%s%s%s", supervisor->config.log_level,
            *details ? " " : "", details);
    kld_log_set_level(supervisor->config.log_level);
    finish(supervisor, NULL);
}

/* ---- How it goes ----------------------------------------------------------------------------- */

static void read_again(uv_work_t *work) {
    struct kld_reading *reading = work->data;
    const struct kld_start *start = reading->start;
    struct kld_config parsed;
    enum kld_config_action action;
    reading->error.status = kld_config_parse(start->argc, start->argv, start->environment, &parsed,
                                             &action, &reading->error);
    if (!reading->error.status) /* of all of them: some are the next start's alone */
        reading->error.status = kld_settings_check(&parsed, &reading->inherited, &reading->error);
    if (reading->error.status)
        return;
    kld_config_adopt(&reading->next, &parsed, reading->kept, sizeof reading->kept);
    if (reading->http)
        reading->error.status = gather(&reading->next, &reading->next_fd, &reading->error);
}

/* Alive, it could still take over what nobody else knows of; its successor is asked anew. */
static void on_no_answer(uv_timer_t *timer) {
    struct kld_supervisor *supervisor = timer->data;
    if (supervisor->draining) { /* whose limit is another one */
        give_up(&supervisor->reload);
        return;
    }
    kld_log(KLD_LOG_ERROR, "reload not answered",
            "child=gateway text=\"it did not answer within %" PRIu64 " ms (reload_ms)\"",
            supervisor->config.reload_ms);
    kld_watched_signal(&supervisor->gateway, SIGKILL);
}

static void be_patient(struct kld_supervisor *supervisor, uv_timer_cb on_over) {
    if (supervisor->config.reload_ms)
        uv_timer_start(&supervisor->reload.patience, on_over, supervisor->config.reload_ms, 0);
}

/* The files are read: the gateway's turn. */
static void ask(struct kld_supervisor *supervisor) {
    struct kld_reload *reload = &supervisor->reload;
    if (supervisor->http.fd < 0) {
        commit(supervisor, "");
    } else if (supervisor->gateway.state != KLD_CHILD_READY) {
        forget_next(reload); /* it is just being replaced: once more, with the next one */
        kld_reload_want(supervisor);
    } else if (kld_watched_order(&supervisor->gateway, KLD_ORDER_RELOAD, reload->next.log_level,
                                 reload->next_fd) ||
               errno == EPIPE || errno == ECONNRESET) {
        reload->state = KLD_RELOAD_ASKING; /* or it has ended, of which we are about to hear */
        be_patient(supervisor, on_no_answer);
    } else {
        fail(supervisor, "the gateway cannot be told");
    }
}

static void on_read(uv_work_t *work, int result) {
    struct kld_reading *reading = work->data;
    struct kld_supervisor *supervisor = reading->supervisor;
    struct kld_reload *reload = &supervisor->reload;
    reload->readings--;
    if (reload->reading != reading) { /* given up */
        if (reading->next_fd >= 0)
            close(reading->next_fd);
        free(reading);
        return;
    }
    struct kld_error error = reading->error;
    uv_timer_stop(&reload->patience);
    reload->reading = NULL;
    reload->next = reading->next;
    reload->next_fd = reading->next_fd;
    memcpy(reload->kept, reading->kept, sizeof reload->kept);
    free(reading);
    if (supervisor->draining)
        give_up(reload);
    else if (error.status)
        fail(supervisor, error.text);
    else
        ask(supervisor);
}

static void on_impatient(uv_timer_t *timer) {
    struct kld_supervisor *supervisor = timer->data;
    char reason[KLD_ERROR_TEXT_MAX];
    supervisor->reload.reading = NULL;
    if (supervisor->draining) {
        give_up(&supervisor->reload);
        return;
    }
    snprintf(reason, sizeof reason, "the files were not read within %" PRIu64 " ms (reload_ms)",
             supervisor->config.reload_ms);
    fail(supervisor, reason);
}

static void read_begin(struct kld_supervisor *supervisor) {
    struct kld_reload *reload = &supervisor->reload;
    struct kld_reading *reading =
        reload->readings < KLD_READINGS_MAX ? calloc(1, sizeof *reading) : NULL;
    reload->state = KLD_RELOAD_READING;
    if (!reading) {
        fail(supervisor, reload->readings ? "earlier ones still wait for files that do not answer"
                                          : "out of memory");
        return;
    }
    reading->supervisor = supervisor;
    reading->start = reload->start;
    reading->inherited = supervisor->inherited;
    reading->http = supervisor->http.fd >= 0;
    reading->next = reload->in_use;
    reading->next_fd = -1;
    reading->work.data = reading;
    reload->reading = reading;
    reload->readings++;
    be_patient(supervisor, on_impatient);
    uv_queue_work(&supervisor->loop, &reading->work, read_again, on_read);
}

void kld_reload_init(struct kld_supervisor *supervisor) {
    uv_timer_init(&supervisor->loop, &supervisor->reload.patience);
    uv_timer_init(&supervisor->loop, &supervisor->reload.retell);
    supervisor->reload.patience.data = supervisor->reload.retell.data = supervisor;
}

void kld_reload_answered(struct kld_supervisor *supervisor, const struct kld_child_report *report) {
    if (supervisor->reload.state != KLD_RELOAD_ASKING)
        return;
    if (report->status == KLD_OK)
        commit(supervisor, report->text);
    else
        fail(supervisor, report->text);
}

/* Its successor has what was in use before; so nothing was changed, and it is asked in its turn.
 * But should that one end, too, it may well be what it is asked. */
void kld_reload_gateway_gone(struct kld_supervisor *supervisor) {
    struct kld_reload *reload = &supervisor->reload;
    if (reload->state != KLD_RELOAD_ASKING)
        return;
    if (supervisor->draining) {
        give_up(reload);
    } else if (reload->repeated) {
        fail(supervisor, "the gateway ended before it had taken over, and so did the next one");
    } else {
        reload->repeated = true;
        forget_next(reload);
        kld_reload_want(supervisor);
    }
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
    read_begin(supervisor);
}

void kld_reload_want(struct kld_supervisor *supervisor) {
    supervisor->reload.wanted = true;
    kld_reload_proceed(supervisor);
}
