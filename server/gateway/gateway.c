/* gateway.c - kld_gateway_main(): one libuv loop that serves HTTP and asks the worker.
 * Puts the parts together, drains on SIGTERM, ends with the supervisor. Computes nothing and knows
 * no GPU: untrusted bytes are parsed in this process. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "server/gateway/auth.h"
#include "server/gateway/gateway.h"
#include "server/gateway/http.h"
#include "server/gateway/infer.h"
#include "server/gateway/links.h"
#include "server/gateway/routes.h"
#include "server/gateway/sandbox.h"
#include "server/gateway/shm.h"
#include "server/gateway/staging.h"
#include "server/gateway/tensors.h"
#include "server/gateway/tls.h"
#include "server/log.h"
#include "server/role.h"

#define DRAIN_LOOK_MS 10

struct process {
    struct kld_gateway gateway;
    uv_signal_t terminate;
    uv_poll_t control; /* end of file: the supervisor is gone */
    uv_timer_t drain;
    uint64_t drain_until_ns; /* uv_hrtime() */
    bool control_open, ending;
};

static void mail_closed(struct kld_mail *mail) {}

/* Uploads and requests whose exchange has ended may still be in a pool or on the thread pool, and
 * use tensors and buffers when they come back: those are freed after the loop (close_rest()). */
static void links_closed(void *user) {
    struct process *process = user;
    kld_tensors_stop(process->gateway.tensors);
    for (uint32_t i = 0; i < process->gateway.pools; i++)
        kld_pool_stop(process->gateway.pool[i]);
    kld_waiters_close(&process->gateway);
    kld_mail_close(&process->gateway.mail, mail_closed);
    uv_close((uv_handle_t *)&process->terminate, NULL);
    uv_close((uv_handle_t *)&process->drain, NULL);
    if (process->control_open)
        uv_close((uv_handle_t *)&process->control, NULL);
}

static void http_closed(void *user) {
    struct process *process = user;
    kld_links_close(process->gateway.links, links_closed, process);
}

static void end(struct process *process) {
    if (process->ending)
        return;
    process->ending = true;
    uv_timer_stop(&process->drain);
    kld_http_close(process->gateway.http, http_closed, process);
}

static void look_at_drain(uv_timer_t *timer) {
    struct process *process = timer->data;
    if (process->gateway.infers == 0 || uv_hrtime() >= process->drain_until_ns)
        end(process);
}

static void start_drain(struct process *process) {
    if (process->gateway.draining)
        return;
    process->gateway.draining = true;
    process->drain_until_ns = uv_hrtime() + process->gateway.config->drain_ms * 1000000;
    kld_log(KLD_LOG_INFO, "draining", "requests=%u", process->gateway.infers);
    uv_timer_start(&process->drain, look_at_drain, 0, DRAIN_LOOK_MS);
}

static void terminated(uv_signal_t *signal, int number) { start_drain(signal->data); }

static void control_readable(uv_poll_t *poll, int status, int events) {
    struct process *process = poll->data;
    char unused[64];
    ssize_t got = read(KLD_FD_CONTROL, unused, sizeof unused);
    if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR)))
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

/* A connection is a descriptor: as many as the system lets this process have. What is above that
 * waits in the backlog. */
static void raise_descriptors(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static enum kld_status open_pools(struct kld_gateway *gateway, struct kld_error *err) {
    enum kld_status status = KLD_OK;
    uint32_t workers = atomic_load(&gateway->page->workers);
    for (; gateway->pools < workers && status == KLD_OK; gateway->pools++)
        status = kld_pool_open(gateway->config, gateway->pools, gateway->staging,
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

/* Files are read, then the process bounds itself, then there may be threads. */
static enum kld_status open_parts(struct process *process, struct kld_error *err) {
    struct kld_gateway *gateway = &process->gateway;
    enum kld_status status;
    struct kld_tls tls;
    raise_descriptors();
    if ((status = kld_auth_open(gateway->config, &gateway->auth, err)) ||
        (status = kld_tls_read(gateway->config, &tls, err)) ||
        (status = set_nonblocking(KLD_FD_LISTEN, err)) || (status = enter_sandbox(gateway, err)) ||
        (status = kld_mail_open(&gateway->mail, &gateway->loop, err)) ||
        (status = kld_waiters_open(gateway, err)) ||
        (status = kld_staging_open(gateway->config->staging_bytes_max, &gateway->staging, err)) ||
        (status = open_pools(gateway, err)) ||
        (status = kld_tensors_open(&gateway->loop, gateway->config, gateway->stats,
                                   &gateway->tensors, err)) ||
        (status =
             kld_shm_open(&gateway->loop, gateway->config, gateway->stats, &gateway->shm, err)) ||
        (status = kld_links_open(&gateway->loop, gateway->config, gateway->page, gateway->staging,
                                 &gateway->links, err)))
        return status;
    status = kld_http_open(gateway, KLD_FD_LISTEN, &tls, &kld_routes_handler, &gateway->http, err);
    kld_tls_forget(&tls);
    return status;
}

static void watch(struct process *process) {
    uv_loop_t *loop = &process->gateway.loop;
    uv_timer_init(loop, &process->drain);
    uv_signal_init(loop, &process->terminate);
    uv_signal_start(&process->terminate, terminated, SIGTERM);
    process->terminate.data = process->drain.data = process;
    process->control_open = uv_poll_init(loop, &process->control, KLD_FD_CONTROL) == 0;
    process->control.data = process;
    if (process->control_open)
        uv_poll_start(&process->control, UV_READABLE, control_readable);
}

/* After the loop: nothing is on its way any more. */
static void close_rest(struct kld_gateway *gateway) {
    kld_tensors_close(gateway->tensors);
    for (uint32_t i = 0; i < gateway->pools; i++)
        kld_pool_close(gateway->pool[i]);
    kld_shm_close(gateway->shm);
    kld_auth_close(gateway->auth);
    kld_staging_close(gateway->staging);
}

int kld_gateway_main(const struct kld_child *child) {
    struct kld_error error = {.status = KLD_OK};
    struct process *process = calloc(1, sizeof *process);
    if (!process)
        return EXIT_FAILURE;
    struct kld_gateway *gateway = &process->gateway;
    gateway->config = child->config;
    gateway->page = child->page;
    gateway->stats = child->stats;
    kld_stats_reset_role(child->stats, "gateway");
    if (uv_loop_init(&gateway->loop) != 0) {
        kld_error_set(&error, KLD_NO_MEMORY, "the event loop cannot be started");
    } else if (watch(process), open_parts(process, &error) == KLD_OK) {
        kld_child_report_send(KLD_OK, "", 0, "");
        uv_run(&gateway->loop, UV_RUN_DEFAULT);
        close_rest(gateway);
        uv_loop_close(&gateway->loop);
        free(process);
        return EXIT_SUCCESS;
    }
    /* The process ends; what was opened ends with it. */
    kld_log(KLD_LOG_ERROR, "cannot start", "reason=\"%s\"", error.text);
    kld_child_report_send(error.status, "", 0, error.text);
    return EXIT_FAILURE;
}
