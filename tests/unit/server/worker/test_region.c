/* test_region.c - what may be registered, quotas, regions that show the same memory, and regions
 * whose client leaves while they come or go. */
#include "server/worker/region.h"

#include <fcntl.h>
#include <linux/kcmp.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "server/role.h"
#include "tests/unit/server/worker/rig.h"
#include "tests/unit/unit.h"

static struct rig rig;

static void start(void) {
    rig_init(&rig);
    rig_start(&rig);
}

static void end(void) {
    ck_assert_int_eq(rig_end(&rig), 0);
    rig_done(&rig);
}

/* A part of one GPU allocation of 1 MiB. */
static void ipc_frame(union kld_frame *frame, uint64_t request, uint64_t offset, uint64_t bytes) {
    rig_region_frame(frame, request, KLD_REGION_CUDA_IPC, bytes);
    frame->as_REGION_ADD.offset_bytes = offset;
    frame->as_REGION_ADD.base_bytes = 1 << 20;
    memset(frame->as_REGION_ADD.device_uuid, 7, KLD_WIRE_UUID_BYTES);
    memset(frame->as_REGION_ADD.ipc_handle, 9, KLD_WIRE_IPC_HANDLE_BYTES);
}

static uint64_t ipc_region(int fd, uint64_t offset, uint64_t bytes) {
    union kld_frame frame;
    ipc_frame(&frame, 901, offset, bytes);
    rig_send(fd, &frame);
    rig_expect(fd, 901, KLD_FRAME_REGION, &frame);
    return frame.as_REGION.region;
}

START_TEST(ipc_handles_are_checked) {
    start();
    int fd = rig_client(&rig);
    union kld_frame frame;
    ipc_frame(&frame, 10, 0, 1 << 20);
    frame.as_REGION_ADD.device_uuid[0] = 1;
    rig_send(fd, &frame);
    rig_expect_error(fd, 10, KLD_INVALID, "another device");
    ipc_frame(&frame, 11, 1, 1 << 20);
    rig_send(fd, &frame);
    rig_expect_error(fd, 11, KLD_INVALID, "do not fit a base allocation");
    ipc_frame(&frame, 12, UINT64_MAX - 7, 64);
    rig_send(fd, &frame);
    rig_expect_error(fd, 12, KLD_INVALID, "do not fit a base allocation");
    ipc_region(fd, 4096, (1 << 20) - 4096);
    close(fd);
    end();
}
END_TEST

START_TEST(memory_of_other_cards_is_for_those_told) {
    for (int told = 0; told < 2; told++) {
        rig_init(&rig);
        rig.config.peer_access = told;
        atomic_store(&rig.fake.peers, told);
        rig_start(&rig);
        int fd = rig_connect(&rig);
        union kld_frame frame;
        kld_frame_init(&frame, KLD_FRAME_HELLO, 1);
        frame.as_HELLO.version_min = frame.as_HELLO.version_max = KLD_WIRE_VERSION;
        rig_send(fd, &frame);
        rig_expect(fd, 1, KLD_FRAME_WELCOME, &frame);
        ck_assert_uint_eq(frame.as_WELCOME.flags & KLD_WELCOME_PEERS, told ? KLD_WELCOME_PEERS : 0);
        ipc_frame(&frame, 10, 0, 1 << 20);
        frame.as_REGION_ADD.device_uuid[0] = 9; /* one that the card reaches */
        rig_send(fd, &frame);
        if (told)
            rig_expect(fd, 10, KLD_FRAME_REGION, NULL);
        else
            rig_expect_error(fd, 10, KLD_INVALID, "another device");
        ipc_frame(&frame, 11, 0, 1 << 20);
        frame.as_REGION_ADD.device_uuid[0] = 8;
        rig_send(fd, &frame);
        rig_expect_error(fd, 11, KLD_INVALID, "another device");
        close(fd);
        end();
    }
}
END_TEST

static uint64_t file_region(int fd, int file, uint64_t offset) {
    union kld_frame frame;
    ipc_frame(&frame, 902, offset, 1 << 16);
    frame.as_REGION_ADD.kind = KLD_REGION_CUDA_FD;
    memset(frame.as_REGION_ADD.ipc_handle, 0, KLD_WIRE_IPC_HANDLE_BYTES);
    rig_send_fds(fd, &frame, frame.header.length, &file, 1);
    rig_expect(fd, 902, KLD_FRAME_REGION, &frame);
    return frame.as_REGION.region;
}

static int descriptors(void) {
    int count = 0;
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

/* Those that go are closed by a thread of their own. */
static void until_descriptors(int count) {
    for (int i = 0; i < 500 && descriptors() != count; i++)
        usleep(10000);
    ck_assert_int_eq(descriptors(), count);
}

/* The same of allocations that come as descriptors: one open file is one memory, another open of
 * the same device is not. */
START_TEST(one_descriptor_is_one_memory) {
    start();
    int fd = rig_client(&rig);
    int file = open("/dev/null", O_RDWR), copy = dup(file), other = open("/dev/null", O_RDWR);
    /* Some containers do not let a process ask: then nothing is told apart. */
    bool told = syscall(SYS_kcmp, getpid(), getpid(), KCMP_FILE, (long)file, (long)copy) == 0;
    rig_plain(fd, KLD_FRAME_PING, 1);
    rig_expect(fd, 1, KLD_FRAME_PONG, NULL);
    int before = descriptors();
    for (int round = 0; round < 100; round++) { /* more than are kept, so none may stay */
        uint64_t regions[3] = {file_region(fd, file, 0), file_region(fd, copy, 4096),
                               file_region(fd, other, 4096)};
        for (int second = 1; second < 3; second++) {
            union kld_frame frame;
            struct kld_wire_tensor *tensor = frame.as_SUBMIT.tensor;
            rig_op(&frame, 20, regions[0]);
            tensor[KLD_SLOT_TARGETS].offset_bytes = 4096;
            tensor[KLD_SLOT_GRAD_PREDICTIONS] = (struct kld_wire_tensor){
                .dtype = KLD_DTYPE_FP32, .region = regions[second], .offset_bytes = 4};
            rig_send(fd, &frame);
            if (told && second == 1)
                rig_expect_error(fd, 20, KLD_INVALID, "grad_predictions overlaps targets");
            else
                rig_expect(fd, 20, KLD_FRAME_DONE, NULL);
        }
        for (int i = 0; i < 3; i++) {
            rig_drop(fd, 30, regions[i]);
            rig_expect(fd, 30, KLD_FRAME_DONE, NULL);
        }
    }
    rig_until_stat(&rig, KLD_STAT_worker_regions, 0);
    until_descriptors(before);
    close(file);
    close(copy);
    close(other);
    close(fd);
    end();
}
END_TEST

/* What all clients together have kept open is bounded; above that allocations are taken as before,
 * and not told apart. Who leaves makes room. */
START_TEST(descriptors_kept_have_a_limit) {
    rig_init(&rig);
    rig.config.cuda_files_max = 3;
    rig_start(&rig);
    int first = rig_client(&rig), second = rig_client(&rig);
    int file = open("/dev/null", O_RDWR);
    rig_plain(second, KLD_FRAME_PING, 1);
    rig_expect(second, 1, KLD_FRAME_PONG, NULL);
    int before = descriptors();
    for (int i = 0; i < 5; i++) { /* half of them one client's */
        int other = open("/dev/zero", O_RDWR);
        file_region(first, other, 0);
        close(other);
    }
    until_descriptors(before + 2);
    close(first);
    rig_until_stat(&rig, KLD_STAT_worker_regions, 0);
    rig_until_stat(&rig, KLD_STAT_unix_clients, 1);
    first = rig_client(&rig);
    for (int round = 0; round < 2; round++) {
        until_descriptors(before);
        for (int i = 0; i < 5; i++) {
            int other = open("/dev/zero", O_RDWR);
            file_region(i % 2 ? first : second, other, 0);
            close(other);
        }
        until_descriptors(before + 3);
        uint64_t regions[2] = {file_region(second, file, 0), file_region(second, file, 4096)};
        union kld_frame frame;
        rig_op(&frame, 20, regions[0]);
        frame.as_SUBMIT.tensor[KLD_SLOT_TARGETS].offset_bytes = 4096;
        frame.as_SUBMIT.tensor[KLD_SLOT_GRAD_PREDICTIONS] = (struct kld_wire_tensor){
            .dtype = KLD_DTYPE_FP32, .region = regions[1], .offset_bytes = 4};
        rig_send(second, &frame);
        rig_expect(second, 20, KLD_FRAME_DONE, NULL);
        until_descriptors(before + 3);
        close(first);
        close(second);
        rig_until_stat(&rig, KLD_STAT_worker_regions, 0);
        rig_until_stat(&rig, KLD_STAT_unix_clients, 0);
        first = rig_client(&rig);
        second = rig_client(&rig);
    }
    close(first);
    close(second);
    close(file);
    end();
}
END_TEST

/* All of a client's, however many, in any order, and while others go. */
START_TEST(every_descriptor_of_a_client_is_told_apart) {
    enum { FILES = 150 };
    start();
    int fd = rig_client(&rig), files[FILES];
    uint64_t regions[FILES], second;
    for (int i = 0; i < FILES; i++) {
        files[i] = open("/dev/null", O_RDWR);
        regions[i] = file_region(fd, files[i], 0);
    }
    bool told = syscall(SYS_kcmp, getpid(), getpid(), KCMP_FILE, (long)fd, (long)fd) == 0;
    for (int i = FILES - 1; i >= 0; i--) {
        union kld_frame frame;
        second = file_region(fd, files[i], 4096);
        rig_op(&frame, 20, regions[i]);
        frame.as_SUBMIT.tensor[KLD_SLOT_TARGETS].offset_bytes = 4096;
        frame.as_SUBMIT.tensor[KLD_SLOT_GRAD_PREDICTIONS] =
            (struct kld_wire_tensor){.dtype = KLD_DTYPE_FP32, .region = second, .offset_bytes = 4};
        rig_send(fd, &frame);
        if (told)
            rig_expect_error(fd, 20, KLD_INVALID, "grad_predictions overlaps targets");
        else
            rig_expect(fd, 20, KLD_FRAME_DONE, NULL);
        const uint64_t dropped[] = {regions[i], second};
        for (int j = i % 3 == 0; j < 2; j++) {
            rig_drop(fd, 30, dropped[j]);
            rig_expect(fd, 30, KLD_FRAME_DONE, NULL);
        }
        close(files[i]);
    }
    close(fd);
    rig_until_stat(&rig, KLD_STAT_worker_regions, 0);
    end(); /* its thread has ended: only now may another look */
    ck_assert_uint_eq(rig.worker.cuda_files, 0);
}
END_TEST

/* Two tensors of a caching allocator often lie in one allocation: two regions, one memory. */
START_TEST(parts_of_one_allocation_are_one_memory) {
    start();
    int fd = rig_client(&rig);
    uint64_t whole = ipc_region(fd, 0, 1 << 16), part = ipc_region(fd, 4096, 1 << 16);
    union kld_frame frame;
    struct kld_wire_tensor *tensor = frame.as_SUBMIT.tensor;
    rig_op(&frame, 20, whole);
    tensor[KLD_SLOT_TARGETS].offset_bytes = 4096;
    tensor[KLD_SLOT_GRAD_PREDICTIONS] =
        (struct kld_wire_tensor){.dtype = KLD_DTYPE_FP32, .region = part, .offset_bytes = 4};
    rig_send(fd, &frame);
    rig_expect_error(fd, 20, KLD_INVALID, "grad_predictions overlaps targets");
    tensor[KLD_SLOT_GRAD_PREDICTIONS].offset_bytes = RIG_TENSOR_BYTES;
    rig_send(fd, &frame);
    rig_expect(fd, 20, KLD_FRAME_DONE, NULL);
    /* A gradient exactly over its own tensor, named through the other region. */
    tensor[KLD_SLOT_PREDICTIONS].offset_bytes = 4096 + RIG_TENSOR_BYTES;
    rig_send(fd, &frame);
    rig_expect(fd, 20, KLD_FRAME_DONE, NULL);

    kld_frame_init(&frame, KLD_FRAME_COPY, 21);
    frame.as_COPY.destination = part;
    frame.as_COPY.source = whole;
    frame.as_COPY.source_offset_bytes = 4096 + 99;
    frame.as_COPY.bytes = 100;
    rig_send(fd, &frame);
    rig_expect_error(fd, 21, KLD_INVALID, "overlap");
    frame.as_COPY.source_offset_bytes = 4096 + 100;
    rig_send(fd, &frame);
    rig_expect(fd, 21, KLD_FRAME_DONE, NULL);
    close(fd);
    end();
}
END_TEST

START_TEST(a_card_that_takes_turns_is_told_of_once) {
    for (int turns = 0; turns < 2; turns++) {
        rig_init(&rig);
        rig.fake.head.info.takes_turns = turns;
        rig_start(&rig);
        atomic_store(&rig.fake.handles_unread, turns);
        int fd = rig_client(&rig);
        rig_region(fd, 4096);
        rig_plain(fd, KLD_FRAME_PING, 1);
        rig_expect(fd, 1, KLD_FRAME_PONG, NULL);
        ipc_region(fd, 0, 4096);
        close(fd);
        ck_assert_int_eq(rig_end(&rig), 0);
        ck_assert_int_eq(rig.worker.told_turns, turns);
        ck_assert_int_eq(rig.worker.told_handles, turns);
        rig_done(&rig);
    }
}
END_TEST

START_TEST(table_grows_to_its_limit_and_reuses_places) {
    rig_init(&rig);
    rig.config.client_regions_max = 50;
    rig_start(&rig);
    int fd = rig_client(&rig);
    uint64_t ids[50];
    union kld_frame frame;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 50; i++) {
            ids[i] = rig_region(fd, 4096);
            for (int j = 0; j < i; j++)
                ck_assert_uint_ne(ids[i], ids[j]);
        }
        rig_region_frame(&frame, 40, KLD_REGION_POOL, 1);
        rig_send(fd, &frame);
        rig_expect_error(fd, 40, KLD_TOO_LARGE, "50 regions");
        ck_assert_int_eq(atomic_load(&rig.fake.memories), 50);
        for (int i = 0; i < 50; i++) {
            rig_drop(fd, 50, ids[i]);
            rig_expect(fd, 50, KLD_FRAME_DONE, NULL);
        }
        rig_drop(fd, 51, ids[0]);
        rig_expect_error(fd, 51, KLD_NOT_FOUND, "no region");
        rig_until_stat(&rig, KLD_STAT_worker_regions, 0);
    }
    close(fd);
    end();
}
END_TEST

START_TEST(quota_counts_what_is_still_condemned) {
    rig_init(&rig);
    rig.config.client_region_bytes_max = RIG_REGION_BYTES + 10;
    rig_start(&rig);
    int fd = rig_client(&rig);
    uint64_t region = rig_region(fd, RIG_REGION_BYTES);
    union kld_frame frame;
    atomic_store(&rig.fake.hold, true);
    rig_submit(fd, 10, region);
    rig_until(&rig.fake.jobs_started, 1);
    rig_drop(fd, 11, region);
    rig_expect(fd, 11, KLD_FRAME_DONE, NULL);
    rig_region_frame(&frame, 12, KLD_REGION_POOL, 11);
    rig_send(fd, &frame);
    rig_expect_error(fd, 12, KLD_TOO_LARGE, "all regions of this connection");
    atomic_store(&rig.fake.hold, false);
    rig_expect(fd, 10, KLD_FRAME_DONE, NULL);
    rig_until_stat(&rig, KLD_STAT_worker_region_bytes, 0);
    rig_region(fd, RIG_REGION_BYTES);
    close(fd);
    end();
}
END_TEST

START_TEST(client_leaves_while_regions_are_mapped) {
    start();
    int fd = rig_client(&rig);
    union kld_frame frame;
    atomic_store(&rig.fake.hold_memory, true);
    int memfd = rig_memfd(4096);
    for (uint64_t i = 0; i < 6; i++) {
        rig_region_frame(&frame, 10 + i, KLD_REGION_MEMFD, 4096);
        rig_send_fds(fd, &frame, frame.header.length, &memfd, 1);
    }
    close(memfd);
    rig_until(&rig.fake.calls, 1);
    rig_until_stat(&rig, KLD_STAT_worker_regions, 6);
    close(fd);
    rig_until_stat(&rig, KLD_STAT_unix_clients, 0);
    atomic_store(&rig.fake.hold_memory, false);
    rig_until_stat(&rig, KLD_STAT_worker_regions, 0);
    ck_assert_int_eq(atomic_load(&rig.fake.calls), 6);
    end();
}
END_TEST

/* Reading pauses while this many tasks are outstanding, and goes on after. */
START_TEST(flood_of_region_adds_is_bounded) {
    start();
    int fd = rig_client(&rig);
    union kld_frame frame;
    atomic_store(&rig.fake.hold_memory, true);
    for (uint64_t i = 0; i < KLD_SESSION_TASKS_MAX + 40; i++) {
        rig_region_frame(&frame, 1000 + i, KLD_REGION_POOL, 16);
        rig_send(fd, &frame);
    }
    rig_until_stat(&rig, KLD_STAT_worker_regions, KLD_SESSION_TASKS_MAX);
    usleep(20000);
    rig_until_stat(&rig, KLD_STAT_worker_regions, KLD_SESSION_TASKS_MAX);
    int other = rig_client(&rig); /* and the loop serves others meanwhile */
    rig_plain(other, KLD_FRAME_PING, 5);
    rig_expect(other, 5, KLD_FRAME_PONG, NULL);
    atomic_store(&rig.fake.hold_memory, false);
    for (uint64_t i = 0; i < KLD_SESSION_TASKS_MAX + 40; i++) {
        rig_receive(fd, &frame);
        ck_assert_int_eq(frame.header.type, KLD_FRAME_REGION);
    }
    close(fd);
    close(other);
    end();
}
END_TEST

static uint64_t region_of(int client, int memfd, uint64_t request, uint64_t bytes) {
    union kld_frame frame;
    rig_region_frame(&frame, request, KLD_REGION_MEMFD, bytes);
    rig_send_fds(client, &frame, frame.header.length, &memfd, 1);
    rig_expect(client, request, KLD_FRAME_REGION, &frame);
    return frame.as_REGION.region;
}

/* As the gateway's loops do with their staging memory. */
START_TEST(one_memfd_on_several_connections_is_mapped_once) {
    enum { BYTES = 2 << 20 };
    if (syscall(SYS_kcmp, getpid(), getpid(), KCMP_FILE, 1L, 1L) != 0)
        return; /* in such a container each is mapped on its own */
    start();
    int memfd = rig_memfd(BYTES), other = rig_memfd(BYTES), client[3];
    union kld_frame frame;
    for (int i = 0; i < 3; i++)
        client[i] = rig_client(&rig);
    atomic_store(&rig.fake.hold_memory, true); /* they meet while it is being mapped */
    for (int i = 0; i < 3; i++) {
        rig_region_frame(&frame, 20, KLD_REGION_MEMFD, BYTES);
        rig_send_fds(client[i], &frame, frame.header.length, &memfd, 1);
    }
    rig_until_stat(&rig, KLD_STAT_worker_regions, 3);
    atomic_store(&rig.fake.hold_memory, false);
    uint64_t id[3];
    for (int i = 0; i < 3; i++) {
        rig_expect(client[i], 20, KLD_FRAME_REGION, &frame);
        id[i] = frame.as_REGION.region;
    }
    ck_assert_int_eq(atomic_load(&rig.fake.memories), 1);
    region_of(client[0], memfd, 21, BYTES);
    ck_assert_int_eq(atomic_load(&rig.fake.memories), 1);
    region_of(client[0], memfd, 22, BYTES - 4096); /* another size is another mapping */
    region_of(client[0], other, 23, BYTES);
    ck_assert_int_eq(atomic_load(&rig.fake.memories), 3);
    ck_assert_uint_eq(rig.stats->value[KLD_STAT_worker_region_bytes],
                      (uint64_t)6 * BYTES - 4096); /* each counts for its client */
    close(client[0]);
    rig_until_is(&rig.fake.memories, 1);
    rig_submit(client[1], 30, id[1]);
    rig_expect(client[1], 30, KLD_FRAME_DONE, NULL);
    rig_drop(client[1], 31, id[1]);
    rig_expect(client[1], 31, KLD_FRAME_DONE, NULL);
    rig_submit(client[2], 32, id[2]);
    rig_expect(client[2], 32, KLD_FRAME_DONE, NULL);
    rig_drop(client[2], 33, id[2]);
    rig_expect(client[2], 33, KLD_FRAME_DONE, NULL);
    rig_until_is(&rig.fake.memories, 0);
    region_of(client[1], memfd, 34, BYTES); /* and anew */
    ck_assert_int_eq(atomic_load(&rig.fake.memories), 1);
    atomic_store(&rig.fake.fail_status, KLD_NO_MEMORY);
    atomic_store(&rig.fake.hold_memory, true);
    int calls = atomic_load(&rig.fake.calls);
    for (int i = 1; i < 3; i++) { /* what fails fails for all, and is tried again by the next */
        rig_region_frame(&frame, 35, KLD_REGION_MEMFD, BYTES);
        rig_send_fds(client[i], &frame, frame.header.length, &other, 1);
    }
    rig_until_stat(&rig, KLD_STAT_worker_regions, 3);
    rig_until(&rig.fake.calls, calls + 1);
    usleep(200000); /* until the other one waits for it: nothing shows that */
    atomic_store(&rig.fake.fail_call, 1);
    atomic_store(&rig.fake.hold_memory, false);
    rig_expect_error(client[1], 35, KLD_NO_MEMORY, "");
    rig_expect_error(client[2], 35, KLD_NO_MEMORY, "");
    region_of(client[2], other, 36, BYTES);
    close(client[1]);
    close(client[2]);
    close(memfd);
    close(other);
    end();
}
END_TEST

static uint64_t pool_region(int fd, uint64_t bytes) {
    union kld_frame frame;
    rig_region_frame(&frame, 60, KLD_REGION_POOL, bytes);
    rig_send(fd, &frame);
    rig_expect(fd, 60, KLD_FRAME_REGION, &frame);
    return frame.as_REGION.region;
}

static void no_pool_region(int fd, uint64_t bytes, enum kld_status status, const char *text) {
    union kld_frame frame;
    rig_region_frame(&frame, 61, KLD_REGION_POOL, bytes);
    rig_send(fd, &frame);
    rig_expect_error(fd, 61, status, text);
}

/* Half of the pool by default; of all of it some is left to those who compute from host memory. */
START_TEST(no_client_takes_the_whole_pool) {
    rig_init(&rig);
    rig.config.user_share = 100;
    rig_start(&rig);
    uint64_t pool = rig.worker.device->info.pool_bytes_max, floor = pool / KLD_POOL_FLOOR_PART;
    int fd = rig_client(&rig), other = rig_client(&rig), third = rig_client(&rig);
    no_pool_region(fd, pool / 2 + 1, KLD_TOO_LARGE, "the device's pool, the most allowed");
    uint64_t region = pool_region(fd, pool / 2);
    no_pool_region(fd, 1, KLD_TOO_LARGE, "the device's pool, the most allowed");
    rig_region(fd, RIG_REGION_BYTES); /* which is not there */
    pool_region(other, pool / 2 - floor);
    no_pool_region(other, 1, KLD_NO_MEMORY, "the pool has no room for 1 bytes");
    no_pool_region(third, 1, KLD_NO_MEMORY, "the pool has no room for 1 bytes");
    rig_drop(fd, 62, region);
    rig_expect(fd, 62, KLD_FRAME_DONE, NULL);
    rig_until_stat(&rig, KLD_STAT_worker_regions, 2);
    pool_region(third, pool / 4);
    pool_region(fd, pool / 4);
    close(fd);
    close(other);
    close(third);
    end();
    rig_init(&rig);
    rig.config.client_pool_bytes_max = 100;
    rig_start(&rig);
    fd = rig_client(&rig);
    pool_region(fd, 90);
    no_pool_region(fd, 11, KLD_TOO_LARGE, "over 100 bytes of the device's pool");
    close(fd);
    end();
}
END_TEST

/* Of memory that nobody has touched yet, too: who touches a page first pays for it. Half of the
 * host's is for all clients, half of that for one. */
START_TEST(clients_do_not_share_all_of_the_hosts_memory) {
    rig_init(&rig);
    rig.host_bytes = 64 << 20;
    rig.config.user_share = 100;
    rig_start(&rig);
    const uint64_t most = rig.host_bytes / 4;
    int fd = rig_client(&rig), other = rig_client(&rig), third = rig_client(&rig);
    rig_memfd_region(fd, most + 1, KLD_TOO_LARGE, "over 16777216 bytes of the host's memory");
    uint64_t region = rig_memfd_region(fd, most, KLD_OK, NULL);
    rig_memfd_region(fd, 1, KLD_TOO_LARGE, "over 16777216 bytes of the host's memory");
    pool_region(fd, 4096); /* which is none of it */
    rig_memfd_region(other, most, KLD_OK, NULL);
    rig_memfd_region(third, 1, KLD_NO_MEMORY,
                     "no room for 1 bytes: clients share 33554432 of 33554432");
    for (int i = 0; i < KLD_FAULT_COUNT; i++) /* the device has no part in that */
        ck_assert_uint_eq(atomic_load(&rig.stats->faults[i]), 0);
    rig_drop(fd, 71, region);
    rig_expect(fd, 71, KLD_FRAME_DONE, NULL);
    rig_until_stat(&rig, KLD_STAT_worker_regions, 2);
    rig_memfd_region(third, most, KLD_OK, NULL);
    close(fd);
    close(other);
    close(third);
    end();
    rig_init(&rig);
    rig.config.shared_bytes_max = 8192;
    rig.config.client_shared_bytes_max = 8192;
    rig.config.user_share = 100;
    rig_start(&rig);
    fd = rig_client(&rig);
    other = rig_client(&rig);
    rig_memfd_region(fd, 8192, KLD_OK, NULL);
    rig_memfd_region(other, 4096, KLD_NO_MEMORY, "clients share 8192 of 8192");
    close(fd);
    close(other);
    end();
}
END_TEST

/* Who drops what he has may register as much in the next breath. */
START_TEST(what_is_dropped_is_no_longer_its_owners_share) {
    const uint64_t most = 16 << 20;
    union kld_frame frame;
    rig_init(&rig);
    rig.config.shared_bytes_max = 4 * most;
    rig.config.client_shared_bytes_max = most;
    rig_start(&rig);
    int fd = rig_client(&rig);
    uint64_t region = rig_memfd_region(fd, most, KLD_OK, NULL);
    for (int i = 0; i < 10; i++) {
        int memfd = rig_memfd(most);
        rig_drop(fd, 71, region);
        rig_region_frame(&frame, 72, KLD_REGION_MEMFD, most);
        rig_send_fds(fd, &frame, frame.header.length, &memfd, 1);
        close(memfd);
        rig_expect(fd, 71, KLD_FRAME_DONE, NULL);
        rig_expect(fd, 72, KLD_FRAME_REGION, &frame);
        region = frame.as_REGION.region;
        rig_memfd_region(fd, 1, KLD_TOO_LARGE, "over 16777216 bytes of the host's memory");
    }
    rig_drop(fd, 73, region);
    rig_expect(fd, 73, KLD_FRAME_DONE, NULL);
    rig_until_stat(&rig, KLD_STAT_worker_regions, 0);
    rig_memfd_region(fd, most, KLD_OK, NULL);
    close(fd);
    end();
}
END_TEST

/* Our clients are this process, as the supervisor says of one; before and after it said so of it.
 */
START_TEST(the_gateway_is_known_by_what_the_supervisor_says) {
    start();
    uint64_t pool = rig.worker.device->info.pool_bytes_max;
    int early = rig_client(&rig), self = pidfd_open(getpid(), 0);
    uint64_t region = pool_region(early, pool / 2);
    no_pool_region(early, 1, KLD_TOO_LARGE, "the device's pool, the most allowed");
    rig_name_gateway(&rig, getppid(), self); /* somebody else */
    no_pool_region(early, 1, KLD_TOO_LARGE, "the device's pool, the most allowed");
    rig_name_gateway(&rig, getpid(), self);
    pool_region(early, pool / 2);
    rig_drop(early, 62, region);
    rig_expect(early, 62, KLD_FRAME_DONE, NULL);
    rig_until_stat(&rig, KLD_STAT_worker_regions, 1);
    int late = rig_client(&rig);
    pool_region(late, pool / 2 + 1);
    rig_name_gateway(&rig, getppid(), self); /* its successor; the one before ends by itself */
    int client = rig_client(&rig);
    pool_region(client, pool / 2); /* nothing of theirs is counted */
    no_pool_region(client, 1, KLD_TOO_LARGE, "the device's pool, the most allowed");
    close(client);
    close(early);
    close(late);
    close(self);
    end();
}
END_TEST

START_TEST(who_finds_the_pool_full_waits_for_what_the_gateway_keeps) {
    union kld_frame frame;
    rig_init(&rig);
    rig.config.client_pool_bytes_max = (uint64_t)1 << 30;
    rig_start(&rig);
    int fd = rig_client(&rig);
    atomic_store(&rig.fake.fail_status, KLD_NO_MEMORY);
    atomic_store(&rig.fake.fail_call, 1);
    rig_region_frame(&frame, 10, KLD_REGION_POOL, RIG_REGION_BYTES);
    rig_send(fd, &frame);
    rig_expect_error(fd, 10, KLD_NO_MEMORY, ""); /* nothing is kept */
    uint64_t refused_ns = atomic_load(&rig.page->device[0].pool_refused_ns);
    ck_assert_uint_gt(refused_ns, 0);
    ck_assert_uint_eq(atomic_load(&rig.page->device[0].pool_wanted), 0);
    kld_stats_set(rig.stats, KLD_STAT_pool_kept_bytes, 4096);
    atomic_store(&rig.fake.fail_call, 1);
    rig_region_frame(&frame, 11, KLD_REGION_POOL, (uint64_t)1 << 30);
    rig_send(fd, &frame);
    rig_expect_error(fd, 11, KLD_NO_MEMORY, ""); /* no help: the pool has half of that */
    ck_assert_uint_eq(atomic_load(&rig.page->device[0].pool_refused_ns), refused_ns);
    ck_assert_uint_eq(atomic_load(&rig.page->device[0].pool_wanted), 0);
    atomic_store(&rig.fake.fail_call, 1);
    rig_region_frame(&frame, 12, KLD_REGION_POOL, RIG_REGION_BYTES);
    rig_send(fd, &frame);
    rig_expect(fd, 12, KLD_FRAME_REGION, NULL); /* at the second try */
    ck_assert_uint_eq(atomic_load(&rig.page->device[0].pool_wanted), 1);
    atomic_store(&rig.fake.fail_all, true);
    rig_region_frame(&frame, 13, KLD_REGION_POOL, RIG_REGION_BYTES);
    rig_send(fd, &frame);
    rig_expect_error(fd, 13, KLD_NO_MEMORY, ""); /* it never came */
    ck_assert_uint_gt(atomic_load(&rig.page->device[0].pool_wanted), 2);
    rig_region_frame(&frame, 14, KLD_REGION_POOL, RIG_REGION_BYTES);
    rig_send(fd, &frame);
    rig_until_stat(&rig, KLD_STAT_worker_regions, 2);
    close(fd); /* while it waits */
    end();
}
END_TEST

UNIT_MAIN("server/worker/region", ipc_handles_are_checked, one_descriptor_is_one_memory,
          descriptors_kept_have_a_limit, every_descriptor_of_a_client_is_told_apart,
          memory_of_other_cards_is_for_those_told, a_card_that_takes_turns_is_told_of_once,
          parts_of_one_allocation_are_one_memory, table_grows_to_its_limit_and_reuses_places,
          quota_counts_what_is_still_condemned, client_leaves_while_regions_are_mapped,
          flood_of_region_adds_is_bounded, one_memfd_on_several_connections_is_mapped_once,
          clients_do_not_share_all_of_the_hosts_memory,
          what_is_dropped_is_no_longer_its_owners_share, no_client_takes_the_whole_pool,
          the_gateway_is_known_by_what_the_supervisor_says,
          who_finds_the_pool_full_waits_for_what_the_gateway_keeps)
