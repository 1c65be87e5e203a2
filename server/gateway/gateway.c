/* gateway.c - kld_gateway_main(): http_threads libuv loops that serve HTTP and ask the workers.
 * Puts the parts together, drains on SIGTERM, ends with the supervisor. Computes nothing and knows
 * no GPU: untrusted bytes are parsed in this process. The main thread, which is the first loop's;
 * read_close(), read_end() and what they call on the loop that they are for. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/cpus.h"
#include "proto/oip.h"
#include "server/descriptors.h"
#include "server/gateway/accept.h"
#include "server/gateway/auth.h"
#include "server/gateway/deadline.h"
#include "server/gateway/gateway.h"
#include "server/gateway/http.h"
#include "server/gateway/infer.h"
#include "server/gateway/hosts.h"
#include "server/gateway/links.h"
#include "server/gateway/recent.h"
#include "server/gateway/regions.h"
#include "server/gateway/reload.h"
#include "server/gateway/roll.h"
#include "server/gateway/routes.h"
#include "server/gateway/sandbox.h"
#include "server/gateway/staging.h"
#include "server/gateway/tensors.h"
#include "server/gateway/tls.h"
#include "server/gateway/trace.h"
#include "server/gateway/wait.h"
#include "server/log.h"
#include "server/role.h"
#include "server/signals.h"
#include "server/uv_loop.h"
#include "server/uv_pool.h"

#define DRAIN_LOOK_MS 10
#define LINKED_LOOK_MS 1    /* at start, while the links are not made yet, ... */
#define LINKED_MS_MAX 1000  /* ... so long at most */
#define HTTP_THREADS_MAX 64 /* as config.c bounds it */

struct process;

/* A loop, its parts and its thread. The first one's is the main thread. */
struct loop {
    struct kld_gateway gateway;
    struct process *process;
    uv_thread_t thread;
    struct kld_letter close, end; /* to this loop */
    struct kld_letter closed;     /* to the first one: has no connection any more */
};

struct process {
    struct kld_gateway_common common;
    struct loop *loop;                       /* common.loops of them */
    struct kld_acceptor *acceptor, *metrics; /* metrics: NULL without metrics_http */
    struct kld_roll *roll;                   /* for signs of life */
    uint32_t running;                        /* while it ends: loops that have connections yet */
    uv_signal_t terminate;
    uv_poll_t control; /* end of file: the supervisor is gone */
    uv_timer_t drain;
    uv_timer_t report; /* until the supervisor is told that this process serves */
    struct kld_gateway_reload reload;
    uint64_t drain_until_ns, report_until_ns; /* uv_hrtime() */
    bool ending;
};

static void mail_closed(struct kld_mail *mail) {}

static void close_loop(struct loop *loop) {
    kld_waiters_close(&loop->gateway);
    kld_deadlines_close(&loop->gateway);
    kld_failed_lines_close(&loop->gateway.failed_lines);
    kld_mail_close(&loop->gateway.mail, mail_closed);
}

static void read_end(struct kld_letter *letter) {
    close_loop((struct loop *)(void *)((char *)letter - offsetof(struct loop, end)));
}

/* No loop has a connection any more. Uploads and requests whose exchange has ended may still be in
 * a pool or on the thread pool, and use tensors and buffers when they come back: those are freed
 * after the loops (close_rest()). A pool has posted all its letters when it has stopped, and a
 * thread that was joined posts no more: only then may the mail of who reads them be closed. */
static void finish(struct process *process) {
    struct kld_gateway *first = &process->loop[0].gateway;
    kld_tensors_stop(first->tensors);
    for (uint32_t i = 0; i < first->pools; i++)
        kld_pool_stop(first->pool[i]);
    for (uint32_t i = 1; i < process->common.loops; i++) {
        process->loop[i].end.read = read_end;
        kld_mail_post(&process->loop[i].gateway.mail, &process->loop[i].end);
        uv_thread_join(&process->loop[i].thread);
    }
    close_loop(&process->loop[0]);
    kld_signals_block(NULL); /* the other loops have ended */
    uv_close((uv_handle_t *)&process->terminate, NULL);
    uv_close((uv_handle_t *)&process->drain, NULL);
    uv_close((uv_handle_t *)&process->report, NULL);
    kld_gateway_reload_close(&process->reload);
    uv_close((uv_handle_t *)&process->control, NULL);
}

static void read_closed(struct kld_letter *letter) {
    struct loop *loop = (struct loop *)(void *)((char *)letter - offsetof(struct loop, closed));
    if (--loop->process->running == 0)
        finish(loop->process);
}

static void links_closed(void *user) {
    struct loop *loop = user;
    loop->closed.read = read_closed;
    kld_mail_post(&loop->process->loop[0].gateway.mail, &loop->closed);
}

static void http_closed(void *user) {
    struct loop *loop = user;
    kld_links_close(loop->gateway.links, links_closed, loop);
}

static void read_close(struct kld_letter *letter) {
    struct loop *loop = (struct loop *)(void *)((char *)letter - offsetof(struct loop, close));
    kld_http_close(loop->gateway.http, http_closed, loop);
}

static void end(struct process *process) {
    if (process->ending)
        return;
    process->ending = true;
    uv_timer_stop(&process->drain);
    uv_timer_stop(&process->report); /* it looks at what the loops are about to free */
    kld_acceptor_close(process->acceptor);
    if (process->metrics)
        kld_acceptor_close(process->metrics);
    process->running = process->common.loops;
    for (uint32_t i = 0; i < process->common.loops; i++) {
        process->loop[i].close.read = read_close;
        kld_mail_post(&process->loop[i].gateway.mail, &process->loop[i].close);
    }
}

static void look_at_drain(uv_timer_t *timer) {
    struct process *process = timer->data;
    if (process->common.infers == 0 || uv_hrtime() >= process->drain_until_ns)
        end(process);
}

static void start_drain(struct process *process) {
    if (atomic_exchange(&process->common.draining, true))
        return;
    uint64_t ms = process->loop[0].gateway.config->drain_ms;
    process->drain_until_ns = uv_hrtime() + ms * 1000000;
    kld_log(KLD_LOG_INFO, "draining", "requests=%u", process->common.infers);
    uv_timer_start(&process->drain, look_at_drain, 0, DRAIN_LOOK_MS);
}

static void terminated(uv_signal_t *signal, int number) { start_drain(signal->data); }

static void all_turn(void *user) { kld_child_alive_send(KLD_FD_CONTROL, KLD_ALIVE); }

/* The loop that hears it runs once all parts are open, and no more once the other loops' mail is
 * closed (finish()). */
static void control_readable(uv_poll_t *poll, int status, int events) {
    struct process *process = poll->data;
    struct kld_child_order order;
    int fd = -1;
    enum kld_heard heard = kld_child_hear(KLD_FD_CONTROL, &order, &fd);
    if (heard == KLD_HEARD_ORDER && order.kind == KLD_ORDER_RELOAD)
        kld_gateway_reload_begin(&process->reload, &order, fd);
    else if (heard == KLD_HEARD_ORDER)
        kld_roll_call(process->roll);
    if (heard != KLD_HEARD_END)
        return;
    uv_poll_stop(poll);
    end(process); /* without its supervisor nobody would ever end it */
}

static enum kld_status set_nonblocking(int fd, struct kld_error *err) {
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0)
        return kld_error_set(err, KLD_INTERNAL, "an inherited descriptor is not usable: %s",
                             strerror(errno));
    return KLD_OK;
}

/* A connection is a descriptor, and so are one that parts and a region. What is above the system's
 * limit waits in the backlog, or is refused. */
static uint64_t descriptors_wanted(const struct kld_config *config) {
    return KLD_DESCRIPTORS_OWN + config->http_connections_max + KLD_METRICS_RESERVE +
           config->http_parting_max + config->http_regions_max;
}

bool kld_gateway_is_draining(const struct kld_gateway *gateway) {
    return atomic_load(&gateway->common->draining) || atomic_load(&gateway->page->draining);
}

bool kld_gateway_is_ready(const struct kld_gateway *gateway) {
    return !kld_gateway_is_draining(gateway) && kld_stats_ready(gateway->page) &&
           kld_links_up(gateway->links);
}

const char *kld_gateway_why_not_ready(const struct kld_gateway *gateway) {
    if (kld_gateway_is_draining(gateway))
        return "the server is shutting down";
    return kld_gateway_is_ready(gateway) ? NULL : "the worker is not ready";
}

struct kld_pool *kld_pool_choose(struct kld_gateway *gateway) {
    uint32_t index = gateway->next_pool;
    for (uint32_t i = 0; i < gateway->pools; i++) {
        index = index + 1 < gateway->pools ? index + 1 : 0;
        if (atomic_load(&gateway->page->device[index].ready))
            break;
    }
    gateway->next_pool = index;
    return gateway->pool[index];
}

static enum kld_status open_pools(struct kld_gateway *gateway, struct kld_error *err) {
    enum kld_status status = KLD_OK;
    uint32_t workers = kld_stats_workers(gateway->page);
    for (; gateway->pools < workers && status == KLD_OK; gateway->pools++)
        status = kld_pool_open(gateway->config, gateway->pools, gateway->staging,
                               &gateway->page->worker[gateway->pools],
                               &gateway->page->device[gateway->pools],
                               &gateway->pool[gateway->pools], err);
    return status;
}

static enum kld_status enter_sandbox(const struct kld_gateway *gateway, struct kld_error *err) {
    bool files = false;
    if (!gateway->config->sandbox || !kld_sandbox_built()) {
        kld_log(KLD_LOG_WARN, "no sandbox", "reason=\"%s\"",
                kld_sandbox_built() ? "--sandbox=false" : "a build with a sanitizer");
        return KLD_OK;
    }
    enum kld_status status = kld_sandbox_enter(&files, err);
    if (status == KLD_OK && !files)
        kld_log(KLD_LOG_WARN, "files are not bounded", "reason=\"this kernel has no Landlock\"");
    return status;
}

/* What each loop has of its own. The others have what the first one has of everybody's. */
static enum kld_status open_loop(struct process *process, uint32_t index, struct kld_error *err) {
    struct kld_gateway *gateway = &process->loop[index].gateway;
    const struct kld_gateway *first = &process->loop[0].gateway;
    enum kld_status status;
    if (index) {
        gateway->common = first->common;
        gateway->config = first->config;
        gateway->page = first->page;
        gateway->stats = first->stats;
        gateway->auth = first->auth;
        gateway->tls = first->tls;
        gateway->regions = first->regions;
        gateway->staging = first->staging;
        gateway->tensors = first->tensors;
        gateway->pools = first->pools;
        memcpy(gateway->pool, first->pool, sizeof gateway->pool);
        gateway->index = gateway->next_pool = index;
        if (kld_uv_loop_open(&gateway->loop) != 0)
            return kld_error_set(err, KLD_NO_MEMORY, "an event loop cannot be started");
    }
    process->loop[index].process = process;
    kld_failed_lines_open(&gateway->failed_lines, &gateway->loop);
    if (!(gateway->memo = calloc(1, sizeof *gateway->memo)))
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    if ((status = kld_mail_open(&gateway->mail, &gateway->loop, err)) ||
        (status = kld_infer_spares_open(gateway, err)) ||
        (status = kld_waiters_open(gateway, err)) || (status = kld_deadlines_open(gateway, err)) ||
        (status = kld_links_open(&gateway->loop, gateway->config, gateway->page, gateway->staging,
                                 &gateway->links, err)))
        return status;
    return kld_http_open(gateway, &kld_routes_handler, &gateway->http, err);
}

static void run_loop(void *user) {
    struct loop *loop = user;
    uv_run(&loop->gateway.loop, UV_RUN_DEFAULT);
}

static enum kld_status open_loops(struct process *process, struct kld_error *err) {
    enum kld_status status = KLD_OK;
    for (uint32_t i = 0; i < process->common.loops && status == KLD_OK; i++)
        status = open_loop(process, i, err);
    for (uint32_t i = 1; i < process->common.loops && status == KLD_OK; i++)
        if (uv_thread_create(&process->loop[i].thread, run_loop, &process->loop[i]) != 0)
            status = kld_error_set(err, KLD_NO_MEMORY, "a thread cannot be started");
    struct kld_gateway *loops[HTTP_THREADS_MAX];
    for (uint32_t i = 0; i < process->common.loops; i++)
        loops[i] = &process->loop[i].gateway;
    if (status == KLD_OK)
        status = kld_roll_open(loops, process->common.loops, all_turn, NULL, &process->roll, err);
    if (status == KLD_OK)
        status = kld_acceptor_open(loops, process->common.loops, KLD_FD_LISTEN, false,
                                   &process->acceptor, err);
    if (status == KLD_OK && loops[0]->config->metrics_http[0])
        status = kld_acceptor_open(loops, process->common.loops, KLD_FD_METRICS, true,
                                   &process->metrics, err);
    return status; /* not KLD_OK: the process ends, and what was opened with it */
}

/* Who may ask, and over what; as the supervisor read it. */
static enum kld_status open_secrets(struct kld_gateway *gateway, struct kld_error *err) {
    struct kld_secrets secrets;
    enum kld_status status = kld_secrets_unpack(KLD_FD_SECRETS, &secrets, err);
    if (status)
        return status;
    status = kld_auth_open(gateway->config, secrets.tokens, &gateway->auth, err);
    if (status == KLD_OK)
        status = kld_tls_open(&secrets, &gateway->tls, err);
    kld_secrets_forget(&secrets);
    close(KLD_FD_SECRETS);
    return status;
}

/* The process bounds itself, then there may be threads. */
static enum kld_status open_parts(struct process *process, struct kld_error *err) {
    struct kld_gateway *gateway = &process->loop[0].gateway;
    enum kld_status status;
    if ((status = open_secrets(gateway, err)) || (status = set_nonblocking(KLD_FD_LISTEN, err)) ||
        (gateway->config->metrics_http[0] && (status = set_nonblocking(KLD_FD_METRICS, err))) ||
        (status = enter_sandbox(gateway, err)) ||
        (status = kld_staging_open(gateway->config->staging_bytes_max, gateway->stats,
                                   &gateway->staging, err)) ||
        (status = open_pools(gateway, err)) ||
        (status = kld_tensors_open(&gateway->loop, gateway->config, gateway->stats,
                                   &gateway->tensors, err)) ||
        (status = kld_regions_open(gateway->config, gateway->stats, &gateway->regions, err)) ||
        (status = kld_uv_pool_try(err)))
        return status;
    gateway->common->hosts_matter = kld_hosts_matter(gateway->config, KLD_FD_LISTEN);
    if (gateway->config->metrics_http[0])
        gateway->common->metrics_hosts_matter = kld_hosts_matter(gateway->config, KLD_FD_METRICS);
    kld_uv_pool_start(&gateway->loop);
    return open_loops(process, err);
}

static enum kld_status watch(struct process *process, struct kld_error *err) {
    uv_loop_t *loop = &process->loop[0].gateway.loop;
    uv_timer_init(loop, &process->drain);
    uv_timer_init(loop, &process->report);
    process->report.data = process;
    uv_signal_init(loop, &process->terminate);
    uv_signal_start(&process->terminate, terminated, SIGTERM);
    process->terminate.data = process->drain.data = process;
    kld_gateway_reload_open(&process->reload, &process->loop[0].gateway);
    if (uv_poll_init(loop, &process->control, KLD_FD_CONTROL) != 0)
        return kld_error_set(err, KLD_INTERNAL, "the supervisor cannot be heard");
    process->control.data = process;
    uv_poll_start(&process->control, UV_READABLE, control_readable);
    return KLD_OK;
}

static void report(uv_timer_t *timer) {
    struct process *process = timer->data;
    bool all = true;
    for (uint32_t i = 0; i < process->common.loops; i++)
        all = all && kld_links_up(process->loop[i].gateway.links);
    if (!all && uv_hrtime() < process->report_until_ns)
        return;
    uv_timer_stop(timer);
    kld_child_report_send(KLD_OK, "", 0, "");
}

/* So that who is told that the server serves finds it ready; but a worker that does not come is
 * nothing that another gateway would mend. */
static void report_once_linked(struct process *process) {
    process->report_until_ns = uv_hrtime() + LINKED_MS_MAX * UINT64_C(1000000);
    uv_timer_start(&process->report, report, 0, LINKED_LOOK_MS);
}

/* After the loops: nothing is on its way any more. */
static void close_rest(struct process *process) {
    struct kld_gateway *first = &process->loop[0].gateway;
    kld_roll_close(process->roll);
    kld_tensors_close(first->tensors);
    kld_regions_close(first->regions);
    for (uint32_t i = 0; i < first->pools; i++)
        kld_pool_close(first->pool[i]);
    kld_auth_close(first->auth);
    kld_tls_close(first->tls);
    kld_staging_close(first->staging);
    for (uint32_t i = 0; i < process->common.loops; i++) {
        uv_loop_close(&process->loop[i].gateway.loop);
        free(process->loop[i].gateway.memo);
        free(process->loop[i].gateway.spares);
    }
    kld_recent_close(process->common.recent);
    free(process->loop);
    free(process);
}

/* http_threads 0: a quarter of the CPUs, since client and worker want some too; at most 4. */
uint32_t kld_gateway_loops(const struct kld_config *config, uint32_t cpus) {
    uint64_t loops = config->http_threads ? config->http_threads : cpus / 4;
    if (!config->http_threads)
        loops = loops < 1 ? 1 : loops > 4 ? 4 : loops;
    return (uint32_t)(loops < config->http_connections_max ? loops : config->http_connections_max);
}

/* With fewer it polls in the way of the worker, or uses up a quota. */
bool kld_gateway_may_spin(uint32_t loops, uint32_t cpus) { return cpus / 4 >= loops; }

static struct process *make_process(const struct kld_child *child) {
    struct process *process = calloc(1, sizeof *process);
    uint32_t cpus = kld_cpus_usable(), loops = kld_gateway_loops(child->config, cpus);
    if (!process)
        return NULL;
    process->common.recent = kld_recent_open();
    process->loop = calloc(loops, sizeof *process->loop);
    if (!process->common.recent || !process->loop) {
        kld_recent_close(process->common.recent);
        free(process->loop);
        free(process);
        return NULL;
    }
    struct kld_gateway *gateway = &process->loop[0].gateway;
    process->common.loops = loops;
    if (kld_gateway_may_spin(loops, cpus))
        process->common.spin_ns = child->config->http_spin_us * 1000;
    gateway->common = &process->common;
    gateway->config = child->config;
    gateway->page = child->page;
    gateway->stats = child->stats;
    return process;
}

int kld_gateway_main(const struct kld_child *child) {
    struct kld_error error = {.status = KLD_OK};
    struct process *process = make_process(child);
    if (!process)
        return EXIT_FAILURE;
    uv_loop_t *loop = &process->loop[0].gateway.loop;
    kld_stats_reset_role(child->stats, "gateway");
    kld_stats_set(child->stats, KLD_STAT_http_threads, process->common.loops);
    kld_descriptors_raise(descriptors_wanted(child->config));
    if (kld_uv_loop_open(loop) != 0) {
        kld_error_set(&error, KLD_NO_MEMORY, "the event loop cannot be started");
    } else if (watch(process, &error) == KLD_OK && open_parts(process, &error) == KLD_OK) {
        report_once_linked(process);
        uv_run(loop, UV_RUN_DEFAULT);
        close_rest(process);
        return EXIT_SUCCESS;
    }
    /* The process ends; what was opened ends with it. */
    kld_log(KLD_LOG_ERROR, "cannot start", "reason=\"%s\"", error.text);
    kld_child_report_send(error.status, "", 0, error.text);
    return EXIT_FAILURE;
}
