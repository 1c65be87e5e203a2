/* role.h - the three roles of the one binary, and what a child inherits from the supervisor.
 *
 * main.c parses the configuration and calls one of these; each returns the exit status of the
 * process. A child is the same program with a hidden first argument (--role=worker or
 * --role=gateway, --index=N) followed by every setting as a flag. Its descriptors have fixed
 * numbers. It asks the kernel for SIGKILL when the supervisor dies (PR_SET_PDEATHSIG), so that no
 * child is ever left behind.
 *
 * SIGTERM to a child: finish what is in flight (at most drain_ms), exit 0. SIGINT and SIGHUP are
 * ignored by children (the terminal sends them to all; the supervisor decides). */
#ifndef KLD_SERVER_ROLE_H
#define KLD_SERVER_ROLE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "server/config.h"
#include "server/stats.h"

enum kld_child_fd {
    KLD_FD_LISTEN = 3,  /* listening socket: SOCK_SEQPACKET for a worker, TCP for the gateway */
    KLD_FD_STATS = 4,   /* memfd of the counters of stats.h */
    KLD_FD_CONTROL = 5, /* SOCK_SEQPACKET pair to the supervisor; end of file: it is gone */
    KLD_FD_METRICS = 6, /* gateway with metrics_http: another listening TCP socket */
    KLD_FD_SECRETS = 7, /* gateway: memfd of secrets.h */
    KLD_FD_STATE = 8,   /* memfd of the other part of stats.h, which the gateway only reads */
};

/* From supervisor to child on KLD_FD_CONTROL, a packet each. */
enum kld_order_kind {
    KLD_ORDER_ALIVE = '?',     /* give a sign of life */
    KLD_ORDER_LOG_LEVEL = 'L', /* log at this level from now on */
    KLD_ORDER_RELOAD = 'R',    /* gateway: the same, and take over the memfd of secrets.h that comes
                                * with it; nothing of it all if it cannot be, and report */
    KLD_ORDER_GATEWAY = 'G', /* worker: the gateway is the process `pid`; a pidfd of it comes along
                              * where the kernel has one */
};

struct kld_child_order {
    char kind; /* enum kld_order_kind */
    char log_level[8];
    int32_t pid;
};

/* From child to supervisor on KLD_FD_CONTROL, when it serves. A child that cannot start sends
 * `status` and `text` instead of leaving the supervisor to guess, and exits with 1. A worker that
 * served and is about to end because a fault ended its context says KLD_DEVICE_LOST: none of its
 * kernels runs any more, so its successor need not wait until the driver has taken the lost process
 * apart. One whose kernels may still run says nothing: its end is waited for. */
enum kld_report_about { KLD_ABOUT_START, KLD_ABOUT_RELOAD };

struct kld_child_report {
    uint32_t about;                /* enum kld_report_about; all of the above is KLD_ABOUT_START */
    uint32_t status;               /* enum kld_status */
    uint32_t devices;              /* worker: that its back end has; gateway: 0 */
    char backend[16];              /* worker: the back end it opened ("cpu", "cuda"); gateway: "" */
    char text[KLD_ERROR_TEXT_MAX]; /* why not; of a reload: what was taken over, as log details */
};

struct kld_child {
    const struct kld_config *config; /* unix holds the resolved path of the first worker's socket */
    struct kld_stats_page *page;
    struct kld_stats *stats; /* its own block of the page */
    uint32_t index;          /* of the worker: its place in config->device */
};

/* How the supervisor was started, for when it reads its configuration again. Lasts as long. */
struct kld_start {
    int argc; /* without the program's name, as kld_config_parse() wants it */
    char *const *argv;
    char *const *environment;
    bool hangup_ignored; /* SIGHUP was, as nohup(1) does; it is blocked by now */
};

/* Of the supervisor, by custom that of wrong usage: settings that the next start would find as
 * wrong. EXIT_FAILURE is for what may be otherwise by then: files, addresses in use, devices. */
#define KLD_EXIT_SETTINGS 2

int kld_supervisor_main(const struct kld_config *config, const struct kld_start *start);
int kld_worker_main(const struct kld_child *child);
int kld_gateway_main(const struct kld_child *child);

/* What the gateway's /metrics says, as a table in Markdown. */
void kld_metrics_table(FILE *out);

/* Sends the report. Where that fails this process ends: the supervisor is gone, or would wait for
 * ever for what it was not told, and starts another. */
void kld_child_report_send(enum kld_status status, const char *backend, uint32_t devices,
                           const char *text);

void kld_child_reload_send(enum kld_status status, const char *text);

/* The answer to KLD_ORDER_ALIVE: this loop still turns. A packet of one byte. */
enum kld_alive {
    KLD_ALIVE = '!',
    KLD_ALIVE_STUCK = '#', /* but nothing else does: worker/health.h */
};
void kld_child_alive_send(int control_fd, enum kld_alive alive);

enum kld_heard { KLD_HEARD_ORDER, KLD_HEARD_NOTHING, KLD_HEARD_END };
/* One order, without waiting. ret_fd NULL: descriptors are not wanted; else *ret_fd is the caller's
 * to close, or -1. KLD_HEARD_END: the supervisor is gone. */
enum kld_heard kld_child_hear(int control_fd, struct kld_child_order *ret_order, int *ret_fd);

#endif
