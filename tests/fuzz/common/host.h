/* host.h - a whole worker on a thread of the fuzzer's process, as tests/unit/server/worker/rig.h
 * has it but without a test around it: it lasts from the first input to the last. And raw clients
 * of it. */
#ifndef KLD_TESTS_FUZZ_HOST_H
#define KLD_TESTS_FUZZ_HOST_H

#include <pthread.h>
#include <sys/un.h>

#include "server/worker/worker.h"
#include "tests/fuzz/common/fuzz.h"

struct fuzz_host {
    struct kld_config config;
    struct kld_stats_page *page;
    struct kld_stats *stats; /* of the worker, in it */
    struct kld_stats_fds stats_fds;
    struct kld_worker worker;
    struct sockaddr_un address;
    socklen_t address_bytes;
    int listen_fd;
    pthread_t thread;
    uint64_t connected; /* by fuzz_connect() */
};

/* settings: as flags of kld-server. path: of the socket; NULL: one without a file. */
void fuzz_host_open(struct fuzz_host *host, int count, char *const *settings, const char *path);
/* After it. device NULL: the CPU. */
void fuzz_host_start(struct fuzz_host *host, const struct kld_backend *backend,
                     struct kld_device *device);
uint64_t fuzz_host_stat(const struct fuzz_host *host, enum kld_stat stat);
/* Nobody is connected and the worker has nothing of anybody left: no session, request, region,
 * publication, byte of its pool. Waits for it; a promise is broken if it does not come. */
void fuzz_host_require_idle(const struct fuzz_host *host);

int fuzz_connect(struct fuzz_host *host);
/* False: the connection takes no more, or has ended. */
bool fuzz_send(int fd, const void *data, size_t bytes, const int *fds, unsigned count);
/* Of one frame or several. */
struct fuzz_packet {
    uint8_t data[KLD_WIRE_PACKET_BYTES_MAX];
    size_t bytes;
};

/* What came: 1 a packet, whose form is good; 0 the end of the connection; -1 nothing within ms. */
int fuzz_receive(int fd, int ms, struct fuzz_packet *ret_packet);

#endif
