/* client.h - a raw client of a worker that keeps account: each frame that it numbered is answered
 * once and by what fits, and the connection ends only where the client, or a limit, ended it. */
#ifndef KLD_TESTS_FUZZ_CLIENT_H
#define KLD_TESTS_FUZZ_CLIENT_H

#include "tests/fuzz/common/host.h"

#define FUZZ_KEPT 8 /* ids of each kind that a client remembers */
#define FUZZ_PENDING_MAX 512
/* Numbers that are kept account of are above; those of raw frames below, as the fuzzer has them. */
#define FUZZ_NUMBER_MIN ((uint64_t)1 << 40)

struct fuzz_client {
    int fd;       /* -1: not connected */
    bool cut;     /* one direction was shut down, by us */
    bool refused; /* too many clients */
    bool packs;   /* sent a packet of several frames, so it may be sent some */
    uint64_t next_number;
    uint64_t region[FUZZ_KEPT], event[FUZZ_KEPT]; /* ids; the newest over the oldest */
    unsigned regions, events;                     /* that ever were */
    struct fuzz_pending {
        uint64_t number; /* 0: none */
        uint16_t type;   /* of the frame */
    } pending[FUZZ_PENDING_MAX];
    unsigned pending_count;
};

void fuzz_client_open(struct fuzz_client *client, struct fuzz_host *host);
void fuzz_client_close(struct fuzz_client *client);
/* Numbers the frame, sends it and notes that it wants an answer. 0: it could not be sent. */
uint64_t fuzz_client_send(struct fuzz_client *client, union kld_frame *frame, const int *fds,
                          unsigned count);
/* Several frames in one packet; false: it could not be sent. */
bool fuzz_client_send_packet(struct fuzz_client *client, union kld_frame *frames, unsigned count);
/* Takes what comes until nothing does for `ms`; or until `number` (if not 0) is answered: true. */
bool fuzz_client_take(struct fuzz_client *client, uint64_t number, int ms,
                      union kld_frame *ret_frame);
/* Everything that wants an answer gets it, in time, or the connection has ended for a reason. */
void fuzz_client_settle(struct fuzz_client *client);
void fuzz_client_hello(struct fuzz_client *client);

#endif
