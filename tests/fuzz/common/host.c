/* host.c - see host.h. */
#include "tests/fuzz/common/host.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define IDLE_WAIT_NS 30000000000ull

void fuzz_host_open(struct fuzz_host *host, int count, char *const *settings, const char *path) {
    struct kld_error err;
    enum kld_config_action action;
    char *no_environment[] = {NULL};
    memset(host, 0, sizeof *host);
    require(kld_config_parse(count, settings, no_environment, &host->config, &action, &err) ==
            KLD_OK);
    fuzz_log_to_nowhere(host->config.log_level);
    require(kld_stats_create(&host->page, &host->stats_fds, &err) == KLD_OK);
    atomic_store(&host->page->workers, 1);
    host->stats = &host->page->worker[0];
    host->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    host->address.sun_family = AF_UNIX;
    if (path) {
        require(strlen(path) < sizeof host->address.sun_path);
        strcpy(host->address.sun_path, path);
        unlink(path);
    }
    host->address_bytes = path ? sizeof host->address : sizeof(sa_family_t);
    require(bind(host->listen_fd, (struct sockaddr *)&host->address, host->address_bytes) == 0);
    host->address_bytes = sizeof host->address;
    getsockname(host->listen_fd, (struct sockaddr *)&host->address, &host->address_bytes);
    require(listen(host->listen_fd, 64) == 0);
}

static void *run(void *user) {
    struct fuzz_host *host = user;
    kld_worker_run(&host->worker);
    fuzz_broken("the worker serves", __FILE__, __LINE__);
}

void fuzz_host_start(struct fuzz_host *host, const struct kld_backend *backend,
                     struct kld_device *device) {
    struct kld_error err;
    struct kld_device_options cpu = {.threads = 1, .pool_bytes_max = host->config.pool_bytes_max};
    if (!device) {
        require(kld_backend_find("cpu", &backend, &err) == KLD_OK);
        require(backend->device_open(&cpu, &device, &err) == KLD_OK);
    }
    struct kld_worker_options options = {.config = &host->config,
                                         .page = host->page,
                                         .backend = backend,
                                         .device = device,
                                         .listen_fd = host->listen_fd,
                                         .control_fd = -1};
    require(kld_worker_init(&host->worker, &options, &err) == KLD_OK);
    require(pthread_create(&host->thread, NULL, run, host) == 0);
}

uint64_t fuzz_host_stat(const struct fuzz_host *host, enum kld_stat stat) {
    return atomic_load(&host->stats->value[stat]);
}

/* What the loop's thread writes is read here without its knowledge: it is waited for. */
#define NOW(field) __atomic_load_n(&host->worker.field, __ATOMIC_ACQUIRE)

/* Also of those who had left before. */
static bool all_accepted(const struct fuzz_host *host) {
    return fuzz_host_stat(host, KLD_STAT_unix_clients_total) +
               atomic_load(&host->stats->rejected[KLD_REJECT_unix_clients_max]) >=
           host->connected;
}

static bool is_idle(const struct fuzz_host *host) {
    return all_accepted(host) && fuzz_host_stat(host, KLD_STAT_unix_clients) == 0 &&
           fuzz_host_stat(host, KLD_STAT_worker_requests_in_flight) == 0 &&
           fuzz_host_stat(host, KLD_STAT_worker_requests_queued) == 0 &&
           fuzz_host_stat(host, KLD_STAT_worker_regions) == 0 &&
           fuzz_host_stat(host, KLD_STAT_worker_region_bytes) == 0 &&
           fuzz_host_stat(host, KLD_STAT_pinned_bytes) == 0 &&
           fuzz_host_stat(host, KLD_STAT_pool_bytes) == 0 && NOW(sessions_count) == 0 &&
           NOW(queue.in_use) == 0 && NOW(refusals) == 0 && NOW(waits_running) == 0 &&
           NOW(publications_count) == 0 && NOW(cuda_files) == 0 &&
           kld_strays_count(host->worker.strays) == 0;
}

void fuzz_host_require_idle(const struct fuzz_host *host) {
    uint64_t until = fuzz_now_ns() + IDLE_WAIT_NS;
    for (unsigned us = 20; !is_idle(host) && fuzz_now_ns() < until; us += us < 1000 ? us : 0)
        fuzz_nap_us(us);
    require(fuzz_host_stat(host, KLD_STAT_unix_clients) == 0);
    require(fuzz_host_stat(host, KLD_STAT_worker_requests_in_flight) == 0);
    require(fuzz_host_stat(host, KLD_STAT_worker_regions) == 0);
    require(fuzz_host_stat(host, KLD_STAT_pinned_bytes) == 0);
    require(fuzz_host_stat(host, KLD_STAT_pool_bytes) == 0);
    require(NOW(sessions_count) == 0);
    require(NOW(publications_count) == 0);
    require(is_idle(host));
}

int fuzz_connect(struct fuzz_host *host) {
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    require(fd >= 0);
    require(connect(fd, (const struct sockaddr *)&host->address, host->address_bytes) == 0);
    host->connected++;
    return fd;
}

bool fuzz_send(int fd, const void *data, size_t bytes, const int *fds, unsigned count) {
    union {
        char space[CMSG_SPACE(sizeof(int) * 8)];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    require(count <= 8);
    if (count) {
        message.msg_control = control.space;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * count);
        struct cmsghdr *at = CMSG_FIRSTHDR(&message);
        at->cmsg_level = SOL_SOCKET;
        at->cmsg_type = SCM_RIGHTS;
        at->cmsg_len = CMSG_LEN(sizeof(int) * count);
        memcpy(CMSG_DATA(at), fds, sizeof(int) * count);
    }
    return sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)bytes;
}

int fuzz_receive(int fd, int ms, struct fuzz_packet *ret_packet) {
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    struct kld_error err;
    uint64_t request;
    unsigned frames;
    int ready;
    do /* libFuzzer has a timer, whose signal may come to this thread */
        ready = poll(&poll_fd, 1, ms);
    while (ready < 0 && errno == EINTR);
    if (ready <= 0)
        return -1;
    ssize_t bytes = recv(fd, ret_packet->data, sizeof ret_packet->data, MSG_DONTWAIT);
    if (bytes < 0 && errno == ECONNRESET) /* told once, before what there is to read */
        bytes = recv(fd, ret_packet->data, sizeof ret_packet->data, MSG_DONTWAIT);
    if (bytes < 0 && errno == EAGAIN)
        return -1;
    if (bytes <= 0)
        return 0;
    ret_packet->bytes = (size_t)bytes;
    require(kld_packet_check(ret_packet->data, (size_t)bytes, 0, 0, &frames, &request, &err) ==
            KLD_OK);
    return 1;
}
