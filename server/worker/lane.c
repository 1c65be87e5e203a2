/* lane.c - opens and closes the back end's stream behind a client's stream number, on uv's pool.
 * Launches nothing (core.c). Worker process: loop thread, except open_work() and close_work(). */
#include "server/worker/core.h"

/* Owners of streams: all that the gateway asks for is one's. */
enum { GATEWAY, FIRST_USER };

static void open_work(uv_work_t *work) {
    struct kld_lane *lane = work->data;
    struct kld_worker *worker = lane->session->worker;
    const struct kld_backend *backend = worker->options.backend;
    struct kld_stream_options options = {.priority = lane->priority, .owner = lane->owner};
    lane->status = backend->stream_open(worker->device, &options, &lane->stream, &lane->error);
}

static void open_after(uv_work_t *work, int cancelled) {
    struct kld_lane *lane = work->data;
    struct kld_session *session = lane->session;
    (void)cancelled; /* never asked for */
    kld_session_awaited(session);
    if (lane->status == KLD_OK) {
        lane->state = KLD_LANE_OPEN;
    } else {
        lane->state = KLD_LANE_CLOSED;
        session->lanes_busy--;
    }
    kld_core_lane_opened(lane);
    kld_session_collect(session);
}

void kld_lane_open(struct kld_lane *lane) {
    const struct kld_session *session = lane->session;
    lane->owner = session->is_gateway ? GATEWAY : FIRST_USER + (uint64_t)session->uid;
    lane->state = KLD_LANE_OPENING;
    lane->session->lanes_busy++;
    lane->error.text[0] = 0;
    lane->task.work.data = lane;
    kld_session_awaits(lane->session);
    kld_task_queue(&lane->task, lane->session->worker, lane->session->user, open_work, open_after);
}

static void close_work(uv_work_t *work) {
    struct kld_lane *lane = work->data;
    lane->session->worker->options.backend->stream_close(lane->stream);
}

static void close_after(uv_work_t *work, int cancelled) {
    struct kld_lane *lane = work->data;
    struct kld_session *session = lane->session;
    (void)cancelled;
    lane->state = KLD_LANE_CLOSED;
    session->lanes_busy--;
    kld_session_collect(session);
}

void kld_lane_close(struct kld_lane *lane) {
    lane->state = KLD_LANE_CLOSING;
    kld_task_queue(&lane->task, lane->session->worker, lane->session->user, close_work,
                   close_after);
}
