/* test_quota.c - no user takes all that clients share, however many connections it has, and what is
 * the gateway's is nobody else's. Users are processes that connect for the test. */
#include "server/worker/quota.h"

#include <unistd.h>

#include "tests/unit/server/worker/rig.h"
#include "tests/unit/unit.h"

static struct rig rig;

static void end(void) {
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}

START_TEST(no_user_takes_every_request) {
    UNIT_NEEDS(geteuid() == 0, "root, who alone can become somebody else");
    rig_init(&rig);
    rig.config.requests_max = 8;
    rig.config.client_requests_max = 4;
    rig.config.http_requests_max = 2;
    rig_start(&rig);
    int fds[4] = {rig_client_of(&rig, 1000), rig_client_of(&rig, 1000), rig_client_of(&rig, 1001),
                  rig_client_of(&rig, 1002)};
    uint64_t regions[4];
    for (int i = 0; i < 4; i++)
        regions[i] = rig_region(fds[i], RIG_REGION_BYTES);
    atomic_store(&rig.fake.hold, true);
    for (uint64_t i = 0; i < 4; i++)
        rig_submit(fds[0], 100 + i, regions[0]);
    for (uint64_t i = 0; i < 3; i++)
        rig_submit(fds[1], 200 + i, regions[1]);
    rig_expect_error(fds[1], 202, KLD_BUSY, "6 requests of this user are in flight");
    rig_submit(fds[2], 300, regions[2]);
    rig_submit(fds[2], 301, regions[2]);
    rig_expect_error(fds[2], 301, KLD_BUSY, "1 requests of this user are in flight");
    rig_submit(fds[3], 400, regions[3]);
    rig_submit(fds[3], 401, regions[3]);
    rig_expect_error(fds[3], 401, KLD_BUSY, "8 requests are in flight");
    rig_name_gateway(&rig, getpid(), -1);
    int gateway = rig_client(&rig);
    uint64_t region = rig_region(gateway, RIG_REGION_BYTES);
    for (uint64_t i = 0; i < 3; i++)
        rig_submit(gateway, 500 + i, region);
    rig_expect_error(gateway, 502, KLD_BUSY, "10 requests are in flight"); /* two of its own */
    ck_assert_uint_eq(rig.stats->rejected[KLD_REJECT_unix_requests_max], 4);
    atomic_store(&rig.fake.hold, false);
    for (uint64_t i = 0; i < 4; i++)
        rig_expect(fds[0], 100 + i, KLD_FRAME_DONE, NULL);
    rig_expect(gateway, 500, KLD_FRAME_DONE, NULL);
    rig_expect(gateway, 501, KLD_FRAME_DONE, NULL);
    ck_assert_uint_eq(atomic_load(&rig.fake.last_owner), 0); /* takes turns with all users */
    rig_submit(fds[2], 302, regions[2]); /* what came back is for whoever asks */
    rig_expect(fds[2], 300, KLD_FRAME_DONE, NULL);
    rig_expect(fds[2], 302, KLD_FRAME_DONE, NULL);
    for (int i = 0; i < 4; i++)
        close(fds[i]);
    close(gateway);
    end();
}
END_TEST

/* What the gateway has above its own is the clients'. */
START_TEST(what_the_gateway_takes_beyond_its_own_is_counted) {
    rig_init(&rig);
    rig.config.requests_max = 4;
    rig.config.http_requests_max = 2;
    rig.config.user_share = 100;
    rig_start(&rig);
    int early = rig_client(&rig), client = rig_client_of(&rig, geteuid());
    uint64_t region = rig_region(early, RIG_REGION_BYTES);
    uint64_t other = rig_region(client, RIG_REGION_BYTES);
    atomic_store(&rig.fake.hold, true);
    for (uint64_t i = 0; i < 4; i++)
        rig_submit(early, 100 + i, region); /* of its user, so far */
    rig_submit(client, 200, other);
    rig_expect_error(client, 200, KLD_BUSY, "4 requests are in flight");
    rig_name_gateway(&rig, getpid(), -1);
    for (uint64_t i = 201; i < 204; i++)
        rig_submit(client, i, other);
    rig_expect_error(client, 203, KLD_BUSY, "2 requests are in flight");
    atomic_store(&rig.fake.hold, false);
    for (uint64_t i = 0; i < 4; i++)
        rig_expect(early, 100 + i, KLD_FRAME_DONE, NULL);
    rig_expect(client, 201, KLD_FRAME_DONE, NULL);
    rig_expect(client, 202, KLD_FRAME_DONE, NULL);
    close(early);
    close(client);
    end();
}
END_TEST

static uint64_t pool_region(int fd, uint64_t bytes, enum kld_status status, const char *text) {
    union kld_frame frame;
    rig_region_frame(&frame, 60, KLD_REGION_POOL, bytes);
    rig_send(fd, &frame);
    if (status) {
        rig_expect_error(fd, 60, status, text);
        return 0;
    }
    rig_expect(fd, 60, KLD_FRAME_REGION, &frame);
    return frame.as_REGION.region;
}

START_TEST(no_user_takes_the_whole_pool) {
    UNIT_NEEDS(geteuid() == 0, "root, who alone can become somebody else");
    rig_init(&rig);
    rig_start(&rig);
    const uint64_t pool = rig.worker.device->info.pool_bytes_max;
    const uint64_t all = pool - pool / KLD_POOL_FLOOR_PART, share = all / 4 * 3;
    int first = rig_client_of(&rig, 1000), second = rig_client_of(&rig, 1000);
    int other = rig_client_of(&rig, 1001);
    pool_region(first, pool / 2, KLD_OK, "");
    pool_region(second, share - pool / 2 + 1, KLD_NO_MEMORY, "bytes of this user's, who has");
    uint64_t region = pool_region(second, share - pool / 2, KLD_OK, "");
    pool_region(other, all / 4, KLD_NO_MEMORY, "that others leave to one (user_share)");
    pool_region(other, all / 4 / 4 * 3, KLD_OK, "");
    rig_drop(second, 61, region);
    rig_expect(second, 61, KLD_FRAME_DONE, NULL);
    rig_until_stat(&rig, KLD_STAT_worker_regions, 2);
    pool_region(other, pool / 16, KLD_OK, "");
    close(first);
    close(second);
    close(other);
    end();
}
END_TEST

START_TEST(no_user_shares_all_of_the_hosts_memory) {
    UNIT_NEEDS(geteuid() == 0, "root, who alone can become somebody else");
    rig_init(&rig);
    rig.config.shared_bytes_max = rig.config.client_shared_bytes_max = 16 << 20;
    rig_start(&rig);
    int first = rig_client_of(&rig, 1000), second = rig_client_of(&rig, 1000);
    int other = rig_client_of(&rig, 1001);
    rig_memfd_region(first, (12 << 20) + 1, KLD_TOO_LARGE, "a user may share 12582912");
    rig_memfd_region(first, 8 << 20, KLD_OK, "");
    rig_memfd_region(second, (4 << 20) + 1, KLD_NO_MEMORY, "who shares 8388608 of the 12582912");
    rig_memfd_region(second, 4 << 20, KLD_OK, "");
    rig_memfd_region(other, 3 << 20, KLD_OK, "");
    close(first);
    close(second);
    rig_until_stat(&rig, KLD_STAT_worker_regions, 1);
    rig_memfd_region(other, 5 << 20, KLD_OK, "");
    close(other);
    end();
}
END_TEST

/* Who sends as many requests as he was told is refused none, if he is alone. */
START_TEST(no_more_requests_are_promised_than_a_user_may_have) {
    union kld_frame frame;
    rig_init(&rig);
    rig.config.requests_max = 8;
    rig.config.client_requests_max = 8;
    rig_start(&rig);
    int fd = rig_connect(&rig);
    kld_frame_init(&frame, KLD_FRAME_HELLO, 1);
    frame.as_HELLO.version_min = frame.as_HELLO.version_max = KLD_WIRE_VERSION;
    rig_send(fd, &frame);
    rig_expect(fd, 1, KLD_FRAME_WELCOME, &frame);
    ck_assert_uint_eq(frame.as_WELCOME.requests_max, 6);
    close(fd);
    end();
}
END_TEST

START_TEST(no_user_takes_every_mapping) {
    UNIT_NEEDS(geteuid() == 0, "root, who alone can become somebody else");
    struct kld_config config = {.mappings_max = 0};
    ck_assert_uint_eq(kld_quota_mappings_max(&config, 65530), 49148);
    ck_assert_uint_eq(kld_quota_mappings_max(&config, 0), 49148); /* not told: the usual */
    rig_init(&rig);
    rig.config.mappings_max = 8;
    rig_start(&rig);
    int first = rig_client_of(&rig, 1000), second = rig_client_of(&rig, 1000);
    int other = rig_client_of(&rig, 1001), third = rig_client_of(&rig, 1002);
    uint64_t region = rig_region(first, 4096);
    for (int i = 0; i < 4; i++)
        rig_memfd_region(first, 4096, KLD_OK, "");
    rig_memfd_region(second, 4096, KLD_OK, "");
    rig_memfd_region(second, 4096, KLD_NO_MEMORY, "6 regions of this user are mapped");
    pool_region(second, 4096, KLD_OK, ""); /* on this device it is none */
    rig_memfd_region(other, 4096, KLD_OK, "");
    rig_memfd_region(third, 4096, KLD_OK, "");
    rig_memfd_region(third, 4096, KLD_NO_MEMORY, "8 regions are mapped, the most allowed");
    rig_drop(first, 71, region);
    rig_expect(first, 71, KLD_FRAME_DONE, NULL);
    rig_until_stat(&rig, KLD_STAT_worker_regions, 8);
    rig_memfd_region(third, 4096, KLD_NO_MEMORY, "1 regions of this user are mapped");
    int early = rig_client(&rig);
    rig_memfd_region(early, 4096, KLD_OK, ""); /* a client's, so far */
    rig_name_gateway(&rig, getpid(), -1);
    rig_memfd_region(second, 4096, KLD_NO_MEMORY, "5 regions of this user are mapped");
    rig_memfd_region(third, 4096, KLD_NO_MEMORY, "1 regions of this user are mapped");
    close(other);
    rig_until_stat(&rig, KLD_STAT_worker_regions, 8);
    for (int i = 0; i < 9; i++)
        rig_memfd_region(early, 4096, KLD_OK, "");
    close(first);
    close(second);
    close(third);
    close(early);
    end();
}
END_TEST

/* A user whose connections have hundreds of tasks waits for those himself. */
START_TEST(no_user_takes_every_turn_of_the_pool) {
    UNIT_NEEDS(geteuid() == 0, "root, who alone can become somebody else");
    union kld_frame frame;
    rig_init(&rig);
    rig_start(&rig);
    int fds[3] = {rig_client_of(&rig, 1000), rig_client_of(&rig, 1000), rig_client_of(&rig, 1000)};
    int other = rig_client_of(&rig, 1001);
    atomic_store(&rig.fake.memory_us, 20000);
    atomic_store(&rig.fake.hold_memory, true);
    for (int i = 0; i < 3; i++)
        for (uint64_t j = 0; j < KLD_SESSION_TASKS_MAX; j++) {
            rig_region_frame(&frame, 100 + j, KLD_REGION_POOL, 4096);
            rig_send(fds[i], &frame);
        }
    rig_until_stat(&rig, KLD_STAT_worker_regions, UINT64_C(3) * KLD_SESSION_TASKS_MAX);
    rig_region_frame(&frame, 10, KLD_REGION_POOL, 4096);
    rig_send(other, &frame);
    rig_until_stat(&rig, KLD_STAT_worker_regions, UINT64_C(3) * KLD_SESSION_TASKS_MAX + 1);
    atomic_store(&rig.fake.hold_memory, false);
    rig_expect(other, 10, KLD_FRAME_REGION, NULL);
    ck_assert_int_lt(atomic_load(&rig.fake.calls), 2 * KLD_SESSION_TASKS_MAX);
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < KLD_SESSION_TASKS_MAX; j++) {
            rig_receive(fds[i], &frame);
            ck_assert_uint_eq(frame.header.type, KLD_FRAME_REGION);
        }
    for (int i = 0; i < 3; i++)
        close(fds[i]);
    close(other);
    end();
}
END_TEST

UNIT_MAIN("server/worker/quota", no_more_requests_are_promised_than_a_user_may_have,
          no_user_takes_every_turn_of_the_pool, no_user_takes_every_request,
          no_user_takes_the_whole_pool, no_user_takes_every_mapping,
          no_user_shares_all_of_the_hosts_memory, what_the_gateway_takes_beyond_its_own_is_counted)
