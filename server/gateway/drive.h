/* drive.h - libmicrohttpd as a guest of the libuv loop: when it runs, and when it rests.
 *
 * MHD waits on nothing itself: its epoll descriptor is polled by the loop, its next timeout is a
 * timer. It runs once a turn of the loop, or a few times for a large body, after everything else of
 * the turn, so that replies that came in it are sent together. Does not know what a connection is
 * about (http.c does, and tells what MHD's callbacks saw). The thread of the loop. */
#ifndef KLD_SERVER_GATEWAY_DRIVE_H
#define KLD_SERVER_GATEWAY_DRIVE_H

#include <microhttpd.h>
#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "server/gateway/links.h"
#include "server/gateway/watch.h"

struct kld_drive {
    struct MHD_Daemon *daemon;
    const struct kld_watch *watch;
    struct kld_links *links;
    uv_poll_t poll;
    uv_timer_t timer;
    uv_prepare_t prepare;
    uv_idle_t idle;   /* active while `again` */
    uint64_t spin_ns; /* constant */
    int open_handles;
    void (*closed)(void *user);
    void *user;
    uint32_t runs;  /* in a row that asked for another and did nothing */
    uint64_t moved; /* kld_watch_moved() at the last look */
    bool again;     /* MHD_run() has something to do that its epoll descriptor does not tell */

    /* Told by http.c. */
    uint64_t turn; /* number of the run that is on, or of the last one */
    uint64_t turn_ns;
    uint32_t did;       /* in this run: requests that began, moved or ended, and do not linger */
    uint32_t lingering; /* in this run: requests whose reply is about to come, looked at in vain */
    bool queued;        /* in this run: a reply, which the next one sends */
    bool streamed;      /* in this run: some of a large body came, and mostly there is more */
    uint32_t sending;   /* replies that are queued and not sent */
};

/* The daemon is epoll's, and in the end the drive's to stop. watch and links: during its whole
 * life. spin_ns: how long the loop is to stay awake for the reply of one that lingers. Not 0: the
 * loop takes no more. */
int kld_drive_open(struct kld_drive *drive, uv_loop_t *loop, struct MHD_Daemon *daemon,
                   const struct kld_watch *watch, struct kld_links *links, uint64_t spin_ns);
/* Run in this turn or the next. */
static inline void kld_drive_again(struct kld_drive *drive) { drive->again = true; }
/* Sends what is queued, stops the daemon; then closed() comes on the loop. */
void kld_drive_close(struct kld_drive *drive, void (*closed)(void *user), void *user);

#endif
