/* test_unix_device.c - a connection to a server with several devices goes to where its memory lies.
 */
#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "client/kld.h"
#include "proto/wire.h"
#include "tests/unit/client/fake_worker.h"

#define ROWS 2
#define CLASSES 8
#define BYTES (ROWS * CLASSES * sizeof(float))

static struct fake_worker first, second;
static struct kld_connection *connection;
static struct kld_error error;
static const uint8_t handle[64] = {9}, on_first[16] = {1}, on_second[16] = {2}, elsewhere[16] = {3};

static struct kld_connection *connect_with(const char *path,
                                           const struct kld_connect_options *options) {
    char url[128];
    struct kld_connection *made = NULL;
    snprintf(url, sizeof url, "unix:%s", path);
    ck_assert_msg(kld_connect(url, options, &made, &error) == KLD_OK, "%s", error.text);
    return made;
}

static struct kld_connection *connect_to(const char *path) { return connect_with(path, NULL); }

static uint32_t device_of(struct kld_connection *of) {
    struct kld_server_info info;
    ck_assert_int_eq(kld_info(of, &info, &error), KLD_OK);
    ck_assert_uint_eq(info.devices, 2);
    return info.device_index;
}

static void setup(void) {
    first = (struct fake_worker){.devices = 2};
    second = (struct fake_worker){.devices = 2, .device = 1};
    fake_worker_open(&first);
    fake_worker_open_beside(&second, &first);
    connection = connect_to(first.path);
    ck_assert_uint_eq(device_of(connection), 0);
}

static void teardown(void) {
    kld_close(connection);
    fake_worker_close(&second);
    fake_worker_close(&first);
}

static enum kld_status import(const uint8_t *uuid, struct kld_region **ret_region) {
    return kld_region_import_cuda_ipc(connection, handle, uuid, 4096, 0, 4096, ret_region, &error);
}

/* Memory that all devices see comes along, and a request on it is answered there. */
START_TEST(test_the_first_memory_says_where) {
    setup();
    struct kld_region *shared, *memory;
    ck_assert_int_eq(kld_region_create(connection, 2 * BYTES, &shared, &error), KLD_OK);
    ck_assert_int_eq(import(on_second, &memory), KLD_OK);
    ck_assert_uint_eq(device_of(connection), 1);
    struct kld_request request = small_request(ROWS, CLASSES, NULL, NULL, NULL);
    request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_ABSENT;
    request.bytes[KLD_SLOT_PREDICTIONS].region = shared;
    request.bytes[KLD_SLOT_TARGETS] = (struct kld_bytes){.region = shared, .offset_bytes = BYTES};
    ck_assert_int_eq(kld_run(connection, &request, NULL, &error), KLD_OK);
    ck_assert_int_eq(second.regions_added, 2);
    ck_assert_int_eq(first.submits, 0);
    ck_assert_int_eq(second.submits, 1);
    teardown();
}
END_TEST

static void *answer_soon(void *unused) {
    usleep(50000);
    first.hold = 0;
    return unused;
}

/* What is computed from this process's memory binds to no device once it has ended. */
START_TEST(test_requests_on_plain_memory_are_waited_for) {
    setup();
    static float values[ROWS * CLASSES];
    struct kld_region *memory;
    pthread_t thread;
    struct kld_request request = small_request(ROWS, CLASSES, values, values, NULL);
    request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_ABSENT;
    first.hold = 1;
    ck_assert_int_eq(kld_submit(connection, &request, NULL, NULL, NULL, &error), KLD_OK);
    while (!first.submits)
        ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    ck_assert_int_eq(pthread_create(&thread, NULL, answer_soon, NULL), 0);
    ck_assert_msg(import(on_second, &memory) == KLD_OK, "%s", error.text);
    pthread_join(thread, NULL);
    ck_assert_uint_eq(device_of(connection), 1);
    ck_assert_int_eq(second.submits, 0);
    teardown();
}
END_TEST

START_TEST(test_from_any_socket_to_any_other) {
    setup();
    struct kld_region *memory;
    kld_close(connection);
    connection = connect_to(second.path);
    ck_assert_uint_eq(device_of(connection), 1);
    ck_assert_int_eq(import(on_first, &memory), KLD_OK);
    ck_assert_uint_eq(device_of(connection), 0);
    kld_region_drop(memory); /* nothing holds it there any more */
    ck_assert_int_eq(import(on_second, &memory), KLD_OK);
    ck_assert_uint_eq(device_of(connection), 1);
    teardown();
}
END_TEST

START_TEST(test_two_devices_need_two_connections) {
    setup();
    struct kld_region *memory, *other;
    struct kld_event *event;
    ck_assert_int_eq(import(on_first, &memory), KLD_OK);
    ck_assert_int_eq(import(on_second, &other), KLD_INVALID);
    ck_assert_str_eq(error.text,
                     "the memory lies on device 1 of the server and what this connection "
                     "has on device 0; expected a connection of its own for each device");
    ck_assert_int_eq(kld_event_import(connection, handle, on_second, &event, &error), KLD_INVALID);
    ck_assert_uint_eq(device_of(connection), 0);
    ck_assert_int_eq(import(elsewhere, &other), KLD_OK); /* which a real worker refuses */
    ck_assert_int_eq(second.accepted, 0);
    teardown();
}
END_TEST

START_TEST(test_one_connection_does_where_cards_reach_each_other) {
    first = (struct fake_worker){.devices = 2, .flags = KLD_WELCOME_PEERS};
    second = (struct fake_worker){.devices = 2, .device = 1, .flags = KLD_WELCOME_PEERS};
    fake_worker_open(&first);
    fake_worker_open_beside(&second, &first);
    connection = connect_to(first.path);
    struct kld_region *memory, *other;
    ck_assert_int_eq(import(on_second, &memory), KLD_OK); /* the first one still decides */
    ck_assert_uint_eq(device_of(connection), 1);
    ck_assert_int_eq(import(on_first, &other), KLD_OK);
    ck_assert_uint_eq(device_of(connection), 1);
    ck_assert_int_eq(second.regions_added, 2);
    ck_assert_int_eq(first.regions_added, 0);
    teardown();
}
END_TEST

START_TEST(test_an_event_says_where_too) {
    setup();
    struct kld_event *event;
    ck_assert_int_eq(kld_event_import(connection, handle, on_second, &event, &error), KLD_OK);
    ck_assert_uint_eq(device_of(connection), 1);
    ck_assert_int_eq(second.events_added, 1);
    ck_assert_int_eq(first.events_added, 0);
    teardown();
}
END_TEST

START_TEST(test_a_lost_worker_is_waited_for_where_the_memory_is) {
    setup();
    struct kld_region *memory;
    ck_assert_int_eq(import(on_second, &memory), KLD_OK);
    int here = second.accepted, there = first.accepted;
    second.hang_up = 1;
    for (int i = 0; i < TRIES_MAX && second.regions_added < 2; i++)
        ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    ck_assert_int_eq(second.regions_added, 2);
    ck_assert_int_eq(second.accepted, here + 1);
    ck_assert_int_eq(first.accepted, there);
    teardown();
}
END_TEST

/* Nobody is there: it is known all the same where the connection went, and from where to go on. */
START_TEST(test_a_worker_that_is_away_can_be_left_again) {
    setup();
    struct kld_region *memory;
    struct kld_connect_options options = {.connect_timeout_ns = 300000000};
    kld_close(connection);
    connection = connect_with(first.path, &options);
    fake_worker_close(&second);
    ck_assert_int_eq(import(on_second, &memory), KLD_UNAVAILABLE);
    ck_assert_int_eq(import(on_second, &memory), KLD_UNAVAILABLE);
    ck_assert_msg(import(on_first, &memory) == KLD_OK, "%s", error.text);
    ck_assert_uint_eq(device_of(connection), 0);
    kld_region_drop(memory);
    ck_assert_int_eq(import(on_second, &memory), KLD_UNAVAILABLE);
    second.stop = 0;
    fake_worker_open_beside(&second, &first);
    ck_assert_msg(import(on_second, &memory) == KLD_OK, "%s", error.text);
    ck_assert_uint_eq(device_of(connection), 1);
    ck_assert_int_eq(second.regions_added, 1);
    teardown();
}
END_TEST

#define TENTHS(n) ((n)*100000000ull)

static void setup_lazy(enum kld_status refusal, uint64_t timeout_ns) {
    struct kld_connect_options options = {.lazy = true, .connect_timeout_ns = timeout_ns};
    setup();
    kld_close(connection);
    first.refuse_hello = refusal;
    connection = connect_with(first.path, &options);
}

START_TEST(test_who_is_not_greeted_yet_finds_the_memory_too) {
    setup_lazy(KLD_OK, TENTHS(200));
    struct kld_region *shared, *memory;
    ck_assert_int_eq(kld_region_create(connection, 2 * BYTES, &shared, &error), KLD_OK);
    ck_assert_msg(import(on_second, &memory) == KLD_OK, "%s", error.text);
    ck_assert_uint_eq(device_of(connection), 1);
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK); /* behind what was sent before */
    ck_assert_int_eq(second.regions_added, 2);
    teardown();
    setup_lazy(KLD_OK, TENTHS(200));
    struct kld_event *event;
    ck_assert_int_eq(kld_event_import(connection, handle, on_second, &event, &error), KLD_OK);
    ck_assert_uint_eq(device_of(connection), 1);
    ck_assert_int_eq(first.events_added, 0);
    teardown();
}
END_TEST

static void *greet_later(void *argument) {
    usleep(50000);
    first.refuse_hello = 0;
    return argument;
}

/* The greeting is waited for, and no half of the region is sent when it comes. */
START_TEST(test_a_late_greeting) {
    static const enum kld_status passing[] = {KLD_BUSY, KLD_NO_MEMORY};
    struct kld_region *memory;
    for (int i = 0; i < 2; i++) {
        char text[128];
        setup_lazy(passing[i], TENTHS(3));
        ck_assert_int_eq(import(on_first, &memory), KLD_UNAVAILABLE);
        snprintf(text, sizeof text, "the server took nobody within 0.3 s: fake: %s",
                 kld_status_text(passing[i]));
        ck_assert_str_eq(error.text, text);
        teardown();
        setup_lazy(passing[i], TENTHS(200));
        pthread_t later;
        ck_assert_int_eq(pthread_create(&later, NULL, greet_later, NULL), 0);
        ck_assert_msg(import(on_first, &memory) == KLD_OK, "%s", error.text);
        pthread_join(later, NULL);
        ck_assert_int_eq(first.regions_added, 1);
        teardown();
    }
    setup_lazy(KLD_FORBIDDEN, TENTHS(200));
    ck_assert_int_eq(import(on_first, &memory), KLD_FORBIDDEN);
    teardown();
}
END_TEST

/* What it said is told as what it was: nobody is there any more. */
START_TEST(test_who_was_put_off_by_a_server_that_went) {
    const struct kld_connect_options options = {.lazy = true, .connect_timeout_ns = TENTHS(3)};
    struct fake_worker only = {.refuse_hello = KLD_BUSY};
    struct kld_region *memory;
    fake_worker_open(&only);
    connection = connect_with(only.path, &options);
    while (only.accepted < 2) /* the first answer has been read */
        ck_assert_int_eq(kld_process(connection, 10, &error), KLD_OK);
    fake_worker_close(&only);
    for (int i = 0; i < 100; i++) { /* until it has been tried again meanwhile */
        ck_assert_int_eq(import(on_first, &memory), KLD_UNAVAILABLE);
        if (strncmp(error.text, "the server took nobody", 22) != 0)
            break;
    }
    ck_assert_str_eq(error.text, "no server is at this socket any more; while one was, it took "
                                 "nobody: fake: busy, try again");
    kld_close(connection);
}
END_TEST

START_TEST(test_attaching_finds_the_device) {
    setup();
    struct kld_connection *teacher = connect_to(second.path);
    struct kld_region *logits, *found;
    struct kld_tensor_view view = {
        .dtype = KLD_DTYPE_FP32, .form = KLD_FORM_LOGITS, .rank = 2, .shape = {ROWS, CLASSES}};
    ck_assert_int_eq(kld_attach(connection, "t", 0, &found, &view, &error), KLD_NOT_FOUND);
    /* Looks less and less often, so that those who wait are no load to the server. */
    int looks = 0;
    for (int i = 0; i < 5 && looks < 2; i++) { /* a busy machine may have no more than one */
        int before = second.accepted;
        ck_assert_int_eq(kld_attach(connection, "t", 500000000, &found, &view, &error),
                         KLD_NOT_FOUND);
        looks = second.accepted - before;
    }
    ck_assert_msg(looks >= 2 && looks <= 11, "%d looks in half a second", looks);
    ck_assert_int_eq(kld_region_create(teacher, BYTES, &logits, &error), KLD_OK);
    view = (struct kld_tensor_view){
        .dtype = KLD_DTYPE_FP32, .form = KLD_FORM_LOGITS, .rank = 2, .shape = {ROWS, CLASSES}};
    ck_assert_int_eq(kld_publish(teacher, "t", logits, &view, NULL, 0, &error), KLD_OK);
    ck_assert_int_eq(kld_attach(connection, "t", 0, &found, &view, &error), KLD_OK);
    ck_assert_uint_eq(device_of(connection), 1);
    ck_assert_uint_eq(view.shape[1], CLASSES);
    struct kld_region *memory;
    ck_assert_int_eq(import(on_first, &memory), KLD_INVALID); /* it is settled now */
    kld_close(teacher);
    teardown();
}
END_TEST

/* The answer to a registration, say, that was refused. */
START_TEST(test_what_came_with_the_answer_is_not_the_next_workers) {
    setup();
    struct kld_connection *teacher = connect_to(second.path);
    struct kld_region *logits, *found;
    struct kld_tensor_view view = {
        .dtype = KLD_DTYPE_FP32, .form = KLD_FORM_LOGITS, .rank = 2, .shape = {ROWS, CLASSES}};
    ck_assert_int_eq(kld_region_create(teacher, BYTES, &logits, &error), KLD_OK);
    ck_assert_int_eq(kld_publish(teacher, "t", logits, &view, NULL, 0, &error), KLD_OK);
    ck_assert_int_eq(kld_ping(teacher, NULL, &error), KLD_OK);
    int accepted = second.accepted;
    first.behind_not_found = KLD_FORBIDDEN;
    ck_assert_msg(kld_attach(connection, "t", 0, &found, &view, &error) == KLD_OK, "%s",
                  error.text);
    ck_assert_uint_eq(device_of(connection), 1);
    ck_assert_int_eq(second.accepted, accepted + 2); /* a look, then the connection */
    kld_close(teacher);
    teardown();
}
END_TEST

/* A worker that does not answer holds nobody up, and what was registered is not sent around. */
START_TEST(test_attaching_does_not_wait_for_who_is_away) {
    first = (struct fake_worker){.devices = 3};
    second = (struct fake_worker){.devices = 3, .device = 2};
    fake_worker_open(&first);
    fake_worker_open_beside(&second, &first);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%.100s.1", first.path);
    int away = socket(AF_UNIX, SOCK_SEQPACKET, 0); /* as between two workers */
    ck_assert_int_eq(bind(away, (struct sockaddr *)&address, sizeof address), 0);
    ck_assert_int_eq(listen(away, 32), 0); /* none is refused: nobody accepts */
    struct kld_region *shared, *found, *logits;
    struct kld_tensor_view view = {
        .dtype = KLD_DTYPE_FP32, .form = KLD_FORM_LOGITS, .rank = 2, .shape = {ROWS, CLASSES}};
    const struct kld_connect_options patient = {.connect_timeout_ns = TENTHS(600)};
    struct timespec before, after;
    int tries = 0;
    long took_ms = 150; /* of the quickest: a busy machine may stop any of them */
    for (; tries < 20 && took_ms >= 150; tries++) {
        if (tries > 0)
            kld_close(connection); /* it may know now who is away */
        connection = connect_with(first.path, &patient);
        clock_gettime(CLOCK_MONOTONIC, &before);
        ck_assert_int_eq(kld_region_create(connection, 2 * BYTES, &shared, &error), KLD_OK);
        ck_assert_int_eq(kld_attach(connection, "t", 20000000, &found, &view, &error),
                         KLD_NOT_FOUND);
        clock_gettime(CLOCK_MONOTONIC, &after);
        took_ms =
            (after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1000000;
    }
    ck_assert_int_lt(took_ms, 150); /* its caller's time, and not that of the look */
    ck_assert_int_eq(kld_attach(connection, "t", 300000000, &found, &view, &error), KLD_NOT_FOUND);
    ck_assert_int_eq(first.accepted, tries);
    ck_assert_int_eq(first.regions_added, tries);
    ck_assert_int_eq(second.regions_added, 0);
    struct kld_connection *teacher = connect_to(second.path);
    ck_assert_int_eq(kld_region_create(teacher, BYTES, &logits, &error), KLD_OK);
    ck_assert_int_eq(kld_publish(teacher, "t", logits, &view, NULL, 0, &error), KLD_OK);
    ck_assert_int_eq(kld_attach(connection, "t", 0, &found, &view, &error), KLD_OK);
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    clock_gettime(CLOCK_MONOTONIC, &after);
    ck_assert_int_eq(first.regions_added, tries);
    ck_assert_int_eq(second.regions_added, 2); /* the teacher's; and ours, with the only move */
    ck_assert_int_lt(after.tv_sec - before.tv_sec, 30); /* not the 60 s of a connection */
    kld_close(teacher);
    close(away);
    unlink(address.sun_path);
    teardown();
}
END_TEST

UNIT_MAIN("client/unix_device", test_attaching_does_not_wait_for_who_is_away,
          test_requests_on_plain_memory_are_waited_for, test_the_first_memory_says_where,
          test_from_any_socket_to_any_other, test_two_devices_need_two_connections,
          test_one_connection_does_where_cards_reach_each_other, test_an_event_says_where_too,
          test_a_lost_worker_is_waited_for_where_the_memory_is,
          test_a_worker_that_is_away_can_be_left_again,
          test_who_is_not_greeted_yet_finds_the_memory_too, test_a_late_greeting,
          test_who_was_put_off_by_a_server_that_went, test_attaching_finds_the_device,
          test_what_came_with_the_answer_is_not_the_next_workers)
