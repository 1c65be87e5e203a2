/* test_request.c - a request on a warm connection allocates nothing on the worker's loop. */
#include "server/worker/request.h"

#include <unistd.h>

#include "tests/unit/allocations.h"
#include "tests/unit/server/worker/rig.h"
#include "tests/unit/unit.h"

static struct rig rig;

static void work(int fd, uint64_t region) {
    union kld_frame frame;
    for (uint64_t i = 0; i < 100; i++) {
        rig_op(&frame, 1000 + i, region);
        frame.as_SUBMIT.timeout_ns = i % 2 ? UINT64_C(60000000000) : 0;
        frame.as_SUBMIT.stream = i % 4;
        rig_send(fd, &frame);
        rig_expect(fd, 1000 + i, KLD_FRAME_DONE, NULL);
    }
}

START_TEST(warm_requests_allocate_nothing) {
    rig_init(&rig);
    rig_start(&rig);
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    work(fd, region);
    counted = rig.thread;
    atomic_store(&counting, true);
    work(fd, region);
    ck_assert_int_eq(atomic_load(&allocations), 0);
    rig_region(fd, RIG_REGION_BYTES); /* this does, so the counter counts */
    ck_assert_int_eq(atomic_load(&allocations) > 0, COUNTS);
    atomic_store(&counting, false);
    close(fd);
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}
END_TEST

UNIT_MAIN("server/worker/request", warm_requests_allocate_nothing)
