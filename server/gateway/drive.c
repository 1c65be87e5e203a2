/* drive.c - one run of MHD a turn of the loop, and when the next one is due (drive.h). */
#include "server/gateway/drive.h"

#include "server/uv_loop.h"

#define RUNS_LOOKED_AT 128
#define REST_MS 10
#define STREAM_RUNS_MAX 8 /* what comes from elsewhere waits for some 60 us so */

static void timer_fired(uv_timer_t *timer) {
    kld_drive_again(
        timer->data); /* before_poll() runs: a timer of 0 ms would keep uv at its timers */
}

static void do_nothing(uv_idle_t *idle) {}
static void readable(uv_poll_t *poll, int status, int events) { kld_drive_again(poll->data); }

/* MHD says that it has something to do at once as long as a connection may have bytes, also where
 * it has no room to read them and never will: a peer could make it turn for nothing. So after many
 * turns in a row the sockets are asked whether any byte has moved since. */
static bool turns_for_nothing(struct kld_drive *drive) {
    if (drive->runs < RUNS_LOOKED_AT) {
        drive->runs++;
        return false;
    }
    uint64_t moved = kld_watch_moved(drive->watch);
    if (moved == drive->moved)
        return true; /* and so it stays until some do */
    drive->moved = moved;
    drive->runs = 0;
    return false;
}

/* MHD reads 25 KiB of a body in a run, and for the loop to look around after each takes up to a
 * tenth of the time. So a large body that is all that moves has several runs in a turn. */
static bool streams_alone(const struct kld_drive *drive, uint32_t did_before) {
    return drive->streamed && drive->did - did_before == 1 && !drive->lingering;
}

/* A reply that is queued in one run is sent in the next. */
static void run_daemon(struct kld_drive *drive) {
    drive->again = false;
    drive->did = 0;
    drive->turn_ns = uv_hrtime();
    kld_links_hold(drive->links);
    bool more = true;
    for (int runs = 0, replies = 0; more; runs++) {
        uint32_t did_before = drive->did;
        drive->turn++;
        drive->queued = drive->streamed = false;
        drive->lingering = 0;
        MHD_run(drive->daemon);
        more = drive->queued ? replies++ == 0
                             : runs + 1 < STREAM_RUNS_MAX && streams_alone(drive, did_before);
    }
    kld_links_send(drive->links);
}

static void run(struct kld_drive *drive) {
    MHD_UNSIGNED_LONG_LONG timeout_ms;
    run_daemon(drive);
    bool wait = MHD_get_timeout(drive->daemon, &timeout_ms) == MHD_YES;
    /* MHD would look at those that linger for ever; what they wait for wakes us. */
    if (wait && !timeout_ms && drive->lingering && !drive->did && !drive->sending)
        timeout_ms = REST_MS;
    drive->again = drive->again || (wait && timeout_ms == 0);
    if (!drive->again || drive->did)
        drive->runs = 0;
    if (drive->again && turns_for_nothing(drive)) {
        drive->again = false;
        timeout_ms = REST_MS;
    }
    if (drive->again)
        uv_idle_start(&drive->idle, do_nothing); /* the loop looks around and does not wait */
    else
        uv_idle_stop(&drive->idle);
    if (wait && !drive->again)
        uv_timer_start(&drive->timer, timer_fired, timeout_ms, 0);
    else
        uv_timer_stop(&drive->timer);
}

/* What is computed at once is there before the loop would be asleep and awake again. */
static void before_poll(uv_prepare_t *prepare) {
    struct kld_drive *drive = prepare->data;
    if (drive->again)
        run(drive);
    if (drive->spin_ns && drive->lingering && !drive->again)
        kld_uv_loop_stay_awake(prepare->loop, drive->spin_ns);
}

int kld_drive_open(struct kld_drive *drive, uv_loop_t *loop, struct MHD_Daemon *daemon,
                   const struct kld_watch *watch, struct kld_links *links, uint64_t spin_ns) {
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_EPOLL_FD);
    if (!info || uv_poll_init(loop, &drive->poll, info->epoll_fd) != 0)
        return -1;
    drive->daemon = daemon;
    drive->watch = watch;
    drive->links = links;
    drive->spin_ns = spin_ns;
    uv_timer_init(loop, &drive->timer);
    uv_prepare_init(loop, &drive->prepare);
    uv_idle_init(loop, &drive->idle);
    drive->poll.data = drive->timer.data = drive->prepare.data = drive->idle.data = drive;
    drive->open_handles = 4;
    uv_poll_start(&drive->poll, UV_READABLE, readable);
    uv_prepare_start(&drive->prepare, before_poll);
    return 0;
}

static void handle_closed(uv_handle_t *handle) {
    struct kld_drive *drive = handle->data;
    if (--drive->open_handles == 0)
        drive->closed(drive->user);
}

void kld_drive_close(struct kld_drive *drive, void (*closed)(void *user), void *user) {
    drive->closed = closed;
    drive->user = user;
    run_daemon(drive);
    MHD_run(drive->daemon); /* what was queued after a suspension */
    uv_poll_stop(&drive->poll);
    uv_prepare_stop(&drive->prepare);
    MHD_stop_daemon(drive->daemon);
    uv_close((uv_handle_t *)&drive->poll, handle_closed);
    uv_close((uv_handle_t *)&drive->timer, handle_closed);
    uv_close((uv_handle_t *)&drive->idle, handle_closed);
    uv_close((uv_handle_t *)&drive->prepare, handle_closed);
}
