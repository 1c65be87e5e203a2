/* test_unix_again.c - what the Unix-socket connection sends a second time, and what it must not;
 * and memory that a worker may still write after its answer. */
#include "tests/unit/unit.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/unix.h"
#include "tests/unit/client/fake_worker.h"

#define CLASSES 8

static struct fake_worker worker;
static struct kld_connection *connection;
static struct kld_error error;

static void setup(void) {
    char url[128];
    fake_worker_open(&worker);
    snprintf(url, sizeof url, "unix:%s", worker.path);
    ck_assert_int_eq(kld_connect(url, NULL, &connection, &error), KLD_OK);
}

static void teardown(void) {
    kld_close(connection);
    fake_worker_close(&worker);
}

/* rows x CLASSES in FP32, with a gradient to the predictions. */
static struct kld_request request_of(uint64_t rows) {
    struct kld_request request;
    memset(&request, 0, sizeof request);
    kld_op_init(&request.op);
    request.op.rank = 2;
    request.op.shape[0] = rows;
    request.op.shape[1] = CLASSES;
    request.op.tensor[KLD_SLOT_PREDICTIONS].dtype = KLD_DTYPE_FP32;
    request.op.tensor[KLD_SLOT_TARGETS].dtype = KLD_DTYPE_FP32;
    request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_FP32;
    return request;
}

static struct kld_request region_request(struct kld_region *predictions, uint64_t predictions_at,
                                         struct kld_region *gradient, uint64_t gradient_at) {
    struct kld_request request = request_of(1);
    request.bytes[KLD_SLOT_PREDICTIONS] = (struct kld_bytes){NULL, predictions, predictions_at};
    request.bytes[KLD_SLOT_TARGETS] = (struct kld_bytes){NULL, predictions, 4096};
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS] = (struct kld_bytes){NULL, gradient, gradient_at};
    return request;
}

struct ended {
    int count;
    enum kld_status status;
    double loss;
    uint32_t attempts;
};

static void on_end(void *user, enum kld_status status, const struct kld_result *result,
                   const struct kld_error *failed) {
    struct ended *ended = user;
    ended->count++;
    ended->status = status;
    ended->loss = result->loss;
    ended->attempts = result->attempts;
    ck_assert_int_eq(status, failed->status);
    ck_assert(status == KLD_OK || failed->text[0]);
}

/* As if the server had been lost, and what is queued been asked for, that long ago. */
static void age(uint64_t lost_ns, uint64_t asked_ns) {
    struct unix_connection *u = (struct unix_connection *)connection;
    u->down_since_ns -= lost_ns;
    for (struct kld_call *call = u->queued.first; call; call = call->next)
        call->started_ns -= asked_ns;
    kld_connection_arm(connection, kld_now_ns());
}

static void submit(const struct kld_request *request, struct ended *ended) {
    ck_assert_int_eq(kld_submit(connection, request, on_end, ended, NULL, &error), KLD_OK);
}

static void process_until(const struct ended *ended) {
    for (int i = 0; i < TRIES_MAX && ended->count < 1; i++)
        ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    ck_assert_int_eq(ended->count, 1);
}

/* The worker answers a late or cancelled request at once and goes on writing its gradient: another
 * request's staging must not lie there yet. */
static void check_late(bool cancelled) {
    static float q[12 * CLASSES], p[12 * CLASSES], gradient[12 * CLASSES];
    setup();
    for (int i = 0; i < 12 * CLASSES; i++)
        q[i] = 3, p[i] = 1;
    struct kld_request first = request_of(1), second = request_of(12);
    first.bytes[KLD_SLOT_PREDICTIONS].data = second.bytes[KLD_SLOT_PREDICTIONS].data = q;
    first.bytes[KLD_SLOT_TARGETS].data = second.bytes[KLD_SLOT_TARGETS].data = p;
    first.bytes[KLD_SLOT_GRAD_PREDICTIONS].data = gradient;
    second.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_ABSENT;
    struct ended late = {0}, right = {0};
    worker.hold = worker.linger = 1;
    first.timeout_ns = cancelled ? 0 : 300000000; /* it is with the worker by then */
    uint64_t id;
    ck_assert_int_eq(kld_submit(connection, &first, on_end, &late, &id, &error), KLD_OK);
    for (int i = 0; i < TRIES_MAX && worker.submits < 1; i++)
        ck_assert_int_eq(kld_process(connection, 1, &error), KLD_OK);
    if (cancelled)
        kld_cancel(connection, id);
    process_until(&late);
    ck_assert_int_eq(late.status, cancelled ? KLD_CANCELLED : KLD_DEADLINE);
    for (int i = 0; i < 20; i++) /* the worker's own answer arrives */
        ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    submit(&second, &right);
    ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    worker.hold = 0;
    process_until(&right);
    ck_assert_int_eq(right.status, KLD_OK);
    ck_assert(right.loss == 12 * CLASSES * 2);
    ck_assert_int_eq(late.count, 1);
    ck_assert_int_eq(late.attempts, 1); /* what keeps its staging was no other try */
    ck_assert(gradient[0] == 0);        /* nor is it handed to who gave up */
    /* Afterwards the place is free again: the connection falls idle, one stage serves on. */
    for (int i = 0; i < TRIES_MAX && worker.copies < 1; i++)
        ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    for (int i = 0; i < 64; i++)
        ck_assert_int_eq(kld_run(connection, &second, NULL, &error), KLD_OK);
    ck_assert_int_eq(worker.regions_added, 1);
    teardown();
}

START_TEST(test_late_keeps_its_staging) { check_late(false); }
END_TEST

START_TEST(test_cancelled_keeps_its_staging) { check_late(true); }
END_TEST

/* Has no request a part of a stage? */
static bool stages_are_free(void) {
    const struct unix_connection *u = (const struct unix_connection *)connection;
    for (int i = 0; i < KLD_STAGES_MAX; i++)
        if (u->stages[i].parts)
            return false;
    return true;
}

/* A worker that ends finishes what it computes and takes nothing new, so it cannot say when it has
 * let go of the memory: its successor does, which comes when it has ended. */
START_TEST(test_staging_is_kept_from_one_that_leaves) {
    static float values[3 * CLASSES];
    setup();
    struct kld_request request = request_of(1);
    for (int i = 0; i < KLD_SLOT_COUNT; i++)
        request.bytes[i].data = request.op.tensor[i].dtype ? values : NULL;
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS].data = values + CLASSES;
    struct ended late = {0};
    uint64_t id;
    worker.hold = worker.linger = worker.leave_at_copy = 1;
    ck_assert_int_eq(kld_submit(connection, &request, on_end, &late, &id, &error), KLD_OK);
    for (int i = 0; i < TRIES_MAX && worker.submits < 1; i++)
        ck_assert_int_eq(kld_process(connection, 1, &error), KLD_OK);
    kld_cancel(connection, id);
    process_until(&late);
    ck_assert_int_eq(late.status, KLD_CANCELLED);
    for (int i = 0; i < TRIES_MAX && !connection->losses; i++)
        ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    ck_assert_int_eq(connection->losses, 1);
    age(2 * KLD_RECONNECT_NS_MAX, 2 * KLD_RECONNECT_NS_MAX);
    ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    ck_assert(!stages_are_free());
    for (int i = 0; i < TRIES_MAX && worker.copies < 2; i++)
        ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    worker.hold = 0;
    for (int i = 0; i < TRIES_MAX && !stages_are_free(); i++)
        ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    ck_assert_int_eq(worker.copies, 2);
    ck_assert(stages_are_free());
    teardown();
}
END_TEST

static struct kld_region *filled_region(void) {
    struct kld_region *region;
    ck_assert_int_eq(kld_region_create(connection, 12288, &region, &error), KLD_OK);
    float *data = kld_region_data(region);
    for (int i = 0; i < CLASSES; i++)
        data[i] = 3, data[1024 + i] = 1;
    return region;
}

/* The second request writes over what the first one read. Both were computed, neither answered,
 * when the worker died: the first cannot run again. */
START_TEST(test_input_overwritten_by_a_later_request) {
    setup();
    struct kld_region *region = filled_region();
    struct kld_request first = region_request(region, 0, region, 8192);
    struct kld_request second = region_request(region, 8192, region, 0);
    struct ended ended[3] = {0};
    worker.mute = 1;
    worker.die_at_submit = 3;
    submit(&first, &ended[0]);
    submit(&second, &ended[1]);
    submit(&second, &ended[2]);
    process_until(&ended[2]);
    process_until(&ended[0]);
    process_until(&ended[1]);
    ck_assert_int_eq(ended[0].status, KLD_UNAVAILABLE);
    ck_assert_int_eq(ended[1].status, KLD_OK);
    ck_assert(ended[1].loss == CLASSES * 5);
    ck_assert_int_eq(ended[2].status, KLD_OK);
    teardown();
}
END_TEST

START_TEST(test_input_overwritten_by_a_later_copy) {
    setup();
    struct kld_region *region = filled_region();
    struct kld_request first = region_request(region, 0, region, 8192);
    struct ended ended[3] = {0};
    worker.mute = 1;
    worker.die_at_submit = 2;
    submit(&first, &ended[0]);
    ck_assert_int_eq(kld_submit_copy(connection, region, 0, region, 4096, 32, 0, 0, on_end,
                                     &ended[1], NULL, &error),
                     KLD_OK);
    first.bytes[KLD_SLOT_PREDICTIONS].offset_bytes = 4096;
    submit(&first, &ended[2]);
    process_until(&ended[0]);
    process_until(&ended[2]);
    ck_assert_int_eq(ended[0].status, KLD_UNAVAILABLE);
    ck_assert_int_eq(ended[1].status, KLD_OK);
    ck_assert_int_eq(ended[2].status, KLD_OK);
    teardown();
}
END_TEST

START_TEST(test_in_place_through_two_regions) {
    setup();
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_eq(ftruncate(fd, 12288), 0);
    ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    struct kld_region *one, *two;
    ck_assert_int_eq(kld_region_import_memfd(connection, fd, 12288, &one, &error), KLD_OK);
    ck_assert_int_eq(kld_region_import_memfd(connection, fd, 12288, &two, &error), KLD_OK);
    close(fd);
    struct kld_request request = region_request(one, 0, two, 0);
    worker.die_at_submit = 1;
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_UNAVAILABLE);

    uint8_t handle[64] = {1}, uuid[16] = {2};
    ck_assert_int_eq(
        kld_region_import_cuda_ipc(connection, handle, uuid, 65536, 0, 12288, &one, &error),
        KLD_OK);
    ck_assert_int_eq(
        kld_region_import_cuda_ipc(connection, handle, uuid, 65536, 8192, 12288, &two, &error),
        KLD_OK);
    request = region_request(one, 8192, two, 0); /* the same place */
    worker.die_at_submit = 1;
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_UNAVAILABLE);
    request = region_request(one, 0, two, 0);
    worker.die_at_submit = 1;
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_OK);
    teardown();
}
END_TEST

/* A worker that leaves refuses what is new and answers what it has, even what cannot run twice. */
START_TEST(test_worker_leaves) {
    setup();
    struct kld_region *region = filled_region(), *other = filled_region();
    struct kld_request in_place = region_request(region, 0, region, 0);
    struct kld_request refused = region_request(other, 0, other, 0);
    struct ended ended[3] = {0};
    worker.hold = 1;
    submit(&in_place, &ended[0]);
    for (int i = 0; i < TRIES_MAX && worker.submits < 1; i++)
        ck_assert_int_eq(kld_process(connection, 1, &error), KLD_OK);
    worker.leave_at_submit = 1;
    submit(&refused, &ended[1]);
    uint64_t refused_id;
    ck_assert_int_eq(kld_submit(connection, &refused, on_end, &ended[2], &refused_id, &error),
                     KLD_OK);
    for (int i = 0; i < 10; i++)
        ck_assert_int_eq(kld_process(connection, 5, &error), KLD_OK);
    ck_assert_int_eq(ended[0].count + ended[1].count, 0);
    kld_cancel(connection, refused_id);
    process_until(&ended[2]);
    ck_assert_int_eq(ended[2].status, KLD_CANCELLED);
    worker.hold = 0;
    process_until(&ended[0]);
    process_until(&ended[1]);
    ck_assert_int_eq(ended[0].status, KLD_OK);
    ck_assert_int_eq(ended[1].status, KLD_OK);
    ck_assert_uint_eq(ended[0].attempts, 1);
    ck_assert_uint_eq(ended[1].attempts, 2);
    ck_assert_int_eq(worker.accepted, 2);
    teardown();
}
END_TEST

/* Neither a lost device nor a worker that leaves is the fault of the region that it refused. */
START_TEST(test_region_refused_by_a_worker_that_ends) {
    const enum kld_status reasons[] = {KLD_DEVICE_LOST, KLD_UNAVAILABLE};
    setup();
    for (int i = 0; i < 2; i++) {
        worker.refuse_regions_once = (int)reasons[i];
        struct kld_region *region = filled_region(), *pool;
        struct kld_request request = region_request(region, 0, region, 8192);
        ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_OK);
        worker.refuse_regions_once = (int)reasons[i];
        ck_assert_int_eq(kld_region_create_pool(connection, 4096, &pool, &error), KLD_OK);
    }
    ck_assert_int_eq(worker.accepted, 5);
    teardown();
}
END_TEST

/* What was dropped before it was registered counts until it has been: a server that takes its time
 * for that refuses what comes meanwhile, and has room for it behind. */
START_TEST(test_region_refused_behind_one_that_leaves) {
    struct ended ended = {0};
    setup();
    worker.slow_regions = worker.one_region = 1;
    kld_region_drop(filled_region());
    struct kld_region *region = filled_region();
    struct kld_request request = region_request(region, 0, region, 8192);
    submit(&request, &ended);
    for (int i = 0; i < TRIES_MAX && worker.regions_added < 2; i++)
        ck_assert_int_eq(kld_process(connection, 1, &error), KLD_OK);
    for (int i = 0; i < 20; i++)
        ck_assert_int_eq(kld_process(connection, 5, &error), KLD_OK);
    ck_assert_int_eq(worker.regions_added, 2); /* and not again and again */
    ck_assert_int_eq(ended.count, 0);
    worker.slow_regions = 0;
    process_until(&ended);
    ck_assert_int_eq(ended.status, KLD_OK);
    ck_assert_int_eq(worker.regions_added, 3);
    /* Where nothing leaves it is an error at once. */
    struct kld_region *other = filled_region();
    request = region_request(other, 0, other, 8192);
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_TOO_LARGE);
    teardown();
}
END_TEST

/* Beside one that stays; and one that leaves before it was refused itself is nothing to wait for.
 */
START_TEST(test_region_refused_beside_one_that_stays) {
    struct ended ended = {0};
    setup();
    struct kld_region *region = filled_region();
    struct kld_request request = region_request(region, 0, region, 8192);
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_OK);
    worker.slow_regions = 1;
    kld_region_drop(filled_region());
    for (int i = 0; i < TRIES_MAX && worker.regions_added < 2; i++)
        ck_assert_int_eq(kld_process(connection, 1, &error), KLD_OK);
    worker.one_region = 1;
    struct kld_region *behind = filled_region();
    request = region_request(behind, 0, region, 8192);
    submit(&request, &ended);
    for (int i = 0; i < TRIES_MAX && worker.regions_added < 3; i++)
        ck_assert_int_eq(kld_process(connection, 1, &error), KLD_OK);
    for (int i = 0; i < 20; i++)
        ck_assert_int_eq(kld_process(connection, 5, &error), KLD_OK);
    ck_assert_int_eq(ended.count, 0);
    worker.one_region = 0;
    (void)filled_region(); /* comes first where regions are looked through */
    for (int i = 0; i < TRIES_MAX && worker.regions_added < 4; i++)
        ck_assert_int_eq(kld_process(connection, 1, &error), KLD_OK);
    worker.slow_regions = 0;
    process_until(&ended);
    ck_assert_int_eq(ended.status, KLD_OK);
    ck_assert_int_eq(worker.regions_added, 5);
    worker.refuse_regions_once = KLD_NO_MEMORY;
    kld_region_drop(filled_region());
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_OK);
    ck_assert_int_eq(worker.regions_added, 6);
    ck_assert_ptr_null(connection->regions->next->next->next); /* it has gone */
    teardown();
}
END_TEST

/* What kills the device is not sent on and on; who was there by chance is. */
START_TEST(test_a_request_that_kills_the_device) {
    static float q[3 * CLASSES], p[3 * CLASSES];
    setup();
    struct kld_request poison = request_of(3), good = request_of(1);
    struct kld_result result;
    poison.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_ABSENT;
    poison.bytes[KLD_SLOT_PREDICTIONS].data = q;
    poison.bytes[KLD_SLOT_TARGETS].data = p;
    good.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_ABSENT;
    good.bytes[KLD_SLOT_PREDICTIONS].data = q;
    good.bytes[KLD_SLOT_TARGETS].data = p;
    worker.poison_rows = 3;
    ck_assert_int_eq(kld_run(connection, &poison, &result, &error), KLD_DEVICE_LOST);
    ck_assert_ptr_nonnull(strstr(error.text, "may be the cause"));
    ck_assert_uint_eq(result.attempts, KLD_DEVICE_LOSSES_MAX);
    ck_assert_int_eq(worker.submits, KLD_DEVICE_LOSSES_MAX);
    ck_assert_int_eq(kld_run(connection, &good, &result, &error), KLD_OK);
    worker.poison_rows = 0;
    worker.lost_at_submit = 1; /* the device failed once: nobody knows why */
    ck_assert_int_eq(kld_run(connection, &good, &result, &error), KLD_OK);
    ck_assert_uint_eq(result.attempts, 2);
    teardown();
}
END_TEST

/* Who is refused is told so, and not that the server was lost. */
START_TEST(test_reason_of_a_refusal_is_told) {
    fake_worker_open(&worker);
    worker.refuse_hello = KLD_FORBIDDEN;
    struct kld_connect_options options = {.lazy = true, .connect_timeout_ns = 200000000};
    char url[128];
    snprintf(url, sizeof url, "unix:%s", worker.path);
    ck_assert_int_eq(kld_connect(url, &options, &connection, &error), KLD_OK);
    struct kld_region *region = filled_region();
    struct kld_request request = region_request(region, 0, region, 8192);
    struct ended ended = {0};
    struct unix_connection *u = (struct unix_connection *)connection;
    for (int i = 0; i < TRIES_MAX && !u->fatal.status; i++) /* until it was refused */
        ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_FORBIDDEN);
    request.timeout_ns = 100000000;
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_DEADLINE);
    ck_assert_msg(strcmp(error.text, "deadline passed; fake: not allowed") == 0, "%s", error.text);
    request.timeout_ns = 0;
    submit(&request, &ended);
    age(KLD_RECONNECT_NS_MAX, KLD_RECONNECT_NS_MAX);
    process_until(&ended);
    ck_assert_int_eq(ended.status, KLD_FORBIDDEN);
    teardown();
}
END_TEST

/* A server whose frames have other sizes is no server to wait for. */
START_TEST(test_another_release_is_told_at_once) {
    fake_worker_open(&worker);
    worker.cut_type = KLD_FRAME_WELCOME;
    char url[128];
    snprintf(url, sizeof url, "unix:%s", worker.path);
    ck_assert_int_eq(kld_connect(url, NULL, &connection, &error), KLD_VERSION);
    ck_assert_ptr_nonnull(strstr(error.text, "WELCOME frame of 1360 bytes; expected 1368"));
    ck_assert_int_eq(worker.accepted, 1);
    fake_worker_close(&worker);
}
END_TEST

/* So it is if only frames that come later differ: nobody waits for another try. */
START_TEST(test_another_release_is_told_at_once_later) {
    setup();
    struct kld_region *region = filled_region(), *other = NULL;
    struct kld_request request = region_request(region, 0, region, 8192);
    struct kld_server_stats stats;
    struct ended ended = {0};
    time_t start = time(NULL);
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_OK);
    worker.cut_type = KLD_FRAME_DONE;
    worker.submits = 0;
    submit(&request, &ended);
    process_until(&ended);
    ck_assert_int_eq(ended.status, KLD_VERSION);
    ck_assert_int_eq(worker.submits, 1);
    worker.cut_type = KLD_FRAME_STATS_REPLY;
    ck_assert_int_eq(kld_stats(connection, &stats, &error), KLD_VERSION);
    ck_assert_ptr_nonnull(strstr(error.text, "of different releases"));
    worker.cut_type = KLD_FRAME_REGION;
    ck_assert_int_eq(kld_region_create_pool(connection, 4096, &other, &error), KLD_VERSION);
    ck_assert_int_lt(time(NULL) - start, 5);
    worker.cut_type = 0; /* replaced by one that fits */
    ck_assert_msg(kld_run(connection, &request, NULL, &error) == KLD_OK, "%s", error.text);
    teardown();
}
END_TEST

/* The server had no room for it just then. */
START_TEST(test_region_refused_for_want_of_memory) {
    setup();
    struct kld_region *region;
    struct kld_result result;
    atomic_store(&worker.refuse_regions_once, KLD_NO_MEMORY);
    ck_assert_int_eq(kld_region_create(connection, 16384, &region, &error), KLD_OK);
    struct kld_request request = region_request(region, 0, region, 8192);
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_NO_MEMORY);
    ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_OK);
    ck_assert_int_eq(worker.regions_added, 2);
    /* What is wrong with it does not pass. */
    struct kld_region *wrong;
    atomic_store(&worker.refuse_regions_once, KLD_INVALID);
    ck_assert_int_eq(kld_region_create(connection, 16384, &wrong, &error), KLD_OK);
    request = region_request(wrong, 0, wrong, 8192);
    for (int i = 0; i < 2; i++)
        ck_assert_int_eq(kld_run(connection, &request, &result, &error), KLD_INVALID);
    kld_region_drop(region);
    kld_region_drop(wrong);
    teardown();
}
END_TEST

/* The child has the old socket too, so its parent's close ends nothing. */
START_TEST(test_lost_with_a_child_that_goes_on) {
    setup();
    pid_t child = fork();
    ck_assert_int_ge(child, 0);
    if (child == 0) {
        unsigned kept = (unsigned)((struct unix_connection *)connection)->socket;
        close_range(3, kept - 1, 0); /* the worker's end above all */
        close_range(kept + 1, ~0u, 0);
        pause();
        _exit(0);
    }
    atomic_store(&worker.hang_up, 1);
    struct ended ended = {0};
    static float q[CLASSES], gradient[CLASSES];
    struct kld_request request = request_of(1);
    request.bytes[KLD_SLOT_PREDICTIONS].data = request.bytes[KLD_SLOT_TARGETS].data = q;
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS].data = gradient;
    for (int i = 0; i < TRIES_MAX && kld_losses(connection) < 1; i++)
        ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    submit(&request, &ended);
    process_until(&ended);
    ck_assert_int_eq(ended.status, KLD_OK);
    ck_assert_uint_eq(kld_losses(connection), 1);
    int idle = 0; /* of ten looks: the connection has nothing to tell */
    for (int i = 0; i < 10; i++) {
        struct pollfd looked = {.fd = kld_fd(connection), .events = POLLIN};
        idle += poll(&looked, 1, 20) == 0;
        ck_assert_int_eq(kld_process(connection, 0, &error), KLD_OK);
    }
    kill(child, SIGKILL);
    ck_assert_int_eq(waitpid(child, NULL, 0), child);
    ck_assert_int_ge(idle, 8);
    teardown();
}
END_TEST

/* The loss was seen long ago and nobody called kld_process() since: the server is looked for now.
 */
START_TEST(test_server_is_looked_for_after_a_long_pause) {
    setup();
    struct kld_region *region = filled_region();
    struct kld_request request = region_request(region, 0, region, 0);
    worker.die_at_submit = 1;
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_UNAVAILABLE);
    struct unix_connection *u = (struct unix_connection *)connection;
    u->down_since_ns -= KLD_RECONNECT_NS_MAX; /* as if that long ago */
    u->retry_at_ns -= KLD_RECONNECT_NS_MAX;
    ck_assert_msg(kld_run(connection, &request, NULL, &error) == KLD_OK, "%s", error.text);
    teardown();
}
END_TEST

static void connect_without_a_server(void) {
    const struct kld_connect_options options = {.lazy = true};
    char url[128];
    fake_worker_path(&worker);
    snprintf(url, sizeof url, "unix:%s", worker.path);
    ck_assert_int_eq(kld_connect(url, &options, &connection, &error), KLD_OK);
}

static void submit_without_a_deadline(struct ended *ended) {
    static float values[3 * CLASSES];
    struct kld_request request = request_of(1);
    for (int i = 0; i < KLD_SLOT_COUNT; i++)
        request.bytes[i].data = request.op.tensor[i].dtype ? values : NULL;
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS].data = values + CLASSES;
    submit(&request, ended);
}

/* The server was lost long before: what is asked for now has its own 30 s. */
START_TEST(test_patience_begins_with_the_request) {
    struct ended ended = {0};
    connect_without_a_server();
    submit_without_a_deadline(&ended);
    age(2 * KLD_RECONNECT_NS_MAX, 0);
    for (int i = 0; i < 20; i++)
        ck_assert_int_eq(kld_process(connection, 5, &error), KLD_OK);
    ck_assert_int_eq(ended.count, 0);
    age(0, KLD_RECONNECT_NS_MAX);
    process_until(&ended);
    ck_assert_int_eq(ended.status, KLD_UNAVAILABLE);
    ended.count = 0;
    submit_without_a_deadline(&ended);
    age(0, 0);
    fake_worker_start(&worker);
    process_until(&ended);
    ck_assert_int_eq(ended.status, KLD_OK);
    teardown();
}
END_TEST

/* The server is back and its greeting lies there unread when the time is over. */
START_TEST(test_a_greeting_goes_before_the_timer) {
    struct ended ended = {0};
    connect_without_a_server();
    submit_without_a_deadline(&ended);
    struct unix_connection *u = (struct unix_connection *)connection;
    age(2 * KLD_RECONNECT_NS_MAX, 2 * KLD_RECONNECT_NS_MAX);
    struct pollfd timer = {.fd = kld_fd(connection), .events = POLLIN};
    ck_assert_int_eq(poll(&timer, 1, 5000), 1);
    fake_worker_start(&worker);
    kld_unix_connect(u);
    struct pollfd greeting = {.fd = u->socket, .events = POLLIN};
    ck_assert_int_eq(poll(&greeting, 1, 5000), 1);
    process_until(&ended);
    ck_assert_int_eq(ended.status, KLD_OK);
    teardown();
}
END_TEST

/* It ended, its callback waits for its turn, and then the worker is gone. */
START_TEST(test_a_loss_takes_no_words_from_what_ended_before) {
    static float values[3 * CLASSES];
    setup();
    struct kld_request request = request_of(1);
    struct ended late = {0};
    for (int i = 0; i < KLD_SLOT_COUNT; i++)
        request.bytes[i].data = request.op.tensor[i].dtype ? values : NULL;
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS].data = values + CLASSES;
    request.timeout_ns = 1000000;
    worker.hold = 1;
    submit(&request, &late);
    for (int i = 0; i < TRIES_MAX && !connection->done; i++)
        ck_assert_int_eq(kld_connection_step(connection, kld_now_ns() + 10000000, &error), KLD_OK);
    worker.hang_up = 1;
    for (int i = 0; i < TRIES_MAX && !connection->losses; i++)
        ck_assert_int_eq(kld_connection_step(connection, kld_now_ns() + 10000000, &error), KLD_OK);
    ck_assert_int_eq(connection->losses, 1);
    ck_assert_int_eq(late.count, 0);
    process_until(&late);
    ck_assert_int_eq(late.status, KLD_DEADLINE);
    teardown();
}
END_TEST

UNIT_MAIN("client/unix_again", test_patience_begins_with_the_request,
          test_a_greeting_goes_before_the_timer, test_a_loss_takes_no_words_from_what_ended_before,
          test_late_keeps_its_staging, test_cancelled_keeps_its_staging,
          test_staging_is_kept_from_one_that_leaves, test_input_overwritten_by_a_later_request,
          test_input_overwritten_by_a_later_copy, test_in_place_through_two_regions,
          test_worker_leaves, test_region_refused_by_a_worker_that_ends,
          test_region_refused_behind_one_that_leaves, test_region_refused_beside_one_that_stays,
          test_server_is_looked_for_after_a_long_pause, test_region_refused_for_want_of_memory,
          test_lost_with_a_child_that_goes_on, test_reason_of_a_refusal_is_told,
          test_another_release_is_told_at_once, test_another_release_is_told_at_once_later,
          test_a_request_that_kills_the_device)
