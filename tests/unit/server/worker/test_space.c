/* test_space.c - regions whose memory comes piece by piece: what of them may be named when, what is
 * no next piece, limits, pieces that are shown elsewhere too, and clients that drop or leave while
 * one is mapped. That no job names a byte without memory is looked at by the double, at every job.
 */
#include "server/worker/space.h"

#include <fcntl.h>
#include <linux/kcmp.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/unit/server/worker/rig.h"
#include "tests/unit/unit.h"

#define PIECE 4096 /* the double has no granularity */
#define ROOM (8 * PIECE)

static struct rig rig;
static int file; /* as good as a CUDA allocation to all but the driver */

static void start(void) {
    rig_start(&rig);
    file = open("/dev/null", O_RDWR);
}

static void end(void) {
    close(file);
    ck_assert_int_eq(rig_end(&rig), 0);
    ck_assert_int_eq(atomic_load(&rig.fake.pieces), 0);
    ck_assert_uint_eq(rig.worker.cuda_files, 0);
    rig_done(&rig);
}

static void space_frame(union kld_frame *frame, uint64_t request, uint64_t bytes) {
    rig_region_frame(frame, request, KLD_REGION_CUDA_SPACE, bytes);
    memset(frame->as_REGION_ADD.device_uuid, 7, KLD_WIRE_UUID_BYTES);
}

static uint64_t space(int fd) {
    union kld_frame frame;
    space_frame(&frame, 900, ROOM);
    rig_send(fd, &frame);
    rig_expect(fd, 900, KLD_FRAME_REGION, &frame);
    ck_assert_uint_eq(frame.as_REGION.bytes, 0);
    return frame.as_REGION.region;
}

static void send_grow(int fd, uint64_t request, uint64_t region, uint64_t offset, uint64_t bytes,
                      int piece) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_REGION_GROW, request);
    frame.as_REGION_GROW.region = region;
    frame.as_REGION_GROW.offset_bytes = offset;
    frame.as_REGION_GROW.bytes = bytes;
    rig_send_fds(fd, &frame, frame.header.length, &piece, 1);
}

/* By an allocation of its own. */
static void grow(int fd, uint64_t region, uint64_t offset, uint64_t bytes) {
    union kld_frame frame;
    int piece = open("/dev/null", O_RDWR);
    send_grow(fd, 901, region, offset, bytes, piece);
    close(piece);
    rig_expect(fd, 901, KLD_FRAME_REGION, &frame);
    ck_assert_uint_eq(frame.as_REGION.region, region);
    ck_assert_uint_eq(frame.as_REGION.bytes, offset + bytes);
}

/* All three tensors from that byte on. */
static void submit_at(int fd, uint64_t request, uint64_t region, uint64_t offset) {
    union kld_frame frame;
    rig_op(&frame, request, region);
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        if (frame.as_SUBMIT.tensor[slot].dtype)
            frame.as_SUBMIT.tensor[slot].offset_bytes += offset;
    rig_send(fd, &frame);
}

START_TEST(a_worker_says_whether_it_takes_them) {
    for (int gpu = 0; gpu < 2; gpu++) {
        union kld_frame frame;
        rig_init(&rig);
        rig.fake.head.info.imports_cuda_ipc = gpu;
        start();
        int fd = rig_connect(&rig);
        kld_frame_init(&frame, KLD_FRAME_HELLO, 1);
        frame.as_HELLO.version_min = frame.as_HELLO.version_max = KLD_WIRE_VERSION;
        rig_send(fd, &frame);
        rig_expect(fd, 1, KLD_FRAME_WELCOME, &frame);
        ck_assert_uint_eq(frame.as_WELCOME.flags & KLD_WELCOME_SPACES,
                          gpu ? KLD_WELCOME_SPACES : 0);
        space_frame(&frame, 2, ROOM);
        rig_send(fd, &frame);
        if (gpu)
            rig_expect(fd, 2, KLD_FRAME_REGION, NULL);
        else
            rig_expect_error(fd, 2, KLD_UNIMPLEMENTED, "need the cuda back end");
        close(fd);
        end();
    }
}
END_TEST

START_TEST(only_what_has_memory_is_named) {
    rig_init(&rig);
    start();
    int fd = rig_client(&rig);
    union kld_frame frame;
    uint64_t region = space(fd), plain = rig_region(fd, ROOM);
    submit_at(fd, 10, region, 0);
    rig_expect_error(fd, 10, KLD_INVALID, "region");
    grow(fd, region, 0, PIECE);
    submit_at(fd, 11, region, PIECE - RIG_REGION_BYTES);
    rig_expect(fd, 11, KLD_FRAME_DONE, NULL);
    submit_at(fd, 12, region, PIECE - RIG_REGION_BYTES + 4);
    rig_expect_error(fd, 12, KLD_INVALID, "4096 bytes");
    submit_at(fd, 13, region, PIECE);
    rig_expect_error(fd, 13, KLD_INVALID, "4096 bytes");
    for (int way = 0; way < 2; way++) { /* to it, and from it */
        kld_frame_init(&frame, KLD_FRAME_COPY, 14);
        frame.as_COPY.destination = way ? plain : region;
        frame.as_COPY.source = way ? region : plain;
        frame.as_COPY.bytes = PIECE + 1;
        rig_send(fd, &frame);
        rig_expect_error(fd, 14, KLD_INVALID, "4097 bytes at offset 0 do not fit");
        frame.as_COPY.bytes = PIECE;
        rig_send(fd, &frame);
        rig_expect(fd, 14, KLD_FRAME_DONE, NULL);
    }
    /* A tensor across two pieces, while the one behind them is being mapped: that is not there. */
    grow(fd, region, PIECE, 2 * PIECE);
    atomic_store(&rig.fake.hold_memory, true);
    int calls = atomic_load(&rig.fake.calls);
    send_grow(fd, 15, region, 3 * PIECE, PIECE, file);
    rig_until(&rig.fake.calls, calls + 1);
    submit_at(fd, 16, region, PIECE - 64);
    rig_expect(fd, 16, KLD_FRAME_DONE, NULL);
    submit_at(fd, 17, region, 3 * PIECE - 64);
    rig_expect_error(fd, 17, KLD_INVALID, "12288 bytes");
    atomic_store(&rig.fake.hold_memory, false);
    rig_expect(fd, 15, KLD_FRAME_REGION, NULL);
    submit_at(fd, 18, region, 3 * PIECE - 64);
    rig_expect(fd, 18, KLD_FRAME_DONE, NULL);
    close(fd);
    end();
}
END_TEST

START_TEST(what_is_no_next_piece_is_refused) {
    rig_init(&rig);
    rig.config.region_pieces_max = 3;
    start();
    int fd = rig_client(&rig), memfd = rig_memfd(PIECE);
    union kld_frame frame;
    uint64_t region = space(fd), plain = rig_region(fd, PIECE);
    grow(fd, region, 0, PIECE);
    const struct {
        uint64_t region, offset, bytes;
        const char *text;
    } wrong[] = {{region, 0, PIECE, "expected at offset 4096"},         /* over the first */
                 {region, 2 * PIECE, PIECE, "expected at offset 4096"}, /* a gap */
                 {region, PIECE, 0, "0 bytes at offset"},
                 {region, PIECE, ROOM - PIECE + 1, "up to the 32768 bytes"},
                 {region, PIECE, UINT64_MAX, "up to the 32768 bytes"},
                 {region, UINT64_MAX - 1, 4, "expected at offset"},
                 {plain, PIECE, PIECE, "is no CUDA space"}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        send_grow(fd, 10, wrong[i].region, wrong[i].offset, wrong[i].bytes, file);
        rig_expect_error(fd, 10, KLD_INVALID, wrong[i].text);
    }
    send_grow(fd, 11, region + 1, PIECE, PIECE, file);
    rig_expect_error(fd, 11, KLD_NOT_FOUND, "no region");
    send_grow(fd, 12, region, PIECE, PIECE, memfd);
    rig_expect_error(fd, 12, KLD_INVALID, "not a CUDA allocation");
    /* Two at a time. */
    atomic_store(&rig.fake.hold_memory, true);
    send_grow(fd, 13, region, PIECE, PIECE, file);
    send_grow(fd, 14, region, 2 * PIECE, PIECE, file);
    rig_expect_error(fd, 14, KLD_BUSY, "still being mapped");
    atomic_store(&rig.fake.hold_memory, false);
    rig_expect(fd, 13, KLD_FRAME_REGION, NULL);
    grow(fd, region, 2 * PIECE, PIECE);
    int piece = open("/dev/null", O_RDWR);
    send_grow(fd, 15, region, 3 * PIECE, PIECE, piece);
    rig_expect_error(fd, 15, KLD_TOO_LARGE, "3 pieces");
    ck_assert_int_eq(atomic_load(&rig.fake.pieces), 3);
    /* REGION_ADD itself. */
    space_frame(&frame, 16, ROOM);
    frame.as_REGION_ADD.device_uuid[0] = 1;
    rig_send(fd, &frame);
    rig_expect_error(fd, 16, KLD_INVALID, "another device");
    space_frame(&frame, 17, ROOM);
    frame.as_REGION_ADD.base_bytes = ROOM;
    rig_send(fd, &frame);
    rig_expect_error(fd, 17, KLD_INVALID, "base_bytes is not 0; expected 0");
    close(piece);
    close(memfd);
    close(fd);
    end();
}
END_TEST

/* Addresses count, with or without memory. */
START_TEST(addresses_have_limits) {
    rig_init(&rig);
    rig.config.region_bytes_max = ROOM;
    rig.config.client_region_bytes_max = 2 * ROOM;
    start();
    int fd = rig_client(&rig);
    union kld_frame frame;
    space_frame(&frame, 10, ROOM + 1);
    rig_send(fd, &frame);
    rig_expect_error(fd, 10, KLD_TOO_LARGE, "at most 32768");
    uint64_t first = space(fd);
    rig_until_stat(&rig, KLD_STAT_worker_region_bytes, ROOM);
    grow(fd, first, 0, PIECE);
    space(fd);
    rig_until_stat(&rig, KLD_STAT_worker_region_bytes, 2 * ROOM);
    space_frame(&frame, 11, 1);
    rig_send(fd, &frame);
    rig_expect_error(fd, 11, KLD_TOO_LARGE, "all regions of this connection");
    rig_drop(fd, 12, first);
    rig_expect(fd, 12, KLD_FRAME_DONE, NULL);
    rig_until_stat(&rig, KLD_STAT_worker_region_bytes, ROOM);
    ck_assert_int_eq(atomic_load(&rig.fake.pieces), 0);
    close(fd);
    rig_until_stat(&rig, KLD_STAT_worker_region_bytes, 0);
    end();
}
END_TEST

/* No output lies over a tensor that is named by another region. */
START_TEST(a_piece_is_shown_by_its_space_alone) {
    rig_init(&rig);
    start();
    bool told = syscall(SYS_kcmp, getpid(), getpid(), KCMP_FILE, (long)file, (long)file) == 0;
    int fd = rig_client(&rig), copy = dup(file);
    union kld_frame frame;
    uint64_t one = space(fd), two = space(fd);
    if (told) {
        send_grow(fd, 10, one, 0, PIECE, file);
        rig_expect(fd, 10, KLD_FRAME_REGION, NULL);
        send_grow(fd, 11, one, PIECE, PIECE, copy);
        rig_expect_error(fd, 11, KLD_INVALID, "shows this CUDA allocation already");
        send_grow(fd, 12, two, 0, PIECE, copy);
        rig_expect_error(fd, 12, KLD_INVALID, "shows this CUDA allocation already");
        rig_region_frame(&frame, 13, KLD_REGION_CUDA_FD, PIECE);
        frame.as_REGION_ADD.base_bytes = PIECE;
        memset(frame.as_REGION_ADD.device_uuid, 7, KLD_WIRE_UUID_BYTES);
        rig_send_fds(fd, &frame, frame.header.length, &copy, 1);
        rig_expect_error(fd, 13, KLD_INVALID, "shows this CUDA allocation already");
        rig_drop(fd, 14, one); /* it may still be used: what is named from here on counts */
        rig_expect(fd, 14, KLD_FRAME_DONE, NULL);
        rig_send_fds(fd, &frame, frame.header.length, &copy, 1);
        rig_expect(fd, 13, KLD_FRAME_REGION, NULL);
        send_grow(fd, 15, two, 0, PIECE, file);
        rig_expect_error(fd, 15, KLD_INVALID, "shows this CUDA allocation already");
    }
    grow(fd, two, 0, PIECE); /* one that was refused has left no trace */
    /* Within one space offsets say it. */
    rig_op(&frame, 16, two);
    frame.as_SUBMIT.tensor[KLD_SLOT_GRAD_PREDICTIONS].offset_bytes = RIG_TENSOR_BYTES + 4;
    rig_send(fd, &frame);
    rig_expect_error(fd, 16, KLD_INVALID, "grad_predictions overlaps targets");
    close(copy);
    close(fd);
    end();
}
END_TEST

START_TEST(a_piece_that_cannot_be_mapped_leaves_the_rest) {
    rig_init(&rig);
    start();
    int fd = rig_client(&rig);
    union kld_frame frame;
    uint64_t region = space(fd);
    grow(fd, region, 0, PIECE);
    atomic_store(&rig.fake.fail_status, KLD_INVALID);
    atomic_store(&rig.fake.fail_call, 1);
    send_grow(fd, 10, region, PIECE, PIECE, file);
    rig_expect_error(fd, 10, KLD_INVALID, "told to fail");
    submit_at(fd, 11, region, PIECE - 64);
    rig_expect_error(fd, 11, KLD_INVALID, "4096 bytes");
    submit_at(fd, 12, region, 0);
    rig_expect(fd, 12, KLD_FRAME_DONE, NULL);
    send_grow(fd, 13, region, PIECE, PIECE, file); /* its descriptor is known no longer */
    rig_expect(fd, 13, KLD_FRAME_REGION, NULL);
    submit_at(fd, 14, region, PIECE - 64);
    rig_expect(fd, 14, KLD_FRAME_DONE, NULL);
    /* Nor does one whose addresses cannot be had. */
    atomic_store(&rig.fake.fail_status, KLD_NO_MEMORY);
    atomic_store(&rig.fake.fail_call, 1);
    space_frame(&frame, 15, ROOM);
    rig_send(fd, &frame);
    rig_expect_error(fd, 15, KLD_NO_MEMORY, "told to fail");
    rig_until_stat(&rig, KLD_STAT_worker_regions, 1);
    close(fd);
    end();
}
END_TEST

START_TEST(a_device_lost_while_a_piece_is_mapped) {
    rig_init(&rig);
    start();
    int fd = rig_client(&rig);
    uint64_t region = space(fd);
    atomic_store(&rig.fake.fail_status, KLD_DEVICE_LOST);
    atomic_store(&rig.fake.fail_call, 1);
    send_grow(fd, 10, region, 0, PIECE, file);
    rig_expect_error(fd, 10, KLD_DEVICE_LOST, "told to fail");
    ck_assert_int_eq(rig_wait(&rig), 2);
    ck_assert(rig.worker.lost);
    /* The process would _exit(2) here: what is left belongs to the device that is lost. */
}
END_TEST

/* What is dropped while it is used, or while a piece comes, goes when both have ended. */
START_TEST(drops_and_ends_wait_for_pieces_and_jobs) {
    rig_init(&rig);
    start();
    for (int round = 0; round < 4; round++) {
        bool leaves = round & 1, in_use = round & 2;
        int fd = rig_client(&rig);
        uint64_t region = space(fd);
        grow(fd, region, 0, PIECE);
        int done = atomic_load(&rig.fake.jobs_done), started = atomic_load(&rig.fake.jobs_started);
        if (in_use) {
            atomic_store(&rig.fake.hold, true);
            submit_at(fd, 10, region, 0);
            rig_until(&rig.fake.jobs_started, started + 1);
        }
        atomic_store(&rig.fake.hold_memory, true);
        int calls = atomic_load(&rig.fake.calls);
        send_grow(fd, 11, region, PIECE, PIECE, file);
        rig_until(&rig.fake.calls, calls + 1);
        if (leaves) {
            close(fd);
            rig_until_stat(&rig, KLD_STAT_unix_clients, 0);
        } else {
            rig_drop(fd, 12, region);
            rig_expect(fd, 12, KLD_FRAME_DONE, NULL);
            submit_at(fd, 13, region, 0);
            rig_expect_error(fd, 13, KLD_NOT_FOUND, "no region");
        }
        ck_assert_int_eq(atomic_load(&rig.fake.memories), 1);
        atomic_store(&rig.fake.hold_memory, false);
        if (!leaves)
            rig_expect(fd, 11, KLD_FRAME_REGION, NULL);
        rig_until_is(&rig.fake.pieces, in_use ? 2 : 0);
        ck_assert_int_eq(atomic_load(&rig.fake.jobs_done), done);
        atomic_store(&rig.fake.hold, false);
        rig_until_stat(&rig, KLD_STAT_worker_regions, 0);
        ck_assert_int_eq(atomic_load(&rig.fake.pieces), 0);
        if (!leaves)
            close(fd);
        rig_until_stat(&rig, KLD_STAT_unix_clients, 0);
    }
    end();
}
END_TEST

/* What is published lies in pieces that are there, and stays as it is when others come. */
START_TEST(tensors_in_a_space_are_published) {
    rig_init(&rig);
    start();
    int fd = rig_client(&rig), other = rig_client(&rig);
    union kld_frame frame;
    uint64_t region = space(fd);
    grow(fd, region, 0, PIECE);
    for (int there = 0; there < 2; there++) {
        kld_frame_init(&frame, KLD_FRAME_PUBLISH, 10);
        strcpy(frame.as_PUBLISH.name, "t");
        frame.as_PUBLISH.region = region;
        frame.as_PUBLISH.offset_bytes = PIECE - 64;
        frame.as_PUBLISH.tensor = (struct kld_wire_description){
            .dtype = KLD_DTYPE_FP32, .rank = 2, .shape = {3 * RIG_ROWS, RIG_CLASSES}};
        rig_send(fd, &frame);
        if (there)
            rig_expect(fd, 10, KLD_FRAME_DONE, NULL);
        else
            rig_expect_error(fd, 10, KLD_INVALID, "do not fit a region of 4096 bytes");
        if (!there)
            grow(fd, region, PIECE, PIECE);
    }
    kld_frame_init(&frame, KLD_FRAME_ATTACH, 11);
    strcpy(frame.as_ATTACH.name, "t");
    frame.as_ATTACH.uid = KLD_WIRE_UID_OWN;
    rig_send(other, &frame);
    rig_expect(other, 11, KLD_FRAME_ATTACHED, &frame);
    uint64_t attached = frame.as_ATTACHED.region;
    ck_assert_uint_eq(frame.as_ATTACHED.bytes, RIG_REGION_BYTES);
    grow(fd, region, 2 * PIECE, PIECE);
    send_grow(other, 12, attached, RIG_REGION_BYTES, PIECE, file);
    rig_expect_error(other, 12, KLD_INVALID, "is no CUDA space");
    for (uint64_t offset = 0; offset <= 64; offset += 64) {
        rig_op(&frame, 13, attached);
        frame.as_SUBMIT.tensor[KLD_SLOT_TARGETS].offset_bytes =
            RIG_REGION_BYTES - RIG_TENSOR_BYTES + offset;
        frame.as_SUBMIT.tensor[KLD_SLOT_GRAD_PREDICTIONS] = (struct kld_wire_tensor){0};
        rig_send(other, &frame);
        if (offset)
            rig_expect_error(other, 13, KLD_INVALID, "1536 bytes");
        else
            rig_expect(other, 13, KLD_FRAME_DONE, NULL);
    }
    close(other);
    close(fd);
    end();
}
END_TEST

UNIT_MAIN("server/worker/space", a_worker_says_whether_it_takes_them, only_what_has_memory_is_named,
          what_is_no_next_piece_is_refused, addresses_have_limits,
          a_piece_is_shown_by_its_space_alone, a_piece_that_cannot_be_mapped_leaves_the_rest,
          a_device_lost_while_a_piece_is_mapped, drops_and_ends_wait_for_pieces_and_jobs,
          tensors_in_a_space_are_published)
