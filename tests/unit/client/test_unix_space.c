/* test_unix_space.c - regions in pieces over the Unix socket: what is told the worker, told again
 * to the next one, refused, and let go of. Their allocations are memfds here, which the double maps
 * side by side, so that what it computes is what lies in them. */
#include "tests/unit/client/small_request.h"
#include "tests/unit/unit.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "client/kld.h"
#include "tests/unit/client/fake_worker.h"

#define PIECE ((size_t)4096)
#define PIECES 3
#define ROOM (8 * PIECE)
#define CLASSES (PIECE / sizeof(float)) /* a row has the size of a piece */

static struct fake_worker worker;
static struct kld_connection *connection;
static struct kld_region *space;
static struct kld_error error;
static const uint8_t uuid[16] = {7};
static int memfds[PIECES];

/* Once the double has closed what it was sent. */
static int descriptors(void) {
    int count = 0;
    if (connection)
        ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    for (int fd = 0; fd < 256; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

/* Piece i holds i + 1 in each place. */
static void make_pieces(void) {
    float values[CLASSES];
    for (int i = 0; i < PIECES; i++) {
        memfds[i] = memfd_create("as good as any to the double", MFD_CLOEXEC);
        for (size_t j = 0; j < CLASSES; j++)
            values[j] = (float)(i + 1);
        ck_assert_int_eq(write(memfds[i], values, PIECE), PIECE);
    }
}

static void setup_with(uint32_t flags, const struct kld_connect_options *options) {
    char url[128];
    worker.flags = flags;
    fake_worker_open(&worker);
    snprintf(url, sizeof url, "unix:%s", worker.path);
    ck_assert_msg(kld_connect(url, options, &connection, &error) == KLD_OK, "%s", error.text);
    make_pieces();
}

static void setup(uint32_t flags) { setup_with(flags, NULL); }

/* Who waits for an answer does so for 0.2 s. */
static void setup_impatient(void) {
    const struct kld_connect_options options = {.connect_timeout_ns = 200000000};
    setup_with(KLD_WELCOME_SPACES, &options);
}

/* The worker is gone, and knows of no region. */
static void hang_up(void) {
    worker.hang_up = 1;
    while (worker.regions_now)
        usleep(1000);
}

static void teardown(void) {
    kld_close(connection);
    for (int i = 0; i < PIECES; i++)
        close(memfds[i]);
    fake_worker_close(&worker);
    ck_assert_int_eq(worker.regions_now, 0);
}

static void reserve_and_grow(int pieces) {
    ck_assert_msg(kld_region_reserve_cuda(connection, uuid, ROOM, &space, &error) == KLD_OK, "%s",
                  error.text);
    ck_assert_uint_eq(kld_region_bytes(space), 0);
    for (int i = 0; i < pieces; i++)
        ck_assert_msg(kld_region_grow_cuda_fd(space, memfds[i], PIECE, &error) == KLD_OK, "%s",
                      error.text);
    ck_assert_uint_eq(kld_region_bytes(space), (size_t)pieces * PIECE);
}

/* Two rows from the first byte on, two from the middle of the first piece on: of 1 and 2, and half
 * a row less of 1 and more of 3. */
static struct kld_request request(void) {
    struct kld_request request = small_request(2, CLASSES, NULL, NULL, NULL);
    request.op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_ABSENT;
    request.bytes[KLD_SLOT_PREDICTIONS].region = space;
    request.bytes[KLD_SLOT_PREDICTIONS].offset_bytes = PIECE / 2;
    request.bytes[KLD_SLOT_TARGETS].region = space;
    return request;
}
#define LOSS (1.0 * CLASSES)

static void run(void) {
    struct kld_request asked = request();
    struct kld_result result;
    ck_assert_msg(kld_run(connection, &asked, &result, &error) == KLD_OK, "%s", error.text);
    ck_assert(result.loss == LOSS);
}

START_TEST(test_a_tensor_lies_across_pieces) {
    setup(KLD_WELCOME_SPACES);
    int before = descriptors();
    reserve_and_grow(2);
    ck_assert_ptr_null(kld_region_data(space));
    struct kld_request asked = request();
    ck_assert_int_eq(kld_run(connection, &asked, NULL, &error), KLD_INVALID); /* ends behind it */
    ck_assert_int_eq(worker.submits, 0);
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[2], PIECE, &error), KLD_OK);
    ck_assert_int_eq(descriptors(), before + PIECES); /* those that the next worker gets */
    run();
    ck_assert_int_eq(worker.regions_added, 1);
    ck_assert_int_eq(worker.pieces, PIECES);
    kld_region_drop(space);
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    ck_assert_int_eq(worker.regions_dropped, 1);
    ck_assert_int_eq(descriptors(), before);
    teardown();
}
END_TEST

START_TEST(test_the_next_worker_is_told_of_every_piece) {
    setup(KLD_WELCOME_SPACES);
    int before = descriptors();
    reserve_and_grow(PIECES);
    for (int i = 0; i < PIECES; i++) {
        close(memfds[i]); /* libkld has its own */
        memfds[i] = -1;
    }
    for (int round = 1; round < 4; round++) {
        worker.die_at_submit = 1;
        run();
        ck_assert_int_eq(worker.regions_added, round + 1);
        ck_assert_int_eq(worker.pieces, (round + 1) * PIECES);
        ck_assert_uint_eq(kld_region_bytes(space), PIECES * PIECE);
    }
    ck_assert_int_eq(descriptors(), before);
    make_pieces(); /* and goes on to grow */
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[0], PIECE, &error), KLD_OK);
    run();
    ck_assert_int_eq(worker.pieces, 4 * PIECES + 1);
    teardown();
}
END_TEST

/* Lost between two pieces: the one that is waited for comes behind the others. */
START_TEST(test_a_loss_while_it_grows) {
    setup(KLD_WELCOME_SPACES);
    reserve_and_grow(2);
    hang_up();
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[2], PIECE, &error), KLD_OK);
    ck_assert_int_eq(worker.pieces, 2 + PIECES);
    run();
    teardown();
}
END_TEST

START_TEST(test_a_piece_that_is_refused) {
    setup(KLD_WELCOME_SPACES);
    int before = descriptors();
    reserve_and_grow(PIECES);
    worker.refuse_grow = KLD_INVALID;
    int pieces = worker.pieces, held = descriptors();
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[0], PIECE, &error), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "fake"));
    ck_assert_uint_eq(kld_region_bytes(space), PIECES * PIECE);
    ck_assert_int_eq(descriptors(), held);
    run(); /* it is what it was, also for the next worker, and grows */
    worker.refuse_grow = 0;
    worker.die_at_submit = 1;
    run();
    ck_assert_int_eq(worker.pieces, pieces + 1 + PIECES);
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[0], PIECE, &error), KLD_OK);
    ck_assert_uint_eq(kld_region_bytes(space), (PIECES + 1) * PIECE);
    kld_region_drop(space);
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    ck_assert_int_eq(worker.regions_now, 0);
    ck_assert_int_eq(descriptors(), before);
    /* One that had been there is refused by the next worker: there is no such region any more. */
    reserve_and_grow(PIECES);
    worker.refuse_grow = KLD_INVALID;
    worker.die_at_submit = 1;
    struct kld_request asked = request();
    ck_assert_int_eq(kld_run(connection, &asked, NULL, &error), KLD_INVALID);
    ck_assert_int_eq(worker.regions_now, 1);
    worker.refuse_grow = 0;
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[0], PIECE, &error), KLD_INVALID);
    kld_region_drop(space); /* the worker has it all the same */
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    ck_assert_int_eq(worker.regions_now, 0);
    /* And what was never registered leaves nothing. */
    worker.refuse_regions = KLD_NO_MEMORY;
    ck_assert_int_eq(kld_region_reserve_cuda(connection, uuid, ROOM, &space, &error),
                     KLD_NO_MEMORY);
    worker.refuse_regions = 0;
    teardown();
}
END_TEST

/* Refused while the next worker is told of the others: the one that is waited for, or one of these.
 */
START_TEST(test_refused_behind_a_loss) {
    setup(KLD_WELCOME_SPACES);
    int before = descriptors();
    reserve_and_grow(2);
    worker.refuse_grow = KLD_TOO_LARGE;
    hang_up();
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[2], PIECE, &error), KLD_TOO_LARGE);
    worker.refuse_grow = 0; /* for want of room: it is asked for again */
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[2], PIECE, &error), KLD_OK);
    ck_assert_uint_eq(kld_region_bytes(space), 3 * PIECE);
    run();
    kld_region_drop(space);
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    ck_assert_int_eq(descriptors(), before);
    teardown();
}
END_TEST

/* The next worker was told of the PIECES that there were, and takes another one. */
static void the_next_one_grows(int pieces_before) {
    ck_assert_int_eq(worker.pieces, pieces_before + PIECES);
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[1], PIECE, &error), KLD_OK);
    ck_assert_uint_eq(kld_region_bytes(space), (PIECES + 1) * PIECE);
    run();
}

/* Whether it came is not known then. What was there before is there, and the next worker is told of
 * no more. */
START_TEST(test_a_piece_that_is_not_answered) {
    setup_impatient();
    reserve_and_grow(PIECES);
    worker.slow_regions = 1;
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[0], PIECE, &error), KLD_UNAVAILABLE);
    ck_assert_uint_eq(kld_region_bytes(space), PIECES * PIECE);
    worker.slow_regions = 0;
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[1], PIECE, &error), KLD_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(error.text, "grows no more"));
    run(); /* for which the double answers what it did not */
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[1], PIECE, &error), KLD_UNAVAILABLE);
    int pieces = worker.pieces;
    worker.die_at_submit = 1;
    run();
    the_next_one_grows(pieces);
    teardown();
}
END_TEST

/* What was not sent when its caller waited no longer is not sent later. */
START_TEST(test_a_piece_without_a_worker) {
    setup_impatient();
    int before = descriptors();
    reserve_and_grow(PIECES);
    worker.refuse_hello = KLD_BUSY;
    hang_up();
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[0], PIECE, &error), KLD_UNAVAILABLE);
    int pieces = worker.pieces;
    worker.refuse_hello = 0;
    run();
    the_next_one_grows(pieces);
    kld_region_drop(space);
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    ck_assert_int_eq(descriptors(), before);
    teardown();
}
END_TEST

/* Not all descriptors that the process may have. */
START_TEST(test_pieces_leave_descriptors_over) {
    struct rlimit limit;
    setup(KLD_WELCOME_SPACES);
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    reserve_and_grow(2);
    rlim_t most = limit.rlim_cur;
    limit.rlim_cur = 64 + 4;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    struct kld_region *other = space;
    ck_assert_int_eq(kld_region_reserve_cuda(connection, uuid, 64 * PIECE, &space, &error), KLD_OK);
    for (int i = 0; i < 32; i++)
        ck_assert_msg(kld_region_grow_cuda_fd(space, memfds[0], PIECE, &error) == KLD_OK, "%s",
                      error.text);
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[0], PIECE, &error), KLD_NO_MEMORY);
    ck_assert_ptr_nonnull(strstr(error.text, "34 pieces with a file descriptor each, of 68"));
    ck_assert_uint_eq(kld_region_bytes(space), 32 * PIECE);
    kld_region_drop(other);
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[0], PIECE, &error), KLD_OK);
    limit.rlim_cur = most;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    teardown();
}
END_TEST

/* While the next worker is being told of it. */
START_TEST(test_dropped_in_the_middle) {
    setup(KLD_WELCOME_SPACES);
    int before = descriptors();
    reserve_and_grow(PIECES);
    int added = worker.regions_added;
    worker.slow_regions = 1;
    worker.hang_up = 1;
    while (worker.regions_added == added)
        kld_process(connection, 10, &error);
    kld_region_drop(space);
    worker.slow_regions = 0;
    while (!worker.regions_dropped)
        kld_process(connection, 10, &error);
    ck_assert_int_eq(kld_ping(connection, NULL, &error), KLD_OK);
    ck_assert_int_eq(worker.regions_now, 0);
    ck_assert_int_eq(worker.pieces, PIECES); /* it was not told of one more */
    ck_assert_int_eq(descriptors(), before);
    teardown();
}
END_TEST

START_TEST(test_what_is_no_piece) {
    setup(KLD_WELCOME_SPACES);
    struct kld_region *plain;
    reserve_and_grow(1);
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, -1, PIECE, &error), KLD_INVALID);
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[1], 0, &error), KLD_INVALID);
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[1], ROOM, &error), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "may grow to 32768"));
    ck_assert_int_eq(kld_region_create(connection, PIECE, &plain, &error), KLD_OK);
    ck_assert_int_eq(kld_region_grow_cuda_fd(plain, memfds[1], PIECE, &error), KLD_INVALID);
    ck_assert_int_eq(kld_region_reserve_cuda(connection, uuid, 0, &plain, &error), KLD_INVALID);
    ck_assert_int_eq(kld_region_reserve_cuda(connection, uuid, 2ull << 40, &plain, &error),
                     KLD_TOO_LARGE);
    ck_assert_int_eq(worker.pieces, 1);
    teardown();
}
END_TEST

START_TEST(test_servers_without_such_regions) {
    setup(0);
    ck_assert_int_eq(kld_region_reserve_cuda(connection, uuid, ROOM, &space, &error),
                     KLD_UNIMPLEMENTED);
    ck_assert_ptr_nonnull(strstr(error.text, "no regions in pieces"));
    ck_assert_int_eq(worker.regions_added, 0);
    struct kld_connection *local;
    ck_assert_int_eq(kld_connect("local:cpu", NULL, &local, &error), KLD_OK);
    ck_assert_int_eq(kld_region_reserve_cuda(local, uuid, ROOM, &space, &error), KLD_UNIMPLEMENTED);
    ck_assert_int_eq(kld_region_create(local, PIECE, &space, &error), KLD_OK);
    ck_assert_int_eq(kld_region_grow_cuda_fd(space, memfds[0], PIECE, &error), KLD_UNIMPLEMENTED);
    kld_close(local);
    teardown();
}
END_TEST

UNIT_MAIN("client/unix_space", test_a_tensor_lies_across_pieces,
          test_the_next_worker_is_told_of_every_piece, test_a_loss_while_it_grows,
          test_a_piece_that_is_refused, test_refused_behind_a_loss,
          test_a_piece_that_is_not_answered, test_a_piece_without_a_worker,
          test_pieces_leave_descriptors_over, test_dropped_in_the_middle, test_what_is_no_piece,
          test_servers_without_such_regions)
