/* test_thread.c - the host side of the CUDA back end over a double of the runtime: who launches and
 * completes, in which order, events between streams, memory of other processes. What kernels
 * compute is the case table's. A build without CUDA has none of it, and says so. */
#include "kernels/backend.h"

#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "tests/unit/unit.h"

#ifdef KLD_WITH_CUDA
#include "tests/unit/kernels/cuda/fixture.h"

/* Many on four streams; some staged, some early; the caller polls, does not, or stops halfway. */
START_TEST(jobs_end_in_order_whoever_looks) {
    setup();
    for (int round = 0; round < 120; round++) {
        bool polls = round % 3 != 0;
        atomic_store(&fake_us, round % 5 * 15);
        if (polls)
            cuda->poll(device, true);
        for (int i = 0; i < JOBS; i++) {
            prepare(&records[i], round % 4 == 3 && i % 5 == 0 ? far : pool, i % 2);
            submit(&records[i], i % STREAMS);
        }
        if (round % 6 == 1)
            cuda->poll(device, polls = false);
        for (int i = 0; i < JOBS; i++)
            wait_for(&records[i], polls);
        cuda->poll(device, false);
        for (int i = 0; i < JOBS; i++) {
            bool staged = round % 4 == 3 && i % 5 == 0;
            ck_assert_int_eq(records[i].job.status, KLD_OK);
            ck_assert(records[i].job.loss == FAKE_LOSS);
            ck_assert_int_eq(records[i].launches, i % 2 && !staged);
            if (i >= STREAMS)
                ck_assert(records[i].place > records[i - STREAMS].place);
        }
    }
    teardown();
}
END_TEST

START_TEST(who_polls_completes) {
    setup();
    for (int i = 0; i < 200; i++) {
        cuda->poll(device, true);
        prepare(&records[0], pool, false);
        ck_assert(submit(&records[0], 0));
        wait_for(&records[0], true);
        ck_assert(pthread_equal(records[0].ended_in, pthread_self()));
        cuda->poll(device, false);
    }
    /* Given up before the end: the device's thread sees to it. */
    atomic_store(&fake_us, FAKE_LONG_US);
    cuda->poll(device, true);
    prepare(&records[0], pool, false);
    ck_assert(submit(&records[0], 0));
    usleep(1000);
    cuda->poll(device, false);
    fake_skip_long();
    wait_for(&records[0], false);
    ck_assert(!pthread_equal(records[0].ended_in, pthread_self()));
    teardown();
}
END_TEST

START_TEST(an_idle_device_says_whether_it_works) {
    setup();
    ck_assert_int_eq(cuda->check(device, &err), KLD_OK);
    atomic_store(&fake_copy_error, cudaErrorIllegalAddress); /* another client of MPS faulted */
    ck_assert_int_eq(cuda->check(device, &err), KLD_DEVICE_LOST);
    ck_assert_int_eq(cuda->check(device, &err), KLD_DEVICE_LOST); /* for good */
    prepare(&records[0], pool, false);
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert_int_eq(records[0].job.status, KLD_DEVICE_LOST);
}
END_TEST

/* MPS refuses who comes while a client of its lost context lives, and that process for good:
 * another one has to ask, and this one says so at once. Whoever wants the best device there is does
 * not get the CPU then. */
START_TEST(who_is_refused_the_device_does_not_ask_again) {
    const struct kld_device_options options = {.spin_us = 20};
    const struct kld_backend *best = NULL;
    uint32_t count = 7;
    atomic_store(&fake_refusal, cudaErrorMpsServerNotReady);
    uint64_t start_ns = fake_now_ns();
    ck_assert_int_eq(cuda->device_open(&options, &device, &err), KLD_BUSY);
    ck_assert_int_eq(atomic_load(&fake_calls), 1);
    ck_assert_int_eq(cuda->device_count(&count, &err), KLD_BUSY);
    ck_assert_int_eq(atomic_load(&fake_calls), 2);
    ck_assert_int_eq(kld_backend_find("auto", &best, &err), KLD_BUSY);
    ck_assert_int_eq(atomic_load(&fake_calls), 3);
    ck_assert(strstr(err.text, "MPS"));
    ck_assert_ptr_eq(best, NULL);
    atomic_store(&fake_refusal, cudaErrorNoDevice);
    ck_assert_int_eq(kld_backend_find("auto", &best, &err), KLD_OK);
    ck_assert_str_eq(best->name, "cpu");
    ck_assert_uint_lt(fake_now_ns() - start_ns, CUDA_HEIR_NS);
    ck_assert_uint_eq(count, 7);
}
END_TEST

/* As the runtime does before main(). */
void __wrap___cudaRegisterFunction(void **module, const char *host_side, char *device_side,
                                   const char *name, int threads_max, void *tid, void *bid,
                                   void *block, void *grid, int *warp);
enum { KERNELS = 7 };
static void register_kernels(void) {
    static const char stub[KERNELS];
    for (int i = 0; i < KERNELS; i++)
        __wrap___cudaRegisterFunction(NULL, &stub[i], NULL, "kernel", -1, NULL, NULL, NULL, NULL,
                                      NULL);
}

START_TEST(kernels_are_loaded_when_a_device_is_opened) {
    const struct kld_device_options options = {.spin_us = 20, .kernels_load = KLD_KERNELS_AT_OPEN};
    register_kernels();
    ck_assert_int_eq(cuda->device_open(&options, &device, &err), KLD_OK);
    ck_assert_int_eq(atomic_load(&fake_loads), KERNELS);
    cuda->device_close(device);
}
END_TEST

/* As in a device that was opened so, at any moment. */
static void have_kernels_to_load(void) {
    struct cuda_device *own = (struct cuda_device *)device;
    pthread_mutex_lock(&own->work);
    pthread_mutex_lock(&own->mutex);
    own->loads_when_idle = true;
    pthread_mutex_unlock(&own->mutex);
    pthread_mutex_unlock(&own->work);
}

/* Not while there is anything on the device, who may wait for what: the driver waits for that. */
START_TEST(kernels_are_loaded_while_a_device_is_idle) {
    register_kernels();
    setup();
    usleep(20000);
    ck_assert_int_eq(atomic_load(&fake_loads), 0); /* a trainer's process has its own ways */
    for (int polls = 0; polls < 2; polls++) {
        int loaded = atomic_load(&fake_loads);
        cuda->poll(device, polls);
        atomic_store(&fake_us, FAKE_LONG_US);
        prepare(&records[0], pool, false);
        ck_assert(submit(&records[0], 0));
        atomic_store(&fake_us, 0);
        have_kernels_to_load(); /* the device thread polls, or sleeps and looks when it wakes */
        prepare(&records[1], pool, false);
        ck_assert(!submit(&records[1], 1)); /* its kernel may not be there yet */
        usleep(20000);
        ck_assert_int_eq(atomic_load(&fake_loads), loaded);
        fake_skip_long();
        wait_for(&records[0], polls);
        wait_for(&records[1], polls);
        cuda->poll(device, false);
        for (int i = 0; i < 10000 && atomic_load(&fake_loads) < KERNELS; i++)
            usleep(1000);
        ck_assert_int_eq(atomic_load(&fake_loads), KERNELS);
    }
    teardown();
}
END_TEST

/* On a card that is nearly full, say: there is no room for a kernel. */
START_TEST(a_device_that_does_not_open_leaves_nothing) {
    const struct kld_device_options options = {.spin_us = 20};
    atomic_store(&fake_finish_error, cudaErrorMemoryAllocation);
    ck_assert_int_eq(cuda->device_open(&options, &device, &err), KLD_NO_MEMORY);
    ck_assert_int_eq(atomic_load(&fake_blocks) + atomic_load(&fake_streams), 0);
}
END_TEST

START_TEST(closing_waits_for_what_was_polled) {
    setup();
    atomic_store(&fake_us, 20000);
    cuda->poll(device, true);
    prepare(&records[0], pool, false);
    ck_assert(submit(&records[0], 0));
    cuda->device_close(device);
    ck_assert_uint_eq(atomic_load(&records[0].place), 1);
}
END_TEST

START_TEST(streams_wait_for_events) {
    setup();
    struct kld_gpu_event *ours, *theirs, *none;
    uint8_t handle[64], bad[64] = "bad";
    ck_assert_int_eq(cuda->event_create(device, &ours, handle, &err), KLD_OK);
    ck_assert_int_eq(cuda->event_import(device, handle, &theirs, &err), KLD_OK);
    ck_assert_int_eq(cuda->event_import(device, bad, &none, &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "no live interprocess event"));
    for (int staged = 0; staged < 2; staged++) {
        uint64_t start_ns = fake_now_ns();
        atomic_store(&fake_us, 30000);
        prepare(&records[0], pool, false);
        records[0].job.record = ours;
        ck_assert(submit(&records[0], 0));
        atomic_store(&fake_us, 5);
        prepare(&records[1], staged ? far : pool, !staged);
        records[1].job.wait = theirs;
        submit(&records[1], 1);
        wait_for(&records[1], false);
        ck_assert_uint_ge(fake_now_ns() - start_ns, 30000000);
        ck_assert_uint_lt(records[1].job.kernel_ns, 20000000); /* waiting is no computing */
        wait_for(&records[0], false);
    }
    cuda->event_free(ours);
    cuda->event_free(theirs);
    cuda->event_free(NULL);
    teardown();
}
END_TEST

/* Asks until it can be told: the device's thread may be at work just now. */
static enum kld_job_stage stage_of(int record) {
    enum kld_job_stage stage = KLD_JOB_UNKNOWN;
    for (int i = 0; i < TRIES_MAX && stage == KLD_JOB_UNKNOWN; i++) {
        usleep(i > 0 ? 1000 : 0);
        stage = cuda->stage(device, &records[record].job);
    }
    return stage;
}

/* Only a job that its own event holds up does. */
START_TEST(a_job_says_that_it_waits) {
    setup();
    struct kld_gpu_event *ours, *theirs;
    uint8_t handle[64];
    ck_assert_int_eq(cuda->event_create(device, &ours, handle, &err), KLD_OK);
    ck_assert_int_eq(cuda->event_import(device, handle, &theirs, &err), KLD_OK);
    atomic_store(&fake_us, FAKE_LONG_US);
    prepare(&records[0], pool, false);
    records[0].job.record = ours;
    submit(&records[0], 0);
    prepare(&records[1], pool, false);
    records[1].job.wait = theirs;
    submit(&records[1], 1);
    bool waits = false;
    for (int i = 0; i < TRIES_MAX && !waits; i++) { /* the device's thread may be at work now */
        usleep(1000);
        waits = cuda->stage(device, &records[1].job) == KLD_JOB_WAITS;
    }
    ck_assert(waits);
    ck_assert_int_eq(stage_of(0), KLD_JOB_BEGUN);
    fake_skip_long();
    wait_for(&records[0], false);
    ck_assert_uint_eq(atomic_load(&records[1].place), 0); /* at work now, for as long */
    prepare(&records[0], pool, false);
    records[0].job.record = ours; /* the client goes on */
    submit(&records[0], 0);
    for (int i = 0; i < 10; i++) {
        ck_assert_int_eq(stage_of(1), KLD_JOB_BEGUN);
        usleep(100);
    }
    ck_assert_uint_eq(atomic_load(&records[1].place), 0);
    fake_skip_long();
    wait_for(&records[1], false);
    wait_for(&records[0], false);
    cuda->event_free(ours);
    cuda->event_free(theirs);
    teardown();
}
END_TEST

START_TEST(a_job_says_that_it_is_behind_another) {
    setup();
    atomic_store(&fake_us, FAKE_LONG_US);
    prepare(&records[0], pool, false);
    prepare(&records[1], pool, false);
    submit(&records[0], 0);
    submit(&records[1], 0);
    enum kld_job_stage stage = KLD_JOB_UNKNOWN;
    for (int i = 0; i < TRIES_MAX && stage != KLD_JOB_BEGUN; i++) {
        usleep(1000);
        stage = stage_of(0);
    }
    ck_assert_int_eq(stage, KLD_JOB_BEGUN);
    ck_assert_int_eq(stage_of(1), KLD_JOB_BEHIND);
    fake_skip_long();
    fake_skip_long();
    wait_for(&records[0], false);
    wait_for(&records[1], false);
    teardown();
}
END_TEST

#define ROUNDS 3
static atomic_int held, asked, answered;

/* While not 0, of this thread: the time that it is told, so that it loses none to others. */
static _Thread_local uint64_t frozen_ns;

int clock_gettime(clockid_t clock, struct timespec *ret_now) {
    if (!frozen_ns)
        return (int)syscall(SYS_clock_gettime, clock, ret_now);
    ret_now->tv_sec = (time_t)(frozen_ns / 1000000000);
    ret_now->tv_nsec = (long)(frozen_ns % 1000000000);
    return 0;
}

/* As the device's thread, which has the lock nearly all the time while staged jobs are in flight:
 * it has it when it is asked, and for 10 us more. */
static void *have_the_lock(void *argument) {
    struct cuda_device *locked = argument;
    for (int i = 1; i <= ROUNDS; i++) {
        pthread_mutex_lock(&locked->work);
        atomic_store(&held, i);
        while (atomic_load(&asked) < i)
            sched_yield();
        uint64_t until_ns = fake_now_ns() + 10000;
        while (fake_now_ns() < until_ns)
            continue;
        pthread_mutex_unlock(&locked->work);
        while (atomic_load(&answered) < i)
            sched_yield();
    }
    return NULL;
}

START_TEST(a_busy_device_says_it_as_well) {
    setup();
    struct kld_gpu_event *ours, *theirs;
    pthread_t thread;
    uint8_t handle[64];
    ck_assert_int_eq(cuda->event_create(device, &ours, handle, &err), KLD_OK);
    ck_assert_int_eq(cuda->event_import(device, handle, &theirs, &err), KLD_OK);
    atomic_store(&fake_us, 20000000);
    prepare(&records[0], pool, false);
    records[0].job.record = ours;
    submit(&records[0], 0);
    prepare(&records[1], pool, false);
    records[1].job.wait = theirs;
    submit(&records[1], 1);
    for (int i = 0; i < TRIES_MAX && atomic_load(&fake_launches) < 2; i++) /* whoever does it */
        usleep(1000);
    ck_assert_int_eq(atomic_load(&fake_launches), 2);
    atomic_store(&fake_us, 5);
    ck_assert_int_eq(pthread_create(&thread, NULL, have_the_lock, device), 0);
    for (int round = 1; round <= ROUNDS; round++) {
        while (atomic_load(&held) < round)
            sched_yield();
        atomic_store(&asked, round);
        frozen_ns = fake_now_ns();
        enum kld_job_stage stage = cuda->stage(device, &records[1].job);
        frozen_ns = 0;
        atomic_store(&answered, round);
        ck_assert_int_eq(stage, KLD_JOB_WAITS);
    }
    pthread_join(thread, NULL);
    cuda->event_free(theirs);
    cuda->event_free(ours);
    atomic_store(&((struct cuda_device *)device)->lost, true); /* nobody waits 20 s for them */
    wait_for(&records[0], false);
    wait_for(&records[1], false);
}
END_TEST

START_TEST(what_cannot_be_launched_is_not_told_as_launched) {
    setup();
    for (int polls = 0; polls < 2; polls++) {
        cuda->poll(device, polls);
        atomic_store(&fake_launch_error, cudaErrorInvalidConfiguration);
        prepare(&records[0], pool, true);
        ck_assert(!submit(&records[0], 0));
        wait_for(&records[0], polls);
        ck_assert_int_eq(records[0].job.status, KLD_INTERNAL);
        ck_assert_int_eq(records[0].launches, 0);
    }
    cuda->poll(device, false);
    teardown();
}
END_TEST

START_TEST(allocations_of_others_are_opened_once) {
    setup();
    struct kld_memory *memory[3], *none;
    const uint8_t one[64] = "one", two[64] = "two", bad[64] = "bad";
    ck_assert_int_eq(
        cuda->memory_import_ipc(device, one, FAKE_ALLOCATION, 0, 4096, &memory[0], &err), KLD_OK);
    ck_assert_int_eq(
        cuda->memory_import_ipc(device, one, FAKE_ALLOCATION, 8192, 4096, &memory[1], &err),
        KLD_OK);
    ck_assert_int_eq(
        cuda->memory_import_ipc(device, two, FAKE_ALLOCATION, 0, 4096, &memory[2], &err), KLD_OK);
    ck_assert_int_eq(atomic_load(&fake_imports), 2);
    ck_assert_int_eq(cuda->memory_import_ipc(device, two, 4 * FAKE_ALLOCATION, FAKE_ALLOCATION,
                                             4096, &none, &err),
                     KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "end beyond the allocation"));
    ck_assert_int_eq(cuda->memory_import_ipc(device, bad, FAKE_ALLOCATION, 0, 4096, &none, &err),
                     KLD_INVALID);
    cuda->memory_free(memory[0]);
    ck_assert_int_eq(atomic_load(&fake_imports), 2);
    cuda->memory_free(memory[1]);
    ck_assert_int_eq(atomic_load(&fake_imports), 1);
    ck_assert_int_eq(
        cuda->memory_import_ipc(device, one, FAKE_ALLOCATION, 0, 4096, &memory[0], &err), KLD_OK);
    ck_assert_int_eq(atomic_load(&fake_imports_total), 3); /* anew */
    cuda->memory_free(memory[0]);
    cuda->memory_free(memory[2]);
    teardown();
}
END_TEST

/* In place, with events, staged, copied; on four streams, whoever looks. */
static void every_kind(struct kld_gpu_event *event, bool polls) {
    cuda->poll(device, polls);
    for (int i = 0; i < JOBS; i++) {
        prepare(&records[i], i % 3 == 0 ? far : pool, false);
        struct kld_job *job = &records[i].job;
        if (i % 5 == 0)
            job->wait = job->record = event;
        if (i % 7 == 0) {
            job->kind = KLD_JOB_COPY;
            job->copy_to = (struct kld_place){.memory = pool};
            job->copy_from = (struct kld_place){.memory = host};
            job->copy_bytes = 4096;
        }
        submit(&records[i], i % STREAMS);
    }
    for (int i = 0; i < JOBS; i++)
        wait_for(&records[i], polls);
    cuda->poll(device, false);
}

START_TEST(a_warm_device_allocates_nothing) {
    setup();
    struct kld_gpu_event *event;
    uint8_t handle[64];
    ck_assert_int_eq(cuda->event_create(device, &event, handle, &err), KLD_OK);
    uint64_t used = cuda->pool_bytes(device);
    far->pinned = true;            /* or they are started one by one */
    atomic_store(&fake_us, 20000); /* all of them in flight at a time */
    every_kind(event, false);
    far->pinned = false;
    atomic_store(&fake_us, 5);
    int before = atomic_load(&fake_allocations), before_host = atomic_load(&mallocs);
    for (int round = 0; round < 50; round++)
        every_kind(event, round % 2);
    ck_assert_int_eq(atomic_load(&fake_allocations), before);
    ck_assert_int_eq(atomic_load(&mallocs), before_host);
    cuda->poll(device, false);
    ck_assert_uint_eq(cuda->pool_bytes(device), used); /* what is kept is not in use */
    cuda->event_free(event);
    teardown();
}
END_TEST

static void refused_fd(int fd, uint64_t bytes, const char *said) {
    struct kld_memory *none;
    ck_assert_int_eq(cuda->memory_import_fd(device, fd, bytes, 0, 4096, &none, &err), KLD_INVALID);
    ck_assert_msg(strstr(err.text, said) != NULL, "%s", err.text);
}

START_TEST(allocations_by_descriptor) {
    setup();
    struct kld_memory *memory;
    ck_assert_int_eq(cuda->memory_import_fd(device, 7, FAKE_UNIT, 4096, 4096, &memory, &err),
                     KLD_OK);
    ck_assert_int_eq(atomic_load(&fake_handles), 0); /* the mapping alone holds it */
    ck_assert_int_eq(atomic_load(&fake_maps), 1);
    refused_fd(99, FAKE_UNIT, "not a CUDA allocation");
    refused_fd(7, FAKE_UNIT + 4096, "a multiple of 2097152");
    refused_fd(7, 2 * FAKE_UNIT, "does not have 4194304 bytes");
    refused_fd(7, 2048, "4096 bytes at offset 0");
    atomic_store(&fake_device_of_fd, 1);
    refused_fd(7, FAKE_UNIT, "another device");
    atomic_store(&fake_device_of_fd, 0);
    atomic_store(&fake_access_error, CUDA_ERROR_INVALID_DEVICE);
    refused_fd(7, FAKE_UNIT, "does not have");
    ck_assert_int_eq(atomic_load(&fake_maps), 1);
    ck_assert_int_eq(atomic_load(&fake_ranges), 1);
    cuda->memory_free(memory);
    teardown();
}
END_TEST

/* The memory of a process that is just being taken apart: the next one waits for it, and not for
 * ever. */
START_TEST(memory_of_a_predecessor_is_waited_for) {
    struct kld_memory *memory;
    atomic_store(&fake_no_memory, 5);
    setup(); /* the device itself; the buffer behind it */
    ck_assert_int_eq(atomic_load(&fake_no_memory), 0);
    atomic_store(&fake_no_memory, 5);
    ck_assert_int_eq(cuda->memory_alloc(device, 4096, &memory, &err), KLD_OK);
    cuda->memory_free(memory);
    atomic_store(&fake_no_memory, 5);
    prepare(&records[0], far, false);
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert_int_eq(records[0].job.status, KLD_OK);
    ck_assert_int_eq(atomic_load(&fake_no_memory), 0);
    usleep(1100000);
    atomic_store(&fake_no_memory, 2); /* once more without what that job has left */
    uint64_t start_ns = fake_now_ns();
    ck_assert_int_eq(cuda->memory_alloc(device, 4096, &memory, &err), KLD_NO_MEMORY);
    ck_assert_uint_lt(fake_now_ns() - start_ns, CUDA_HEIR_NS);
    teardown();
}
END_TEST

/* Of three cards the first two are connected. */
START_TEST(memory_of_other_cards_is_taken_where_told) {
    for (int told = 0; told < 2; told++) {
        struct kld_memory *memory;
        atomic_store(&fake_devices, 3);
        peer_access = told;
        setup();
        for (uint8_t card = 0; card < 3; card++) {
            const uint8_t uuid[16] = {card};
            bool expected = card == 0 || (told && card == 1);
            ck_assert_int_eq(cuda->reaches(device, uuid), expected);
            atomic_store(&fake_device_of_fd, card);
            enum kld_status status =
                cuda->memory_import_fd(device, 7, FAKE_UNIT, 0, 4096, &memory, &err);
            ck_assert_int_eq(status, expected ? KLD_OK : KLD_INVALID);
            if (expected)
                cuda->memory_free(memory);
        }
        teardown();
    }
}
END_TEST

/* The UUID that comes with a handle is a claim; what the driver wrote into it is not, where it is
 * known how that reads. The same three cards. */
START_TEST(a_handle_says_itself_which_card_it_is_of) {
    atomic_store(&fake_devices, 3);
    for (int round = 0; round < 4; round++) {
        struct kld_memory *memory;
        bool told = round & 1, known = round & 2;
        peer_access = told;
        atomic_store(&fake_other_handles, !known);
        setup();
        ck_assert(!cuda->handles_unread(device)); /* none came */
        for (uint32_t card = 0; card < 3; card++) {
            bool expected = !known || card == 0 || (told && card == 1);
            uint8_t handle[64];
            fake_handle(handle, 0x2af, FAKE_ALLOCATION, FAKE_CARD(card));
            enum kld_status status =
                cuda->memory_import_ipc(device, handle, FAKE_ALLOCATION, 0, 4096, &memory, &err);
            ck_assert_int_eq(status, expected ? KLD_OK : KLD_INVALID);
            ck_assert(expected || strstr(err.text, "lies on another device"));
            ck_assert_int_eq(atomic_load(&fake_imports), expected);
            if (expected)
                cuda->memory_free(memory);
            ck_assert_int_eq(cuda->handles_unread(device), !known);
        }
        teardown();
    }
    /* What fails the first time is tried once more. */
    struct kld_memory *memory;
    uint8_t handle[64];
    fake_handle(handle, 0x2af, FAKE_ALLOCATION, FAKE_CARD(0));
    atomic_store(&fake_other_handles, true);
    setup();
    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(
            cuda->memory_import_ipc(device, handle, FAKE_ALLOCATION, 0, 4096, &memory, &err),
            KLD_OK);
        cuda->memory_free(memory);
        ck_assert_int_eq(cuda->handles_unread(device), i == 0);
        atomic_store(&fake_other_handles, false);
    }
    teardown();
}
END_TEST

/* Once, and in the next launch; what the real driver makes of it is seen on a card. */
START_TEST(a_fault_is_a_launch_with_an_address_that_is_not_there) {
    setup();
    const char *at[3];
    for (int i = 0; i < 3; i++) {
        prepare(&records[i], pool, false);
        if (i == 1)
            cuda->fail_next(device);
        submit(&records[i], 0);
        wait_for(&records[i], true);
        at[i] = atomic_load(&fake_p_at);
    }
    ck_assert_ptr_eq(at[0], at[2]);
    ck_assert_uint_eq((uintptr_t)at[1], 4096);
    cuda->poll(device, false);
    teardown();
}
END_TEST

static enum kld_status run_one(void) {
    prepare(&records[0], pool, false);
    submit(&records[0], 0);
    wait_for(&records[0], true);
    return records[0].job.status;
}

/* A look that is not to be had, a mark that is not: both are later. A job that was captured itself
 * is not waited for. */
START_TEST(a_capture_is_no_lost_device) {
    setup();
    atomic_store(&fake_us, 2000);
    atomic_store(&fake_query_error, cudaErrorStreamCaptureUnsupported);
    ck_assert_int_eq(run_one(), KLD_OK);
    for (int i = 1; i < 8; i++) {
        uint64_t start_ns = fake_now_ns();
        atomic_store(&fake_not_recorded, i);
        ck_assert_int_eq(run_one(), KLD_OK);
        ck_assert_uint_ge(fake_now_ns() - start_ns, 2000000); /* and not before it has ended */
        ck_assert_int_eq(atomic_load(&fake_not_recorded), 0);
    }
    atomic_store(&fake_query_error, cudaErrorCapturedEvent);
    ck_assert_int_eq(run_one(), KLD_BUSY);
    ck_assert_ptr_nonnull(strstr(records[0].job.error.text, "captured"));
    usleep(5000);
    atomic_store(&fake_launch_error, cudaErrorStreamCaptureImplicit);
    ck_assert_int_eq(run_one(), KLD_BUSY);
    ck_assert_int_eq(run_one(), KLD_OK);
    teardown();
}
END_TEST

/* The driver loads a kernel when nothing on the device waits any more: who submits does not. */
START_TEST(submit_does_not_wait_for_a_kernel_to_be_loaded) {
    setup();
    have_kernels_to_load();
    prepare(&records[0], pool, false);
    ck_assert(submit(&records[0], 0)); /* nothing is there that could wait */
    wait_for(&records[0], false);
    usleep(50000); /* its thread sleeps */
    atomic_store(&fake_us, FAKE_LONG_US);
    prepare(&records[0], pool, false);
    have_kernels_to_load();
    ck_assert(submit(&records[0], 0));
    atomic_store(&fake_us, 5);
    atomic_store(&fake_loading, true);
    uint64_t start_ns = fake_now_ns();
    prepare(&records[1], pool, false);
    submit(&records[1], 1);
    ck_assert_uint_lt(fake_now_ns() - start_ns, FAKE_LONG_US * 500ull);
    fake_skip_long();
    wait_for(&records[0], false);
    wait_for(&records[1], false);
    ck_assert_int_eq(records[1].job.status, KLD_OK);
    teardown();
}
END_TEST

/* They are for the program's own threads: neither that which opens a device nor the device's takes
 * one, but for those of their own faults. */
START_TEST(signals_are_not_for_its_threads) {
    sigset_t mask;
    setup();
    for (int i = 0; i < TRIES_MAX && atomic_load(&fake_contexts[0]) < 2; i++)
        usleep(1000);
    ck_assert_int_ge(atomic_load(&fake_contexts[0]), 2);
    ck_assert_int_eq(atomic_load(&fake_signalled), 0);
    pthread_sigmask(SIG_SETMASK, NULL, &mask); /* and ours is what it was */
    ck_assert(!sigismember(&mask, SIGTERM) && !sigismember(&mask, SIGUSR1));
    teardown();
}
END_TEST

UNIT_MAIN("kernels/cuda/thread", submit_does_not_wait_for_a_kernel_to_be_loaded,
          a_capture_is_no_lost_device, a_device_that_does_not_open_leaves_nothing,
          a_fault_is_a_launch_with_an_address_that_is_not_there, jobs_end_in_order_whoever_looks,
          who_polls_completes, who_is_refused_the_device_does_not_ask_again,
          kernels_are_loaded_when_a_device_is_opened, kernels_are_loaded_while_a_device_is_idle,
          closing_waits_for_what_was_polled, streams_wait_for_events, a_job_says_that_it_waits,
          a_job_says_that_it_is_behind_another, a_busy_device_says_it_as_well,
          what_cannot_be_launched_is_not_told_as_launched, an_idle_device_says_whether_it_works,
          memory_of_a_predecessor_is_waited_for, memory_of_other_cards_is_taken_where_told,
          a_handle_says_itself_which_card_it_is_of, a_warm_device_allocates_nothing,
          allocations_of_others_are_opened_once, allocations_by_descriptor,
          signals_are_not_for_its_threads)

#else

#include "tests/unit/kernels/cuda/without.h"

UNIT_MAIN("kernels/cuda/thread", built_without_cuda)

#endif
