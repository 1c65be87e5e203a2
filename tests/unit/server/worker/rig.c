/* rig.c - see rig.h. The worker runs on a thread of its own, the test's clients on the test's. */
#include "tests/unit/server/worker/rig.h"

#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "server/log.h"
#include "server/role.h"

#define WAIT_S 60

void rig_init(struct rig *rig) {
    memset(rig, 0, sizeof *rig);
    struct kld_error err;
    enum kld_config_action action;
    char *no_environment[] = {NULL};
    ck_assert_int_eq(kld_config_parse(0, NULL, no_environment, &rig->config, &action, &err),
                     KLD_OK);
    ck_assert_int_eq(kld_log_init("worker0", "error", "text", &err), KLD_OK);
    struct kld_stats_fds fds;
    ck_assert_int_eq(kld_stats_create(&rig->page, &fds, &err), KLD_OK);
    rig->page->workers = 1;
    rig->stats = &rig->page->worker[0];
    kld_stats_close(&fds);
    fake_device_init(&rig->fake);
    rig->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    rig->address.sun_family = AF_UNIX; /* a name of the kernel's choice */
    ck_assert_int_eq(bind(rig->listen_fd, (struct sockaddr *)&rig->address, sizeof(sa_family_t)),
                     0);
    rig->address_bytes = sizeof rig->address;
    getsockname(rig->listen_fd, (struct sockaddr *)&rig->address, &rig->address_bytes);
    ck_assert_int_eq(listen(rig->listen_fd, 64), 0);
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, rig->control), 0);
}

static void *worker_thread(void *argument) {
    struct rig *rig = argument;
    rig->exit_status = kld_worker_run(&rig->worker);
    return NULL;
}

static void device_dead(const struct kld_worker_options *options) {
    struct fake_device *fake = (struct fake_device *)options->device;
    atomic_fetch_add(&fake->dead_told, 1);
}

void rig_start(struct rig *rig) {
    struct kld_worker_options options = {.config = &rig->config,
                                         .page = rig->page,
                                         .backend = &fake_backend,
                                         .device = &rig->fake.head,
                                         .listen_fd = rig->listen_fd,
                                         .orphan_ms = rig->orphan_ms,
                                         .orphan_dead_ms = rig->orphan_dead_ms,
                                         .health_ms = rig->health_ms,
                                         .stuck_ms = rig->stuck_ms,
                                         .host_bytes = rig->host_bytes,
                                         .cpus = rig->cpus,
                                         .device_dead = device_dead,
                                         .control_fd = rig->control[1]};
    struct kld_error err;
    ck_assert_int_eq(kld_worker_init(&rig->worker, &options, &err), KLD_OK);
    ck_assert_int_eq(pthread_create(&rig->thread, NULL, worker_thread, rig), 0);
}

int rig_wait(struct rig *rig) {
    ck_assert_int_eq(pthread_join(rig->thread, NULL), 0);
    return rig->exit_status;
}

int rig_end(struct rig *rig) {
    kill(getpid(), SIGTERM);
    return rig_wait(rig);
}

void rig_done(struct rig *rig) {
    kld_worker_done(&rig->worker);
    ck_assert_int_eq(atomic_load(&rig->fake.memories), 0);
    ck_assert_int_eq(atomic_load(&rig->fake.streams), 0);
    ck_assert_int_eq(atomic_load(&rig->fake.events), 0);
    ck_assert_ptr_null(TAILQ_FIRST(&rig->worker.publications));
    ck_assert_int_eq(atomic_load(&rig->fake.order_broken), 0);
    ck_assert_uint_eq(atomic_load(&rig->stats->value[KLD_STAT_worker_requests_in_flight]), 0);
    ck_assert_uint_eq(atomic_load(&rig->stats->value[KLD_STAT_worker_requests_queued]), 0);
    ck_assert_uint_eq(atomic_load(&rig->stats->value[KLD_STAT_pinned_bytes]), 0);
    ck_assert_uint_eq(atomic_load(&rig->stats->value[KLD_STAT_worker_regions]), 0);
    ck_assert_uint_eq(atomic_load(&rig->stats->value[KLD_STAT_worker_region_bytes]), 0);
    ck_assert_uint_eq(atomic_load(&rig->stats->value[KLD_STAT_unix_clients]), 0);
    kld_stats_detach(rig->page);
    close(rig->listen_fd);
    close(rig->control[0]);
    close(rig->control[1]);
}

int rig_connect(const struct rig *rig) {
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(connect(fd, (const struct sockaddr *)&rig->address, rig->address_bytes), 0);
    struct timeval limit = {.tv_sec = WAIT_S};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return fd;
}

static void greet(int fd) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_HELLO, 1);
    frame.as_HELLO.version_min = frame.as_HELLO.version_max = 1;
    strcpy(frame.as_HELLO.client_name, "test");
    rig_send(fd, &frame);
    rig_expect(fd, 1, KLD_FRAME_WELCOME, &frame);
}

int rig_client(const struct rig *rig) {
    int fd = rig_connect(rig);
    greet(fd);
    return fd;
}

int rig_client_of(const struct rig *rig, uid_t uid) {
    char byte, space[CMSG_SPACE(sizeof(int))];
    struct iovec part = {.iov_base = &byte, .iov_len = 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    int way[2], fd;
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, way), 0);
    pid_t child = fork();
    if (child == 0) {
        if (uid != geteuid() && setuid(uid) != 0)
            _exit(1);
        fd = rig_connect(rig);
        rig_send_fds(way[1], "", 1, &fd, 1);
        _exit(0);
    }
    ck_assert_int_eq(recvmsg(way[0], &message, MSG_CMSG_CLOEXEC), 1);
    ck_assert_ptr_nonnull(CMSG_FIRSTHDR(&message));
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    ck_assert_int_eq(waitpid(child, NULL, 0), child);
    close(way[0]);
    close(way[1]);
    greet(fd);
    return fd;
}

void rig_name_gateway(struct rig *rig, pid_t pid, int pidfd) {
    struct kld_child_order order = {.kind = KLD_ORDER_GATEWAY, .pid = pid};
    struct kld_child_order alive = {.kind = KLD_ORDER_ALIVE};
    char answer[8];
    rig_send_fds(rig->control[0], &order, sizeof order, &pidfd, pidfd >= 0);
    ck_assert_int_eq(send(rig->control[0], &alive, sizeof alive, 0), sizeof alive);
    ck_assert_int_eq(recv(rig->control[0], answer, sizeof answer, 0), 1);
}

void rig_send_fds(int fd, const void *data, size_t bytes, const int *fds, int count) {
    union {
        char space[CMSG_SPACE(sizeof(int) * 16)];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (count) {
        message.msg_control = control.space;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
        struct cmsghdr *at = CMSG_FIRSTHDR(&message);
        at->cmsg_level = SOL_SOCKET;
        at->cmsg_type = SCM_RIGHTS;
        at->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        memcpy(CMSG_DATA(at), fds, sizeof(int) * (size_t)count);
    }
    ck_assert_int_eq(sendmsg(fd, &message, MSG_NOSIGNAL), (ssize_t)bytes);
}

void rig_send(int fd, const union kld_frame *frame) {
    rig_send_fds(fd, frame, frame->header.length, NULL, 0);
}

/* recv() as it is without a time limit: with one, it ends with EINTR if the process is stopped and
 * goes on. */
ssize_t rig_recv(int fd, void *data, size_t bytes, int flags) {
    ssize_t got;
    do
        got = recv(fd, data, bytes, flags);
    while (got < 0 && errno == EINTR);
    return got;
}

void rig_receive(int fd, union kld_frame *ret_frame) {
    struct kld_error err = {.status = KLD_OK};
    uint64_t request;
    ssize_t bytes = rig_recv(fd, ret_frame, sizeof *ret_frame, 0);
    ck_assert_msg(bytes > 0, "no frame: %s", bytes ? strerror(errno) : "end of connection");
    enum kld_status status = kld_frame_check(ret_frame, (size_t)bytes, 0, 0, &request, &err);
    ck_assert_msg(status == KLD_OK, "a reply of wrong form: %s", err.text);
}

void rig_expect(int fd, uint64_t request, enum kld_frame_type type, union kld_frame *ret_frame) {
    union kld_frame frame;
    rig_receive(fd, &frame);
    ck_assert_msg(frame.header.type == type && frame.header.request == request,
                  "expected %s for %llu, got %s for %llu: %s", kld_frame_name((uint16_t)type),
                  (unsigned long long)request, kld_frame_name(frame.header.type),
                  (unsigned long long)frame.header.request,
                  frame.header.type == KLD_FRAME_ERROR ? frame.as_ERROR.text : "");
    if (ret_frame)
        *ret_frame = frame;
}

void rig_expect_error(int fd, uint64_t request, enum kld_status status, const char *text) {
    union kld_frame frame;
    rig_expect(fd, request, KLD_FRAME_ERROR, &frame);
    ck_assert_msg(frame.as_ERROR.status == (uint32_t)status && strstr(frame.as_ERROR.text, text),
                  "expected %s with '%s', got %s: %s", kld_status_name(status), text,
                  kld_status_name((enum kld_status)frame.as_ERROR.status), frame.as_ERROR.text);
}

int rig_ended(int fd, int ms) {
    char byte;
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    return poll(&poll_fd, 1, ms) == 1 && recv(fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) <= 0;
}

int rig_memfd(uint64_t bytes) {
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(ftruncate(fd, (off_t)bytes), 0);
    ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    return fd;
}

void rig_event_frame(union kld_frame *frame, uint64_t request, uint32_t kind) {
    kld_frame_init(frame, KLD_FRAME_EVENT_ADD, request);
    frame->as_EVENT_ADD.kind = kind;
    memset(frame->as_EVENT_ADD.device_uuid, 7, KLD_WIRE_UUID_BYTES);
    if (kind == KLD_EVENT_READY)
        memset(frame->as_EVENT_ADD.ipc_handle, 3, KLD_WIRE_IPC_HANDLE_BYTES);
}

uint64_t rig_add_event(int fd, uint32_t kind) {
    union kld_frame frame;
    rig_event_frame(&frame, 910, kind);
    rig_send(fd, &frame);
    rig_expect(fd, 910, KLD_FRAME_EVENT, &frame);
    ck_assert_int_eq(frame.as_EVENT.ipc_handle[63], kind == KLD_EVENT_DONE ? 0x5a : 0);
    return frame.as_EVENT.event;
}

void rig_region_frame(union kld_frame *frame, uint64_t request, uint32_t kind, uint64_t bytes) {
    kld_frame_init(frame, KLD_FRAME_REGION_ADD, request);
    frame->as_REGION_ADD.kind = kind;
    frame->as_REGION_ADD.bytes = bytes;
}

uint64_t rig_memfd_region(int fd, uint64_t bytes, enum kld_status status, const char *text) {
    union kld_frame frame;
    int memfd = rig_memfd(bytes);
    rig_region_frame(&frame, 900, KLD_REGION_MEMFD, bytes);
    rig_send_fds(fd, &frame, frame.header.length, &memfd, 1);
    close(memfd);
    if (status) {
        rig_expect_error(fd, 900, status, text);
        return 0;
    }
    rig_expect(fd, 900, KLD_FRAME_REGION, &frame);
    ck_assert_uint_eq(frame.as_REGION.bytes, bytes);
    return frame.as_REGION.region;
}

uint64_t rig_region(int fd, uint64_t bytes) { return rig_memfd_region(fd, bytes, KLD_OK, NULL); }

void rig_op(union kld_frame *frame, uint64_t request, uint64_t region) {
    kld_frame_init(frame, KLD_FRAME_SUBMIT, request);
    struct kld_frame_submit *submit = &frame->as_SUBMIT;
    submit->rank = 2;
    submit->shape[0] = RIG_ROWS;
    submit->shape[1] = RIG_CLASSES;
    const enum kld_slot slots[3] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS,
                                    KLD_SLOT_GRAD_PREDICTIONS};
    for (uint64_t i = 0; i < 3; i++)
        submit->tensor[slots[i]] = (struct kld_wire_tensor){
            .dtype = KLD_DTYPE_FP32, .region = region, .offset_bytes = i * RIG_TENSOR_BYTES};
}

void rig_submit(int fd, uint64_t request, uint64_t region) {
    union kld_frame frame;
    rig_op(&frame, request, region);
    rig_send(fd, &frame);
}

void rig_plain(int fd, enum kld_frame_type type, uint64_t request) {
    union kld_frame frame;
    kld_frame_init(&frame, type, request);
    rig_send(fd, &frame);
}

void rig_cancel(int fd, uint64_t request, uint64_t target) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_CANCEL, request);
    frame.as_CANCEL.target = target;
    rig_send(fd, &frame);
}

void rig_drop(int fd, uint64_t request, uint64_t region) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_REGION_DROP, request);
    frame.as_REGION_DROP.region = region;
    rig_send(fd, &frame);
}

static void nap(void) {
    struct timespec time = {.tv_nsec = 1000000};
    nanosleep(&time, NULL);
}

void rig_until(atomic_int *number, int value) {
    for (int i = 0; i < WAIT_S * 1000 && atomic_load(number) < value; i++)
        nap();
    ck_assert_int_ge(atomic_load(number), value);
}

void rig_until_is(atomic_int *number, int value) {
    for (int i = 0; i < WAIT_S * 1000 && atomic_load(number) != value; i++)
        nap();
    ck_assert_int_eq(atomic_load(number), value);
}

void rig_until_stat(struct rig *rig, enum kld_stat stat, uint64_t value) {
    for (int i = 0; i < WAIT_S * 1000 && atomic_load(&rig->stats->value[stat]) != value; i++)
        nap();
    ck_assert_uint_eq(atomic_load(&rig->stats->value[stat]), value);
}
