/* notify.h - what the supervisor and the service manager above it tell each other, as systemd
 * defines it (sd_notify(3), sd_listen_fds(3)): state and signs of life go up, listening sockets
 * come down. All of it is in the environment; where that says nothing, nothing here does anything.
 * The environment is cleared of it, since it is not meant for children. Supervisor's thread. */
#ifndef KLD_SERVER_SUPERVISOR_NOTIFY_H
#define KLD_SERVER_SUPERVISOR_NOTIFY_H

#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <uv.h>

#include "proto/status.h"
#include "server/config.h"

#define KLD_NOTIFY_DUE_MAX 8

struct kld_notify {
    int fd; /* -1: nobody listens */
    uv_timer_t again;
    uint64_t again_ms;
    char *due[KLD_NOTIFY_DUE_MAX]; /* not yet said, the oldest first */
    uint32_t due_count;
    struct sockaddr_un address;
    socklen_t address_bytes;
    uint64_t watchdog_ms; /* so often the manager wants a sign of life; 0: never */
};

/* Never fails: a manager that cannot be told is logged, and is none. */
void kld_notify_open(struct kld_notify *notify);
/* Before the first is sent. */
void kld_notify_start(struct kld_notify *notify, uv_loop_t *loop);
/* Lines of NAME=VALUE, as "READY=1". What a manager with much to do has no room for is said again
 * until it has. */
void kld_notify_send(struct kld_notify *notify, const char *text);
void kld_notify_close(struct kld_notify *notify);

/* Listening sockets that the manager opened and keeps over our restarts; -1: none. */
struct kld_inherited {
    int http, metrics, unix_socket[KLD_DEVICES_MAX];
};

/* A TCP socket is for HTTP, or for --metrics-http if it is named "metrics"; SOCK_SEQPACKET sockets
 * with a path are for the workers, in order. Anything else is an error: it would be left unserved.
 */
enum kld_status kld_inherited_take(struct kld_inherited *ret_inherited, struct kld_error *err);

#endif
