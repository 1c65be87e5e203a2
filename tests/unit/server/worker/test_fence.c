/* test_fence.c - fences: words in a client's memory to which the device writes a number behind each
 * request that names them; over the double, which writes them as a device would. */
#include "server/worker/event.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/unit/server/worker/rig.h"
#include "tests/unit/unit.h"

#define PAGE_BYTES 4096
#define WORD_AT 64

static struct rig rig;
static uint64_t page, fence;    /* of the client */
static _Atomic uint32_t *words; /* the page, here */

static void end(void) {
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
    munmap((void *)words, PAGE_BYTES);
}

static void send_fence(int fd, uint64_t request, uint64_t region, uint64_t offset_bytes) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_FENCE_ADD, request);
    frame.as_FENCE_ADD.region = region;
    frame.as_FENCE_ADD.offset_bytes = offset_bytes;
    rig_send(fd, &frame);
}

static uint64_t add_fence(int fd, uint64_t region, uint64_t offset_bytes) {
    static const uint8_t none[KLD_WIRE_IPC_HANDLE_BYTES];
    union kld_frame frame;
    send_fence(fd, 912, region, offset_bytes);
    rig_expect(fd, 912, KLD_FRAME_EVENT, &frame);
    ck_assert_int_eq(memcmp(frame.as_EVENT.ipc_handle, none, sizeof none), 0);
    return frame.as_EVENT.event;
}

/* A client with a page that both sides see and a fence in it, whose word held something else. */
static int start(void) {
    rig_init(&rig);
    rig_start(&rig);
    int fd = rig_client(&rig), memfd = rig_memfd(PAGE_BYTES);
    words = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    ck_assert_ptr_ne(words, MAP_FAILED);
    atomic_store(&words[WORD_AT / 4], 77);
    union kld_frame frame;
    rig_region_frame(&frame, 900, KLD_REGION_MEMFD, PAGE_BYTES);
    rig_send_fds(fd, &frame, frame.header.length, &memfd, 1);
    close(memfd);
    rig_expect(fd, 900, KLD_FRAME_REGION, &frame);
    page = frame.as_REGION.region;
    fence = add_fence(fd, page, WORD_AT);
    ck_assert_uint_eq(atomic_load(&words[WORD_AT / 4]), 0);
    return fd;
}

static uint32_t word(void) { return atomic_load(&words[WORD_AT / 4]); }

static uint64_t device_region(int fd) {
    union kld_frame frame;
    rig_region_frame(&frame, 911, KLD_REGION_POOL, RIG_REGION_BYTES);
    rig_send(fd, &frame);
    rig_expect(fd, 911, KLD_FRAME_REGION, &frame);
    return frame.as_REGION.region;
}

static void submit(int fd, uint64_t request, uint64_t region, uint32_t stream, bool early) {
    union kld_frame frame;
    rig_op(&frame, request, region);
    frame.as_SUBMIT.done_event = fence;
    frame.as_SUBMIT.stream = stream;
    frame.as_SUBMIT.flags = early ? KLD_SUBMIT_EARLY : 0;
    rig_send(fd, &frame);
}

static uint32_t number_of(int fd, uint64_t request) {
    union kld_frame frame;
    rig_expect(fd, request, KLD_FRAME_DONE, &frame);
    return frame.as_DONE.fence_number;
}

static void drop_fence(int fd, uint64_t request) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_EVENT_DROP, request);
    frame.as_EVENT_DROP.event = fence;
    rig_send(fd, &frame);
    rig_expect(fd, request, KLD_FRAME_DONE, NULL);
}

START_TEST(fences_are_checked) {
    int fd = start(), other = rig_client(&rig);
    send_fence(fd, 1, page + 1, 0);
    rig_expect_error(fd, 1, KLD_NOT_FOUND, "fence: no region");
    send_fence(other, 1, page, 0); /* of another client */
    rig_expect_error(other, 1, KLD_NOT_FOUND, "fence: no region");
    send_fence(fd, 2, device_region(fd), 0);
    rig_expect_error(fd, 2, KLD_INVALID, "expected host memory");
    const uint64_t wrong[] = {1, 2, PAGE_BYTES - 2, PAGE_BYTES, PAGE_BYTES + 4, UINT64_MAX - 3};
    for (uint64_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        send_fence(fd, 3 + i, page, wrong[i]);
        rig_expect_error(fd, 3 + i, KLD_INVALID, "expected a multiple of 4");
    }
    send_fence(fd, 10, rig_region(fd, 3), 0);
    rig_expect_error(fd, 10, KLD_INVALID, "in a region of 3");
    atomic_store(&rig.fake.fail_status, KLD_UNIMPLEMENTED);
    atomic_store(&rig.fake.fail_call, 1);
    send_fence(fd, 11, page, 0);
    rig_expect_error(fd, 11, KLD_UNIMPLEMENTED, "told to fail");
    add_fence(fd, page, PAGE_BYTES - 4);
    union kld_frame frame;
    rig_op(&frame, 12, device_region(fd));
    frame.as_SUBMIT.ready_event = fence;
    rig_send(fd, &frame);
    rig_expect_error(fd, 12, KLD_INVALID, "is of the other kind");
    close(fd);
    rig_until_is(&rig.fake.events, 0);
    close(other);
    end();
}
END_TEST

START_TEST(fences_count_as_events) {
    int fd = start();
    for (int i = 1; i < KLD_SESSION_EVENTS_MAX; i++)
        (void)(i % 2 ? add_fence(fd, page, 0) : rig_add_event(fd, KLD_EVENT_DONE));
    send_fence(fd, 1, page, 0);
    rig_expect_error(fd, 1, KLD_TOO_LARGE, "64 events");
    close(fd);
    end();

    rig_init(&rig);
    rig.fake.head.info.imports_cuda_ipc = false;
    rig_start(&rig);
    fd = rig_client(&rig);
    send_fence(fd, 1, rig_region(fd, PAGE_BYTES), 0);
    rig_expect_error(fd, 1, KLD_UNIMPLEMENTED, "events need the cuda back end");
    close(fd);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}
END_TEST

START_TEST(attached_memory_has_no_fence) {
    int fd = start(), other = rig_client(&rig);
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_PUBLISH, 1);
    strcpy(frame.as_PUBLISH.name, "page");
    frame.as_PUBLISH.region = page;
    frame.as_PUBLISH.tensor =
        (struct kld_wire_description){.dtype = KLD_DTYPE_FP32, .rank = 1, .shape = {16}};
    rig_send(fd, &frame);
    rig_expect(fd, 1, KLD_FRAME_DONE, NULL);
    kld_frame_init(&frame, KLD_FRAME_ATTACH, 2);
    strcpy(frame.as_ATTACH.name, "page");
    frame.as_ATTACH.uid = KLD_WIRE_UID_OWN;
    rig_send(other, &frame);
    rig_expect(other, 2, KLD_FRAME_ATTACHED, &frame);
    send_fence(other, 3, frame.as_ATTACHED.region, 0);
    rig_expect_error(other, 3, KLD_FORBIDDEN, "attached");
    close(other);
    close(fd);
    end();
}
END_TEST

START_TEST(each_request_has_the_next_number) {
    int fd = start();
    uint64_t region = device_region(fd);
    for (uint32_t i = 1; i <= 3; i++) {
        submit(fd, i, region, 2, false);
        ck_assert_uint_eq(number_of(fd, i), i);
        ck_assert_uint_eq(word(), i);
    }
    union kld_frame frame; /* a request without it has none, and writes nothing */
    rig_submit(fd, 4, region);
    rig_expect(fd, 4, KLD_FRAME_DONE, &frame);
    ck_assert_uint_eq(frame.as_DONE.fence_number, 0);
    ck_assert_uint_eq(word(), 3);

    submit(fd, 5, region, 1, false);
    rig_expect_error(fd, 5, KLD_INVALID, "is that of stream 2");

    atomic_store(&rig.fake.hold, true);
    submit(fd, 6, region, 2, true);
    ck_assert_uint_eq(number_of(fd, 6), 4); /* early: the work goes on */
    ck_assert_uint_eq(word(), 3);
    atomic_store(&rig.fake.hold, false);
    rig_until(&rig.fake.jobs_done, 5);
    ck_assert_uint_eq(word(), 4);

    uint64_t first = fence; /* another one counts by itself */
    fence = add_fence(fd, page, 0);
    submit(fd, 7, region, 1, false);
    ck_assert_uint_eq(number_of(fd, 7), 1);
    ck_assert_uint_eq(atomic_load(&words[0]), 1);
    ck_assert_uint_eq(word(), 4);
    ck_assert_uint_ne(first, fence);
    close(fd);
    end();
}
END_TEST

/* What never ran leaves its number out; what failed on the device does not: nobody is to wait. */
START_TEST(later_numbers_stand_for_those_left_out) {
    int fd = start();
    uint64_t region = device_region(fd);
    atomic_store(&rig.fake.hold, true);
    for (uint64_t i = 1; i <= KLD_LANE_DEPTH + 2; i++)
        submit(fd, i, region, 0, false);
    rig_until(&rig.fake.jobs_submitted, KLD_LANE_DEPTH);
    rig_cancel(fd, 90, KLD_LANE_DEPTH + 1);
    rig_expect_error(fd, KLD_LANE_DEPTH + 1, KLD_CANCELLED, "cancelled");
    rig_expect(fd, 90, KLD_FRAME_DONE, NULL);
    rig_cancel(fd, 91, 1); /* this one runs, and writes its number */
    rig_expect_error(fd, 1, KLD_CANCELLED, "cancelled");
    rig_expect(fd, 91, KLD_FRAME_DONE, NULL);
    atomic_store(&rig.fake.hold, false);
    for (uint32_t i = 2; i <= KLD_LANE_DEPTH; i++)
        ck_assert_uint_eq(number_of(fd, i), i);
    ck_assert_uint_eq(number_of(fd, KLD_LANE_DEPTH + 2), KLD_LANE_DEPTH + 2);
    ck_assert_uint_eq(word(), KLD_LANE_DEPTH + 2);

    atomic_store(&rig.fake.fail_job, KLD_INVALID);
    submit(fd, 50, region, 0, false);
    rig_expect_error(fd, 50, KLD_INVALID, "told to fail");
    ck_assert_uint_eq(word(), KLD_LANE_DEPTH + 3);
    close(fd);
    end();
}
END_TEST

/* The double says if the memory goes before the fence, or either under a job. */
START_TEST(memory_stays_for_its_fence_and_the_fence_for_its_job) {
    int fd = start();
    uint64_t region = device_region(fd);
    atomic_store(&rig.fake.hold, true);
    submit(fd, 1, region, 0, true);
    ck_assert_uint_eq(number_of(fd, 1), 1);
    rig_drop(fd, 2, page);
    rig_expect(fd, 2, KLD_FRAME_DONE, NULL);
    drop_fence(fd, 3);
    submit(fd, 4, region, 0, true);
    rig_expect_error(fd, 4, KLD_NOT_FOUND, "no event");
    send_fence(fd, 5, page, 0);
    rig_expect_error(fd, 5, KLD_NOT_FOUND, "no region");
    usleep(20000);
    ck_assert_int_eq(atomic_load(&rig.fake.events), 1);
    ck_assert_int_eq(atomic_load(&rig.fake.memories), 2);
    atomic_store(&rig.fake.hold, false);
    rig_until_is(&rig.fake.events, 0);
    rig_until_is(&rig.fake.memories, 1);
    ck_assert_uint_eq(word(), 1);
    close(fd);
    end();
}
END_TEST

/* Nor when the client is gone: what it was told early is still written. */
START_TEST(a_client_that_leaves_takes_nothing_along) {
    int fd = start();
    uint64_t region = device_region(fd);
    atomic_store(&rig.fake.hold, true);
    submit(fd, 1, region, 0, true);
    ck_assert_uint_eq(number_of(fd, 1), 1);
    close(fd);
    rig_until_stat(&rig, KLD_STAT_unix_clients, 0);
    usleep(20000);
    ck_assert_int_eq(atomic_load(&rig.fake.events), 1);
    atomic_store(&rig.fake.hold, false);
    rig_until_is(&rig.fake.memories, 0);
    ck_assert_uint_eq(word(), 1);
    end();
}
END_TEST

/* The client sees the end of its connection, and frees whoever waits by itself. */
START_TEST(a_lost_device_writes_nothing) {
    int fd = start();
    uint64_t region = device_region(fd);
    atomic_store(&rig.fake.hold, true);
    atomic_store(&rig.fake.fail_job, KLD_DEVICE_LOST);
    submit(fd, 1, region, 0, true);
    ck_assert_uint_eq(number_of(fd, 1), 1);
    atomic_store(&rig.fake.hold, false);
    ck_assert_int_eq(rig_wait(&rig), 2);
    ck_assert(rig_ended(fd, 1000));
    ck_assert_uint_eq(word(), 0);
    close(fd);
}
END_TEST

START_TEST(numbers_go_round_and_leave_0_out) {
    struct kld_worker_event event = {.kind = KLD_EVENT_FENCE, .number = UINT32_MAX - 1};
    ck_assert_uint_eq(kld_worker_event_count(&event, 3), UINT32_MAX);
    ck_assert_uint_eq(kld_worker_event_count(&event, 3), 1);
    ck_assert_uint_eq(kld_worker_event_count(&event, 3), 2);
    ck_assert_uint_eq(event.stream, 3);
    event.kind = KLD_EVENT_DONE;
    ck_assert_uint_eq(kld_worker_event_count(&event, 3), 0);
}
END_TEST

UNIT_MAIN("server/worker/fence", fences_are_checked, fences_count_as_events,
          attached_memory_has_no_fence, each_request_has_the_next_number,
          later_numbers_stand_for_those_left_out,
          memory_stays_for_its_fence_and_the_fence_for_its_job,
          a_client_that_leaves_takes_nothing_along, a_lost_device_writes_nothing,
          numbers_go_round_and_leave_0_out)
