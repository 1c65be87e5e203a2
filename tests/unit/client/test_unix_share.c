/* test_unix_share.c - published tensors, events and priorities over the Unix socket: what is said
 * once, what is said again to the next worker, and what the caller is told. */
#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "client/kld.h"
#include "client/unix.h"
#include "tests/unit/client/fake_worker.h"

#define ROWS 2
#define CLASSES 8
#define BYTES (ROWS * CLASSES * sizeof(float))

static struct fake_worker worker;
static struct kld_connection *teacher, *student;
static struct kld_region *logits, *predictions;
static struct kld_error error;
static const uint8_t uuid[16] = {7}, handle[64] = {9};

static struct kld_connection *connect_to_worker(const struct kld_connect_options *options) {
    char url[128];
    struct kld_connection *connection = NULL;
    snprintf(url, sizeof url, "unix:%s", worker.path);
    ck_assert_msg(kld_connect(url, options, &connection, &error) == KLD_OK, "%s", error.text);
    return connection;
}

static void setup(void) {
    fake_worker_open(&worker);
    teacher = connect_to_worker(NULL);
    student = connect_to_worker(NULL);
    ck_assert_int_eq(kld_region_create(teacher, 64 + BYTES, &logits, &error), KLD_OK);
    ck_assert_int_eq(kld_region_create(student, BYTES, &predictions, &error), KLD_OK);
    float *p = (float *)((char *)kld_region_data(logits) + 64), *q = kld_region_data(predictions);
    for (int i = 0; i < ROWS * CLASSES; i++)
        p[i] = 1, q[i] = 3;
}
#define LOSS (2.0 * ROWS * CLASSES) /* of the made-up operator: what q has more than p */

static void teardown(void) {
    kld_close(student);
    kld_close(teacher);
    fake_worker_close(&worker);
}

static struct kld_tensor_view tensor_view(void) {
    return (struct kld_tensor_view){.dtype = KLD_DTYPE_FP32,
                                    .form = KLD_FORM_LOGITS,
                                    .rank = 2,
                                    .shape = {ROWS, CLASSES},
                                    .offset_bytes = 64};
}

static void publish(void) {
    struct kld_tensor_view view = tensor_view();
    enum kld_status status = kld_publish(teacher, "teacher/logits", logits, &view, NULL, 0, &error);
    ck_assert_msg(status == KLD_OK, "%s", error.text);
}

static struct kld_region *attach(void) {
    struct kld_tensor_view view;
    struct kld_region *region = NULL;
    enum kld_status status = kld_attach(student, "teacher/logits", 0, &region, &view, &error);
    ck_assert_msg(status == KLD_OK, "%s", error.text);
    ck_assert_uint_eq(view.dtype, KLD_DTYPE_FP32);
    ck_assert_uint_eq(view.form, KLD_FORM_LOGITS);
    ck_assert_uint_eq(view.rank, 2);
    ck_assert_uint_eq(view.shape[1], CLASSES);
    ck_assert_uint_eq(view.offset_bytes, 0);
    ck_assert_uint_eq(kld_region_bytes(region), BYTES);
    ck_assert_ptr_null(kld_region_data(region));
    return region;
}

static struct kld_request request_on(struct kld_region *targets) {
    struct kld_request request = small_request(ROWS, CLASSES, NULL, NULL, NULL);
    request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_ABSENT;
    request.bytes[KLD_SLOT_PREDICTIONS].region = predictions;
    request.bytes[KLD_SLOT_TARGETS].region = targets;
    return request;
}

START_TEST(test_published_tensors_are_attached) {
    setup();
    publish();
    struct kld_region *region = attach();
    struct kld_region *other = NULL;
    struct kld_tensor_view view;
    ck_assert_int_eq(kld_attach_from(student, 1234, "teacher/logits", 0, &other, &view, &error),
                     KLD_OK);
    ck_assert_uint_eq(view.owner_uid, 1234); /* as the worker, which was asked for it, says */
    kld_region_drop(other);
    ck_assert_int_eq(kld_attach_from(student, UINT32_MAX, "t", 0, &other, &view, &error),
                     KLD_INVALID);
    struct kld_request request = request_on(region);
    struct kld_result result;
    ck_assert_int_eq(kld_run(student, &request, &result, &error), KLD_OK);
    ck_assert(result.loss == LOSS);
    view = tensor_view();
    ck_assert_int_eq(kld_publish(student, "mine", region, &view, NULL, 0, &error), KLD_FORBIDDEN);
    ck_assert_int_eq(kld_publish(teacher, "teacher/logits", logits, &view, NULL, 0, &error),
                     KLD_EXISTS);
    ck_assert_int_eq(kld_publish(student, "teacher/logits", predictions, &view, NULL, 0, &error),
                     KLD_EXISTS); /* says the worker */
    ck_assert_int_eq(kld_detach(student, "teacher/logits", &error), KLD_NOT_FOUND);
    struct kld_region *own;
    ck_assert_int_eq(kld_attach(teacher, "teacher/logits", 0, &own, &view, &error), KLD_INVALID);
    ck_assert_int_eq(kld_detach(teacher, "teacher/logits", &error), KLD_OK);
    ck_assert_int_eq(kld_run(student, &request, &result, &error), KLD_GONE);
    kld_region_drop(region);
    publish(); /* the name is free again */
    region = attach();
    request = request_on(region);
    ck_assert_int_eq(kld_run(student, &request, &result, &error), KLD_OK);
    kld_region_drop(logits); /* ends it too */
    ck_assert_int_eq(kld_ping(teacher, NULL, &error), KLD_OK);
    ck_assert_int_eq(kld_run(student, &request, &result, &error), KLD_GONE);
    teardown();
    ck_assert_int_eq(worker.regions_now, 0);
}
END_TEST

START_TEST(test_names_and_users_are_checked) {
    setup();
    struct kld_tensor_view view = tensor_view();
    char longest[KLD_TENSOR_NAME_MAX + 1];
    memset(longest, 'x', sizeof longest);
    longest[KLD_TENSOR_NAME_MAX] = 0;
    const char *const wrong[] = {"", "two words", "\n", "\x80", longest, NULL};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct kld_region *region;
        ck_assert_int_eq(kld_publish(teacher, wrong[i], logits, &view, NULL, 0, &error),
                         KLD_INVALID);
        ck_assert_int_eq(kld_attach(student, wrong[i], 0, &region, &view, &error), KLD_INVALID);
        ck_assert_int_eq(kld_detach(teacher, wrong[i], &error), KLD_INVALID);
    }
    longest[KLD_TENSOR_NAME_MAX - 1] = 0;
    ck_assert_int_eq(kld_publish(teacher, longest, logits, &view, NULL, 0, &error), KLD_OK);
    uint32_t uids[9] = {1};
    ck_assert_int_eq(kld_publish(teacher, "t", logits, &view, uids, 9, &error), KLD_INVALID);
    ck_assert_int_eq(kld_publish(teacher, "t", logits, &view, uids, 8, &error), KLD_OK);
    ck_assert_int_eq(kld_publish(teacher, "u", predictions, &view, NULL, 0, &error), KLD_INVALID);
    teardown();

    struct kld_connection *local;
    struct kld_region *region;
    ck_assert_int_eq(kld_connect("local:cpu", NULL, &local, &error), KLD_OK);
    ck_assert_int_eq(kld_region_create(local, 4096, &region, &error), KLD_OK);
    ck_assert_int_eq(kld_publish(local, "t", region, &view, NULL, 0, &error), KLD_UNIMPLEMENTED);
    ck_assert_int_eq(kld_attach(local, "t", 0, &region, &view, &error), KLD_UNIMPLEMENTED);
    struct kld_event *event;
    ck_assert_int_eq(kld_event_import(local, handle, uuid, &event, &error), KLD_UNIMPLEMENTED);
    ck_assert_int_eq(kld_stream_priority(local, 1, 2, &error), KLD_INVALID);
    ck_assert_int_eq(kld_stream_priority(local, 1, 1, &error), KLD_OK);
    kld_close(local);
}
END_TEST

static void *publish_later(void *argument) {
    usleep(60000);
    publish();
    return argument;
}

START_TEST(test_attaching_waits_for_the_publisher) {
    setup();
    struct kld_tensor_view view;
    struct kld_region *region;
    ck_assert_int_eq(kld_attach(student, "teacher/logits", 0, &region, &view, &error),
                     KLD_NOT_FOUND);
    ck_assert_int_eq(kld_attach(student, "teacher/logits", 30000000, &region, &view, &error),
                     KLD_NOT_FOUND);
    pthread_t thread;
    pthread_create(&thread, NULL, publish_later, NULL);
    enum kld_status status =
        kld_attach(student, "teacher/logits", 20000000000, &region, &view, &error);
    pthread_join(thread, NULL);
    ck_assert_msg(status == KLD_OK, "%s", error.text);
    struct kld_request request = request_on(region);
    ck_assert_int_eq(kld_run(student, &request, NULL, &error), KLD_OK);
    teardown();
}
END_TEST

/* That the worker is gone is noticed by the call itself, which still takes its own time only. */
START_TEST(test_attaching_over_a_lost_connection_takes_its_own_time) {
    const struct kld_connect_options patient = {.connect_timeout_ns = 60000000000};
    setup();
    struct kld_tensor_view view;
    struct kld_region *region;
    struct timespec began, ended;
    kld_close(student);
    student = connect_to_worker(&patient);
    worker.hang_up = 1;
    for (int i = 0; i < TRIES_MAX && worker.hang_up; i++)
        usleep(1000);
    clock_gettime(CLOCK_MONOTONIC, &began);
    ck_assert_int_eq(kld_attach(student, "teacher/logits", 1000000, &region, &view, &error),
                     KLD_NOT_FOUND);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    ck_assert_int_le(ended.tv_sec - began.tv_sec, 30);
    teardown();
}
END_TEST

struct ended {
    int count;
    enum kld_status status;
    struct kld_result result;
};

static void on_end(void *user, enum kld_status status, const struct kld_result *result,
                   const struct kld_error *failed) {
    struct ended *ended = user;
    ended->count++;
    ended->status = status;
    ended->result = *result;
    error = *failed;
}

/* Both processes' loops, until the student's request has ended. */
static void run_both(const struct kld_request *request, struct ended *ended) {
    memset(ended, 0, sizeof *ended);
    ck_assert_int_eq(kld_submit(student, request, on_end, ended, NULL, &error), KLD_OK);
    for (int i = 0; i < TRIES_MAX && !ended->count; i++) {
        ck_assert_int_eq(kld_process(teacher, 2, &error), KLD_OK);
        ck_assert_int_eq(kld_process(student, 2, &error), KLD_OK);
    }
    ck_assert_int_eq(ended->count, 1);
}

START_TEST(test_a_lost_worker_is_told_again) {
    setup();
    publish();
    struct kld_region *region = attach();
    struct kld_request request = request_on(region);
    struct ended ended;
    for (int round = 1; round <= 3; round++) {
        worker.all_die = 1;
        worker.die_at_submit = 1;
        run_both(&request, &ended);
        ck_assert_msg(ended.status == KLD_OK, "%s", error.text);
        ck_assert(ended.result.loss == LOSS);
        ck_assert_uint_eq(ended.result.attempts, 2);
        ck_assert_int_eq(worker.published, 1 + round);
        ck_assert_int_eq(worker.attached, 1 + round);
    }
    worker.all_die = 0;
    kld_detach(teacher, "teacher/logits", &error);
    run_both(&request, &ended);
    ck_assert_int_eq(ended.status, KLD_GONE);
    teardown();
}
END_TEST

static void process_both(int times) {
    for (int i = 0; i < times; i++) {
        ck_assert_int_eq(kld_process(teacher, 1, &error), KLD_OK);
        ck_assert_int_eq(kld_process(student, 1, &error), KLD_OK);
    }
}

/* The student is back before the teacher, who has its time from there on, however long nobody was
 * there: as if that had been for longer than anybody waits. */
START_TEST(test_who_published_is_waited_for_from_the_return_on) {
    setup();
    publish();
    struct unix_region *region = (struct unix_region *)attach();
    const struct unix_connection *u = (const struct unix_connection *)student,
                                 *t = (const struct unix_connection *)teacher;
    worker.refuse_hello = KLD_UNAVAILABLE;
    worker.all_die = 1;
    worker.hang_up = 1;
    for (int i = 0; i < TRIES_MAX && (u->state == UNIX_UP || t->state == UNIX_UP); i++)
        process_both(1);
    ck_assert(u->state != UNIX_UP && t->state != UNIX_UP);
    region->until_ns = 1;
    worker.all_die = 0;
    worker.refuse_hello = 0;
    for (int i = 0; i < TRIES_MAX && region->looks == 0 && region->state != UNIX_REGION_FAILED; i++)
        ck_assert_int_eq(kld_process(student, 1, &error), KLD_OK);
    ck_assert_uint_eq(region->looks, 1); /* nobody has published it again yet */
    struct kld_request request = request_on(&region->base);
    struct ended ended;
    run_both(&request, &ended);
    ck_assert_msg(ended.status == KLD_OK, "%s", error.text);
    ck_assert(ended.result.loss == LOSS);
    teardown();
}
END_TEST

static enum kld_status teacher_published(void) {
    ck_assert_int_eq(kld_process(teacher, 2, &error), KLD_OK);
    return kld_published(teacher, "teacher/logits", &error);
}

/* Somebody else of the user has taken the name meanwhile. */
START_TEST(test_what_is_not_published_again_is_told) {
    setup();
    struct kld_tensor_view view = tensor_view();
    view.offset_bytes = 0;
    ck_assert_int_eq(teacher_published(), KLD_NOT_FOUND);
    publish();
    ck_assert_int_eq(teacher_published(), KLD_OK);
    worker.hang_up = 1;
    for (int i = 0; i < TRIES_MAX && worker.hang_up; i++)
        usleep(1000);
    ck_assert_int_eq(kld_published(teacher, "teacher/logits", &error),
                     KLD_OK); /* for all it knows */
    ck_assert_int_eq(kld_publish(student, "teacher/logits", predictions, &view, NULL, 0, &error),
                     KLD_OK);
    enum kld_status status = KLD_OK;
    for (int i = 0; i < TRIES_MAX && status == KLD_OK; i++)
        status = teacher_published();
    ck_assert_int_eq(status, KLD_EXISTS);
    ck_assert_ptr_nonnull(strstr(error.text, "not published again after its server was lost: "));
    view.offset_bytes = 64;
    ck_assert_int_eq(kld_publish(teacher, "teacher/logits", logits, &view, NULL, 0, &error),
                     KLD_EXISTS);
    ck_assert_int_eq(kld_detach(student, "teacher/logits", &error), KLD_OK);
    ck_assert_int_eq(teacher_published(), KLD_NOT_FOUND); /* the call above failed, too */
    publish();
    ck_assert_int_eq(teacher_published(), KLD_OK);
    struct kld_connection *local = NULL;
    ck_assert_int_eq(kld_connect("local:", NULL, &local, &error), KLD_OK);
    ck_assert_int_eq(kld_published(local, "t", &error), KLD_UNIMPLEMENTED);
    kld_close(local);
    teardown();
}
END_TEST

/* The teacher's own request reads what it publishes, and has not ended when the region is dropped;
 * returns the region of its predictions. */
static struct kld_region *drop_in_use(struct ended *ended) {
    struct kld_region *other;
    setup();
    publish();
    ck_assert_int_eq(kld_region_create(teacher, 64 + BYTES, &other, &error), KLD_OK);
    float *q = (float *)kld_region_data(other);
    for (int i = 0; i < ROWS * CLASSES; i++)
        q[i] = 3;
    struct kld_request request = request_on(logits);
    request.bytes[KLD_SLOT_PREDICTIONS].region = other;
    request.bytes[KLD_SLOT_TARGETS].offset_bytes = 64;
    memset(ended, 0, sizeof *ended);
    worker.hold = 1;
    ck_assert_int_eq(kld_submit(teacher, &request, on_end, ended, NULL, &error), KLD_OK);
    for (int i = 0; i < TRIES_MAX && !worker.submits; i++)
        ck_assert_int_eq(kld_process(teacher, 2, &error), KLD_OK);
    kld_region_drop(logits);
    ck_assert_int_eq(ended->count, 0);
    return other;
}

static void let_it_end(struct ended *ended) {
    worker.hold = 0;
    for (int i = 0; i < TRIES_MAX && !ended->count; i++)
        ck_assert_int_eq(kld_process(teacher, 2, &error), KLD_OK);
    ck_assert_int_eq(ended->count, 1);
    ck_assert_msg(ended->status == KLD_OK, "%s", error.text);
    ck_assert(ended->result.loss == LOSS);
}

START_TEST(test_a_name_ends_with_its_region_in_use) {
    struct ended ended;
    struct kld_region *other = drop_in_use(&ended);
    ck_assert_int_eq(kld_published(teacher, "teacher/logits", &error), KLD_NOT_FOUND);
    ck_assert_int_eq(kld_detach(teacher, "teacher/logits", &error), KLD_NOT_FOUND);
    ck_assert_int_eq(kld_ping(teacher, NULL, &error), KLD_OK); /* all before has arrived */
    ck_assert_int_eq(worker.detached, 1);
    struct kld_tensor_view view = tensor_view();
    struct kld_region *region = NULL;
    ck_assert_int_eq(kld_attach(student, "teacher/logits", 0, &region, &view, &error),
                     KLD_NOT_FOUND);
    view = tensor_view();
    enum kld_status status = kld_publish(teacher, "teacher/logits", other, &view, NULL, 0, &error);
    ck_assert_msg(status == KLD_OK, "%s", error.text);
    kld_region_drop(attach());
    let_it_end(&ended);
    ck_assert_int_eq(kld_published(teacher, "teacher/logits", &error), KLD_OK);
    teardown();
}
END_TEST

/* The region is registered with the next worker, for the request, and not published again. */
START_TEST(test_a_name_that_ended_stays_so_after_a_loss) {
    struct ended ended;
    drop_in_use(&ended);
    worker.hang_up = 1;
    for (int i = 0; i < TRIES_MAX && worker.submits < 2; i++)
        ck_assert_int_eq(kld_process(teacher, 2, &error), KLD_OK);
    ck_assert_int_eq(worker.submits, 2);
    let_it_end(&ended);
    ck_assert_int_eq(kld_ping(teacher, NULL, &error), KLD_OK);
    ck_assert_int_eq(worker.published, 1);
    teardown();
}
END_TEST

START_TEST(test_another_shape_is_gone) {
    setup();
    publish();
    struct kld_region *region = attach();
    struct kld_request request = request_on(region);
    ck_assert_int_eq(kld_detach(teacher, "teacher/logits", &error), KLD_OK);
    struct kld_tensor_view view = tensor_view();
    view.form = KLD_FORM_PROBS;
    ck_assert_int_eq(kld_publish(teacher, "teacher/logits", logits, &view, NULL, 0, &error),
                     KLD_OK);
    worker.all_die = 1;
    worker.die_at_submit = 1;
    struct ended ended;
    run_both(&request, &ended);
    ck_assert_int_eq(ended.status, KLD_GONE);
    ck_assert_ptr_nonnull(strstr(error.text, "published again as another one"));
    worker.all_die = 0;
    teardown();
}
END_TEST

/* The answer has come, the device has not: whoever asks again for the same event is told. */
START_TEST(test_a_loss_behind_an_early_answer_is_told) {
    setup();
    struct kld_event *ready, *done;
    uint8_t done_handle[64];
    ck_assert_int_eq(kld_event_import(student, handle, uuid, &ready, &error), KLD_OK);
    ck_assert_int_eq(kld_event_create(student, done_handle, &done, &error), KLD_OK);
    publish();
    struct kld_request request = request_on(attach());
    request.wait = ready;
    request.record = done;
    request.early = true;
    ck_assert_int_eq(kld_run(student, &request, NULL, &error), KLD_OK);
    worker.hang_up = 1;
    for (int i = 0; i < TRIES_MAX && worker.hang_up; i++)
        usleep(1000);
    struct ended ended;
    run_both(&request, &ended);
    ck_assert_int_eq(ended.status, KLD_DEVICE_LOST);
    ck_assert_int_eq(worker.early, 1);
    teardown();
}
END_TEST

START_TEST(test_events_and_early) {
    setup();
    struct kld_event *ready, *done, *other;
    uint8_t done_handle[64];
    ck_assert_int_eq(kld_event_import(student, handle, uuid, &ready, &error), KLD_OK);
    ck_assert_int_eq(kld_event_create(student, done_handle, &done, &error), KLD_OK);
    ck_assert_int_eq(done_handle[63], 0x5a);
    ck_assert_int_eq(kld_event_import(teacher, handle, uuid, &other, &error), KLD_OK);
    publish();
    struct kld_request request = request_on(attach());
    request.wait = other;
    ck_assert_int_eq(kld_run(student, &request, NULL, &error), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "wait: the event belongs to another connection"));
    request.wait = ready;
    request.early = true;
    ck_assert_int_eq(kld_run(student, &request, NULL, &error), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "early without record"));
    ck_assert_ptr_nonnull(strstr(error.text, "expected a done event"));
    ck_assert_int_eq(worker.submits, 0);
    request.record = done;
    struct kld_result result;
    ck_assert_int_eq(kld_run(student, &request, &result, &error), KLD_OK);
    ck_assert(!result.scalar && result.loss == 0);
    ck_assert_int_eq(worker.early, 1);
    float plain[ROWS * CLASSES] = {0};
    struct kld_request mixed = request;
    mixed.bytes[KLD_SLOT_PREDICTIONS] = (struct kld_bytes){.data = plain};
    ck_assert_int_eq(kld_run(student, &mixed, NULL, &error), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "predictions: plain memory"));

    /* The next worker learns of the ready event; the done event was the old one's. */
    struct ended ended;
    request.record = NULL;
    request.early = false;
    worker.all_die = 1;
    worker.die_at_submit = 1;
    run_both(&request, &ended);
    ck_assert_int_eq(ended.status, KLD_OK);
    ck_assert_int_eq(worker.events_added, 5); /* three, and the two ready ones again */
    request.record = done;
    run_both(&request, &ended);
    ck_assert_int_eq(ended.status, KLD_DEVICE_LOST);
    ck_assert_ptr_nonnull(strstr(error.text, "create another"));
    kld_event_drop(done);
    ck_assert_int_eq(kld_event_create(student, done_handle, &done, &error), KLD_OK);
    request.record = done;
    run_both(&request, &ended);
    ck_assert_int_eq(ended.status, KLD_OK);

    /* Dropped in use: it goes with its request. */
    worker.all_die = 0;
    worker.hold = 1;
    memset(&ended, 0, sizeof ended);
    ck_assert_int_eq(kld_submit(student, &request, on_end, &ended, NULL, &error), KLD_OK);
    kld_event_drop(ready);
    kld_event_drop(done);
    ck_assert_int_eq(kld_run(student, &request, NULL, &error), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "was dropped"));
    ck_assert_int_eq(worker.events_dropped, 0);
    worker.hold = 0;
    while (!ended.count)
        ck_assert_int_eq(kld_process(student, 10, &error), KLD_OK);
    ck_assert_int_eq(ended.status, KLD_OK);
    ck_assert_int_eq(kld_ping(student, NULL, &error), KLD_OK);
    ck_assert_int_eq(worker.events_dropped, 2);
    kld_event_drop(NULL);
    teardown();
}
END_TEST

START_TEST(test_priorities_are_told_to_each_worker) {
    setup();
    ck_assert_int_eq(kld_stream_priority(student, 2, 1, &error), KLD_OK);
    ck_assert_int_eq(worker.last_priority, 1);
    ck_assert_int_eq(kld_stream_priority(student, 3, -1, &error), KLD_OK);
    ck_assert_int_eq(kld_stream_priority(student, 4, 1, &error), KLD_INVALID);
    ck_assert_int_eq(kld_stream_priority(student, 1, 7, &error), KLD_INVALID);
    ck_assert_int_eq(worker.streams_set, 2);
    publish();
    struct kld_request request = request_on(attach());
    worker.all_die = 1;
    worker.die_at_submit = 1;
    struct ended ended;
    run_both(&request, &ended);
    ck_assert_int_eq(ended.status, KLD_OK);
    ck_assert_int_eq(worker.streams_set, 4);
    worker.all_die = 0;
    teardown();
}
END_TEST

START_TEST(test_cuda_allocations_by_descriptor) {
    setup();
    struct kld_region *region;
    int fd = memfd_create("as good as any to the double", MFD_CLOEXEC);
    ck_assert_int_eq(ftruncate(fd, 4096), 0);
    ck_assert_int_eq(kld_region_import_cuda_fd(student, fd, uuid, 4096, 4000, 97, &region, &error),
                     KLD_INVALID);
    ck_assert_int_eq(kld_region_import_cuda_fd(student, -1, uuid, 4096, 0, 4096, &region, &error),
                     KLD_INVALID);
    ck_assert_int_eq(kld_region_import_cuda_fd(student, fd, uuid, 4096, 0, 4096, &region, &error),
                     KLD_OK);
    close(fd); /* libkld has its own */
    ck_assert_ptr_null(kld_region_data(region));
    publish();
    struct kld_request request = request_on(attach());
    int added = worker.regions_added;
    worker.all_die = 1;
    worker.die_at_submit = 1;
    struct ended ended;
    run_both(&request, &ended);
    ck_assert_int_eq(ended.status, KLD_OK);
    ck_assert_int_eq(worker.regions_added, added + 3); /* registered again, with the two memfds */
    worker.all_die = 0;
    teardown();
}
END_TEST

/* Its caller walks the shape: what is no tensor is not handed to him. */
START_TEST(test_what_is_attached_is_a_tensor) {
    setup();
    publish();
    struct kld_region *region = NULL;
    struct kld_tensor_view view;
    const int ranks[] = {KLD_RANK_MAX + 1, 1000000, 1, 8};
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
        worker.attached_rank = ranks[i];
        ck_assert_int_eq(kld_attach(student, "teacher/logits", 0, &region, &view, &error),
                         KLD_INTERNAL);
        ck_assert_ptr_nonnull(strstr(error.text, "described no tensor"));
    }
    worker.attached_rank = 0;
    attach();
    teardown();
}
END_TEST

UNIT_MAIN("client/unix_share", test_published_tensors_are_attached,
          test_names_and_users_are_checked, test_attaching_waits_for_the_publisher,
          test_attaching_over_a_lost_connection_takes_its_own_time,
          test_a_lost_worker_is_told_again, test_who_published_is_waited_for_from_the_return_on,
          test_what_is_not_published_again_is_told, test_a_name_ends_with_its_region_in_use,
          test_a_name_that_ended_stays_so_after_a_loss, test_another_shape_is_gone,
          test_events_and_early, test_a_loss_behind_an_early_answer_is_told,
          test_priorities_are_told_to_each_worker, test_cuda_allocations_by_descriptor,
          test_what_is_attached_is_a_tensor)
