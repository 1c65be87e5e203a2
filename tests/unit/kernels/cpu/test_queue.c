/* test_queue.c - the CPU device's streams: the order of jobs, whose turn it is, closing with work
 * in flight, and which jobs a caller that polls runs itself. */
#include "tests/unit/kernels/cpu/fixture.h"

#include <stdatomic.h>
#include <unistd.h>

/* Keeps the device thread in done() until everything is submitted. */
static void wait_gate(struct kld_job *job) {
    pthread_mutex_t *gate = job->owner;
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
}

/* Jobs of a stream end in order, and streams take turns. */
START_TEST(test_streams) {
    struct kld_device *device = device_open(2, 0, 20);
    struct kld_memory *from = memory_alloc(device, 4096), *to = memory_alloc(device, 4096);
    struct kld_stream *stream[3] = {stream_open(device), stream_open(device), stream_open(device)};
    struct shared shared = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, {0}};
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    static struct kld_job job[JOBS], first;
    pthread_mutex_lock(&gate);
    copy_init(&first, &shared, 0, to, from, 64);
    first.owner = &gate;
    first.done = wait_gate;
    kld_backend_cpu.submit(stream[2], &first);
    for (unsigned i = 0; i < JOBS; i++) {
        copy_init(&job[i], &shared, i, to, from, 4096);
        kld_backend_cpu.submit(stream[i >= JOBS / 2], &job[i]);
    }
    pthread_mutex_unlock(&gate);
    wait_count(&shared, JOBS);
    for (unsigned i = 0; i < JOBS; i++)
        ck_assert_uint_eq(shared.order[i], i / 2 + i % 2 * (JOBS / 2));
    for (int i = 0; i < 3; i++)
        kld_backend_cpu.stream_close(stream[i]);
    kld_backend_cpu.memory_free(from);
    kld_backend_cpu.memory_free(to);
    kld_backend_cpu.device_close(device);
}
END_TEST

/* Who has three streams, all of them full, gets no more turns than who has one. */
START_TEST(owners_take_turns) {
    enum { TURNS = 6, OWN = 5 };
    static const uint64_t owner[OWN] = {7, 7, 7, 3, UINT64_MAX};
    /* Of 7's, 3's and the last one's turn the first three, of 3 and the last two, then 7 alone. */
    static const unsigned want[] = {0, 3, 4, 1, 3, 2, 0, 1, 2};
    struct kld_device *device = device_open(2, 0, 20);
    struct kld_memory *from = memory_alloc(device, 4096), *to = memory_alloc(device, 4096);
    struct kld_stream *stream[OWN];
    struct shared shared = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, {0}};
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    static const unsigned jobs[OWN] = {2, 2, 2, 2, 1};
    static struct kld_job job[OWN][2], first;
    for (int i = 0; i < OWN; i++)
        stream[i] = stream_of(device, owner[i]);
    pthread_mutex_lock(&gate);
    struct kld_stream *other = stream_of(device, 0);
    copy_init(&first, &shared, 0, to, from, 64);
    first.owner = &gate;
    first.done = wait_gate;
    kld_backend_cpu.submit(other, &first);
    for (unsigned i = 0; i < OWN; i++)
        for (unsigned j = 0; j < jobs[i]; j++) {
            copy_init(&job[i][j], &shared, i, to, from, 64);
            kld_backend_cpu.submit(stream[i], &job[i][j]);
        }
    pthread_mutex_unlock(&gate);
    wait_count(&shared, TURNS + 3);
    for (unsigned i = 0; i < TURNS + 3; i++)
        ck_assert_uint_eq(shared.order[i], want[i]);
    kld_backend_cpu.stream_close(other);
    kld_backend_cpu.stream_close(stream[1]); /* 7 is there for its others */
    copy_init(&job[2][0], &shared, 2, to, from, 64);
    kld_backend_cpu.submit(stream[2], &job[2][0]);
    wait_count(&shared, TURNS + 4);
    kld_backend_cpu.stream_close(stream[0]);
    kld_backend_cpu.stream_close(stream[3]);
    kld_backend_cpu.memory_free(from);
    kld_backend_cpu.memory_free(to);
    kld_backend_cpu.device_close(device); /* and what is open yet */
}
END_TEST

/* The stream of one of whose jobs only the last is there: done() of each submits the next. */
static struct kld_stream *again_stream;
static struct kld_job again[4];

static void ask_again(struct kld_job *job) {
    if (++job < again + 4)
        kld_backend_cpu.submit(again_stream, job);
    note_done(job - 1);
}

/* Who has one job at a time gets no turn before all others have had theirs, nor loses one. */
START_TEST(who_asks_again_goes_behind_the_others) {
    enum { FULL = 4, ENDS = 12 };
    static const unsigned want[ENDS] = {0, 9, 2, 1, 9, 3, 0, 9, 2, 1, 9, 3};
    struct kld_device *device = device_open(2, 0, 20);
    struct kld_memory *from = memory_alloc(device, 4096), *to = memory_alloc(device, 4096);
    struct kld_stream *stream[FULL], *other = stream_of(device, 0);
    struct shared shared = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, {0}};
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    static struct kld_job job[FULL][2], first;
    pthread_mutex_lock(&gate);
    copy_init(&first, &shared, 0, to, from, 64);
    first.owner = &gate;
    first.done = wait_gate;
    kld_backend_cpu.submit(other, &first);
    for (unsigned i = 0; i < FULL; i++)
        stream[i] = stream_of(device, i < FULL / 2 ? 1 : 3);
    again_stream = stream_of(device, 2);
    for (unsigned i = 0; i < 4; i++) {
        copy_init(&again[i], &shared, 9, to, from, 64);
        again[i].done = ask_again;
    }
    for (unsigned i = 0; i < FULL; i++) {
        if (i == FULL / 2)
            kld_backend_cpu.submit(again_stream, &again[0]);
        for (unsigned j = 0; j < 2; j++) {
            copy_init(&job[i][j], &shared, i, to, from, 64);
            kld_backend_cpu.submit(stream[i], &job[i][j]);
        }
    }
    pthread_mutex_unlock(&gate);
    wait_count(&shared, ENDS);
    for (unsigned i = 0; i < ENDS; i++)
        ck_assert_uint_eq(shared.order[i], want[i]);
    kld_backend_cpu.memory_free(from);
    kld_backend_cpu.memory_free(to);
    kld_backend_cpu.device_close(device); /* and all that is open yet */
}
END_TEST

START_TEST(test_close_in_flight) {
    struct kld_device *device = device_open(2, 0, 0);
    struct kld_memory *from = memory_alloc(device, 4u << 20), *to = memory_alloc(device, 4u << 20);
    struct kld_stream *stream = stream_open(device);
    struct shared shared = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, {0}};
    static struct kld_job job[JOBS];
    for (unsigned i = 0; i < JOBS; i++) {
        copy_init(&job[i], &shared, i, to, from, 4u << 20);
        kld_backend_cpu.submit(stream, &job[i]);
    }
    kld_backend_cpu.device_close(device); /* takes stream and memories with it */
    ck_assert_uint_eq(shared.count, JOBS);
    for (unsigned i = 0; i < JOBS; i++)
        ck_assert_int_eq(job[i].status, KLD_OK);
}
END_TEST

/* A job submitted long after the device thread went to sleep still runs. */
START_TEST(test_wakes) {
    struct kld_device *device = device_open(2, 0, 100);
    struct kld_memory *from = memory_alloc(device, 64), *to = memory_alloc(device, 64);
    struct kld_stream *stream = stream_open(device);
    struct shared shared = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, {0}};
    for (unsigned i = 0; i < 100; i++) {
        struct kld_job job;
        copy_init(&job, &shared, i, to, from, 64);
        kld_backend_cpu.submit(stream, &job);
        wait_count(&shared, i + 1);
        usleep(i * 5); /* across the end of polling */
    }
    device_end(device, stream, from, to);
}
END_TEST
static pthread_t ran_on;

static void note_thread(struct kld_job *job) {
    ran_on = pthread_self();
    note_done(job);
}

static void end_late(struct kld_job *job) {
    usleep(50000);
    note_thread(job);
}

static bool sleeps(struct kld_device *head) {
    struct cpu_device *device = (struct cpu_device *)head;
    pthread_mutex_lock(&device->lock);
    bool sleeping = device->sleeping;
    pthread_mutex_unlock(&device->lock);
    return sleeping;
}

static void wait_asleep(struct kld_device *device) {
    while (!sleeps(device))
        usleep(1000);
}

/* A caller that polls runs what is small itself, in order, and leaves the rest to the thread. */
START_TEST(test_small_jobs_of_who_polls) {
    enum { LARGE = 8 << 20 };
    struct shared shared = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};
    struct kld_device *device = device_open(2, 0, 0);
    struct kld_memory *to = memory_alloc(device, LARGE), *from = memory_alloc(device, LARGE);
    struct kld_stream *stream = stream_open(device);
    struct kld_job job[3];
    for (unsigned i = 0; i < 3; i++) {
        copy_init(&job[i], &shared, i, to, from, 64);
        job[i].done = note_thread;
    }
    wait_asleep(device);
    kld_backend_cpu.poll(device, true);
    for (unsigned i = 0; i < 2; i++) { /* one by one: two may take more than a poll has */
        kld_backend_cpu.submit(stream, &job[i]);
        usleep(20000);
        ck_assert_uint_eq(shared.count, i);
        kld_backend_cpu.poll(device, true);
        ck_assert_uint_eq(shared.count, i + 1);
        ck_assert(pthread_equal(ran_on, pthread_self()));
    }
    ck_assert_uint_eq(shared.order[1], 1);
    job[0].done = end_late;
    job[0].copy_bytes = LARGE; /* the thread's; and so is what comes behind it */
    kld_backend_cpu.submit(stream, &job[0]);
    kld_backend_cpu.submit(stream, &job[1]);
    kld_backend_cpu.poll(device, true);
    wait_count(&shared, 4);
    ck_assert(!pthread_equal(ran_on, pthread_self()));
    ck_assert_uint_eq(shared.order[3], 1);
    wait_asleep(device);
    kld_backend_cpu.submit(stream, &job[2]); /* whoever stops to poll has left nothing behind */
    kld_backend_cpu.poll(device, false);
    wait_count(&shared, 5);
    kld_backend_cpu.submit(stream, &job[1]);
    wait_count(&shared, 6);
    ck_assert(!pthread_equal(ran_on, pthread_self()));
    device_end(device, stream, from, to);
}
END_TEST

static bool is_run_by_poller(struct kld_device *device, struct kld_stream *stream,
                             struct kld_memory *memory, uint64_t rows, uint64_t classes,
                             uint64_t stride_bytes) {
    static const enum kld_slot slots[] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS, KLD_SLOT_LOSS};
    struct shared shared = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};
    struct kld_job job = {.owner = &shared, .kind = KLD_JOB_OP, .done = note_thread};
    struct kld_op *op = &job.op;
    kld_op_init(op);
    op->predictions_form = op->targets_form = KLD_FORM_LOGITS;
    op->rank = 2;
    op->shape[0] = rows;
    op->shape[1] = classes;
    for (uint64_t i = 0; i < 3; i++) {
        struct kld_tensor *tensor = &op->tensor[slots[i]];
        tensor->dtype = KLD_DTYPE_FP64;
        tensor->region = 1;
        tensor->offset_bytes = i * (5 << 20);
        tensor->row_stride_bytes = i < 2 ? stride_bytes : 0;
        job.place[slots[i]].memory = memory;
        job.place[slots[i]].offset_bytes = tensor->offset_bytes;
    }
    struct kld_error error;
    ck_assert_msg(kld_op_check(op, &job.geometry, &error) == KLD_OK, "%s", error.text);
    wait_asleep(device);
    kld_backend_cpu.submit(stream, &job);
    kld_backend_cpu.poll(device, true);
    wait_count(&shared, 1);
    ck_assert_int_eq(job.status, KLD_OK);
    return pthread_equal(ran_on, pthread_self());
}

/* Small is what takes some 10 us: neither many short rows nor rows in many pages are. */
START_TEST(test_what_is_small) {
    struct kld_device *device = device_open(2, 0, 0);
    struct kld_memory *memory = memory_alloc(device, 16 << 20);
    struct kld_stream *stream = stream_open(device);
    wait_asleep(device);
    kld_backend_cpu.poll(device, true);
    ck_assert(is_run_by_poller(device, stream, memory, 1, 1024, 0));
    ck_assert(is_run_by_poller(device, stream, memory, 16, 64, 0));
    ck_assert(is_run_by_poller(device, stream, memory, 128, 1, 0));
    ck_assert(!is_run_by_poller(device, stream, memory, 1024, 1, 0));
    ck_assert(!is_run_by_poller(device, stream, memory, 128, 1, 4096));
    ck_assert(!is_run_by_poller(device, stream, memory, 1, 2048, 0));
    kld_backend_cpu.stream_close(stream);
    kld_backend_cpu.memory_free(memory);
    kld_backend_cpu.device_close(device);
}
END_TEST

static pthread_t poller;
static unsigned polled; /* jobs that ended on that thread; its own */

static void note_slowly(struct kld_job *job) {
    if (pthread_equal(pthread_self(), poller)) {
        polled++;
        usleep(100);
    }
    note_done(job);
}

/* However many small jobs wait, poll() returns, and nobody has to come again for the rest. */
START_TEST(test_many_small_jobs) {
    enum { MANY = 50 };
    struct shared shared = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};
    struct kld_device *device = device_open(2, 0, 0);
    struct kld_memory *to = memory_alloc(device, 4096), *from = memory_alloc(device, 4096);
    struct kld_stream *stream = stream_open(device);
    static struct kld_job job[MANY];
    polled = 0;
    poller = pthread_self();
    wait_asleep(device);
    kld_backend_cpu.poll(device, true);
    for (unsigned i = 0; i < MANY; i++) {
        copy_init(&job[i], &shared, i % 3, to, from, 64);
        job[i].done = note_slowly;
        kld_backend_cpu.submit(stream, &job[i]);
    }
    kld_backend_cpu.poll(device, true);
    ck_assert_uint_ge(polled, 1);
    ck_assert_uint_le(polled, 3);
    wait_count(&shared, MANY);
    device_end(device, stream, from, to);
}
END_TEST

/* What the done() below submits, and what has ended when it returns. */
static struct kld_stream *later_stream;
static struct kld_job *later;
static unsigned ended_before;

static void submit_larger(struct kld_job *job) {
    struct shared *shared = job->owner;
    kld_backend_cpu.submit(later_stream, later);
    usleep(50000);
    pthread_mutex_lock(&shared->lock);
    ended_before = shared->count;
    pthread_mutex_unlock(&shared->lock);
    note_done(job);
}

/* A larger job behind a small one that the caller runs wakes the thread, which then waits. */
START_TEST(test_large_job_behind_a_small_one) {
    enum { LARGE = 1 << 20 };
    struct shared shared = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};
    struct kld_device *device = device_open(2, 0, 0);
    struct kld_memory *to = memory_alloc(device, LARGE), *from = memory_alloc(device, LARGE);
    struct kld_stream *stream = stream_open(device);
    struct kld_job small, large;
    copy_init(&small, &shared, 0, to, from, 64);
    copy_init(&large, &shared, 1, to, from, LARGE);
    small.done = submit_larger;
    large.done = note_thread;
    later_stream = stream;
    later = &large;
    wait_asleep(device);
    kld_backend_cpu.poll(device, true);
    kld_backend_cpu.submit(stream, &small);
    kld_backend_cpu.poll(device, true);
    wait_count(&shared, 2);
    ck_assert_uint_eq(ended_before, 0);
    ck_assert_uint_eq(shared.order[0], 0);
    ck_assert_uint_eq(shared.order[1], 1);
    ck_assert(!pthread_equal(ran_on, pthread_self()));
    device_end(device, stream, from, to);
}
END_TEST
UNIT_MAIN("kernels/cpu/queue", test_streams, owners_take_turns,
          who_asks_again_goes_behind_the_others, test_close_in_flight, test_wakes,
          test_small_jobs_of_who_polls, test_what_is_small, test_many_small_jobs,
          test_large_job_behind_a_small_one)
