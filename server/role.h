/* role.h - the three roles of the one binary, and what a child inherits from the supervisor.
 *
 * main.c parses the configuration and calls one of these; each returns the exit status of the
 * process. A child is the same program with a hidden first argument (--role=worker or
 * --role=gateway, --index=N) followed by every setting as a flag. Its descriptors have fixed
 * numbers. It asks the kernel for SIGKILL when the supervisor dies (PR_SET_PDEATHSIG), so that no
 * child is ever left behind.
 *
 * SIGTERM to a child: finish what is in flight (at most drain_ms), exit 0. SIGINT is ignored by
 * children (the terminal sends it to all; the supervisor decides). */
#ifndef KLD_SERVER_ROLE_H
#define KLD_SERVER_ROLE_H

#include <stdint.h>
#include <stdio.h>

#include "server/config.h"
#include "server/stats.h"

enum kld_child_fd {
    KLD_FD_LISTEN = 3,  /* listening socket: SOCK_SEQPACKET for a worker, TCP for the gateway */
    KLD_FD_STATS = 4,   /* memfd of struct kld_stats */
    KLD_FD_CONTROL = 5, /* SOCK_SEQPACKET pair to the supervisor; end of file: it is gone */
    KLD_FD_METRICS = 6, /* gateway with metrics_http: another listening TCP socket */
};

/* From child to supervisor on KLD_FD_CONTROL, when it serves. A child that cannot start sends
 * `status` and `text` instead of leaving the supervisor to guess, and exits with 1. A worker that
 * served and is about to end because a fault ended its context says KLD_DEVICE_LOST: none of its
 * kernels runs any more, so its successor need not wait until the driver has taken the lost process
 * apart. One whose kernels may still run says nothing: its end is waited for. */
struct kld_child_report {
    uint32_t status;  /* enum kld_status */
    uint32_t devices; /* worker: that its back end has; gateway: 0 */
    char backend[16]; /* worker: the back end it opened ("cpu", "cuda"); gateway: "" */
    char text[KLD_ERROR_TEXT_MAX];
};

struct kld_child {
    const struct kld_config *config; /* unix holds the resolved path of the first worker's socket */
    struct kld_stats_page *page;
    struct kld_stats *stats; /* its own block of the page */
    uint32_t index;          /* of the worker: its place in config->device */
};

int kld_supervisor_main(const struct kld_config *config);
int kld_worker_main(const struct kld_child *child);
int kld_gateway_main(const struct kld_child *child);

/* What the gateway's /metrics says, as a table in Markdown. */
void kld_metrics_table(FILE *out);

/* Sends the report. Failure to send is not an error: the supervisor may be gone, which
 * KLD_FD_CONTROL tells. */
void kld_child_report_send(enum kld_status status, const char *backend, uint32_t devices,
                           const char *text);

/* The answer to whatever the supervisor sends there: this loop still turns. */
void kld_child_alive_send(int control_fd);

#endif
