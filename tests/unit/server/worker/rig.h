/* rig.h - a worker on a thread of the test, over the double of fake_device.h, and raw clients.
 * Every function here fails the test that calls it when something does not go as it must. */
#ifndef KLD_TESTS_WORKER_RIG_H
#define KLD_TESTS_WORKER_RIG_H

#include <pthread.h>
#include <sys/un.h>

#include "proto/wire.h"
#include "server/worker/worker.h"
#include "tests/unit/server/worker/fake_device.h"

#define RIG_ROWS 8 /* of the op that rig_submit() sends; FP32 */
#define RIG_CLASSES 16
#define RIG_TENSOR_BYTES (RIG_ROWS * RIG_CLASSES * 4)
#define RIG_REGION_BYTES (3 * RIG_TENSOR_BYTES) /* predictions, targets, gradient */

struct rig {
    struct kld_config config; /* defaults; a test may change it between init and start */
    struct kld_stats_page *page;
    struct kld_stats *stats; /* of the worker, in it */
    struct fake_device fake;
    struct kld_worker worker;
    struct sockaddr_un address;
    socklen_t address_bytes;
    int listen_fd, control[2];
    uint32_t orphan_ms, orphan_dead_ms, health_ms, stuck_ms; /* of the worker's options */
    uint64_t host_bytes;                                     /* as they */
    uint32_t cpus;                                           /* as they */
    pthread_t thread;
    int exit_status;
};

void rig_init(struct rig *rig);
void rig_start(struct rig *rig);
/* SIGTERM; the worker's exit status once it has ended. */
int rig_end(struct rig *rig);
/* Waits for the worker to end by itself. */
int rig_wait(struct rig *rig);
/* After rig_end() or rig_wait(): releases all, and checks that nothing of the device leaked. */
void rig_done(struct rig *rig);

int rig_connect(const struct rig *rig); /* no HELLO yet */
int rig_client(const struct rig *rig);  /* with HELLO and WELCOME */
/* As that, but connected by a process of this user that is not the test's. Others than our own
 * need root. */
int rig_client_of(const struct rig *rig, uid_t uid);
/* The supervisor says that the gateway is the process with this number, and was heard. */
void rig_name_gateway(struct rig *rig, pid_t pid, int pidfd);
void rig_send(int fd, const union kld_frame *frame);
void rig_send_fds(int fd, const void *data, size_t bytes, const int *fds, int count);
/* One frame; fails after a minute, or at the end of the connection. */
void rig_receive(int fd, union kld_frame *ret_frame);
ssize_t rig_recv(int fd, void *data, size_t bytes, int flags);
/* The next frame answers `request` with this type, or with an ERROR of this status. */
void rig_expect(int fd, uint64_t request, enum kld_frame_type type, union kld_frame *ret_frame);
void rig_expect_error(int fd, uint64_t request, enum kld_status status, const char *text);
/* The connection has ended (or 0: has not) within ms. */
int rig_ended(int fd, int ms);

/* EVENT_ADD of the kind, with the rig's device and, to be waited for, a handle; and the event. */
void rig_event_frame(union kld_frame *frame, uint64_t request, uint32_t kind);
uint64_t rig_add_event(int fd, uint32_t kind);
int rig_memfd(uint64_t bytes); /* sealed against shrinking */
void rig_region_frame(union kld_frame *frame, uint64_t request, uint32_t kind, uint64_t bytes);
uint64_t rig_region(int fd, uint64_t bytes); /* a memfd region; its id */
/* The same, with what comes of it: an error with this text in it, or KLD_OK; 0 where it is none. */
uint64_t rig_memfd_region(int fd, uint64_t bytes, enum kld_status status, const char *text);
/* A forward KL with gradient, all in one region. */
void rig_op(union kld_frame *frame, uint64_t request, uint64_t region);
void rig_submit(int fd, uint64_t request, uint64_t region);
void rig_plain(int fd, enum kld_frame_type type, uint64_t request);
void rig_cancel(int fd, uint64_t request, uint64_t target);
void rig_drop(int fd, uint64_t request, uint64_t region);
/* *number reaches at least `value` (exactly, for rig_until_is) within 10 s. */
void rig_until(atomic_int *number, int value);
void rig_until_is(atomic_int *number, int value);
void rig_until_stat(struct rig *rig, enum kld_stat stat, uint64_t value);

#endif
