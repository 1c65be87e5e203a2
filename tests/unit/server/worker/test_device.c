/* test_device.c - completions pushed by many threads all arrive, each thread's in order; which
 * device is opened. */
#include "server/worker/device.h"

#include <pthread.h>
#include <string.h>

#include "tests/unit/unit.h"

#define THREADS 4
#define EACH 5000

static struct kld_completions completions;
static struct kld_request requests[THREADS][EACH];
static uint64_t seen;
static uint64_t next_of[THREADS];

static void take_all(uv_async_t *wake) {
    struct kld_request *request = kld_completions_take(&completions);
    for (; request; request = request->next) {
        uint64_t thread = request->number / EACH;
        ck_assert_uint_eq(request->number % EACH, next_of[thread]);
        next_of[thread]++;
        seen++;
    }
    if (seen == THREADS * EACH)
        uv_close((uv_handle_t *)wake, NULL);
}

static void *push_all(void *argument) {
    struct kld_request *mine = argument;
    for (int i = 0; i < EACH; i++)
        kld_completions_push(&completions, &mine[i]);
    return NULL;
}

START_TEST(no_completion_is_lost) {
    uv_loop_t loop;
    pthread_t threads[THREADS];
    uv_loop_init(&loop);
    uv_async_init(&loop, &completions.wake, take_all);
    for (uint64_t t = 0; t < THREADS; t++) {
        for (uint64_t i = 0; i < EACH; i++)
            requests[t][i].number = t * EACH + i;
        pthread_create(&threads[t], NULL, push_all, requests[t]);
    }
    uv_run(&loop, UV_RUN_DEFAULT);
    for (int t = 0; t < THREADS; t++)
        pthread_join(threads[t], NULL);
    ck_assert_uint_eq(seen, THREADS * EACH);
    ck_assert_ptr_null(kld_completions_take(&completions));
    ck_assert_int_eq(uv_loop_close(&loop), 0);
}
END_TEST

static struct kld_stats_device known;

static enum kld_status open_as(const char *backend, const char *device, const char *served_so_far,
                               struct kld_device **ret_device, struct kld_error *err) {
    static struct kld_config config;
    const struct kld_backend *found = NULL;
    struct kld_error passed_over;
    strcpy(config.backend, backend);
    strcpy(known.backend, served_so_far);
    strcpy(config.device, device);
    config.threads = 1;
    config.pool_bytes_max = 1 << 20;
    enum kld_status status =
        kld_worker_device_open(&config, 0, &known, 0, &found, ret_device, &passed_over, err);
    ck_assert(status != KLD_OK || found != NULL);
    return status;
}

START_TEST(device_is_chosen_or_the_reason_is_told) {
    struct kld_device *device = NULL;
    struct kld_error err;
    ck_assert_int_eq(open_as("cpu", "0", "", &device, &err), KLD_OK);
    ck_assert_str_eq(device->info.backend, "cpu");
    device->backend->device_close(device);
    ck_assert_int_eq(open_as("auto", "0", "", &device, &err), KLD_OK);
    device->backend->device_close(device);
    ck_assert_int_eq(open_as("cpu", "99", "", &device, &err), KLD_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(err.text, "device 99"));
    ck_assert_int_eq(open_as("tpu", "0", "", &device, &err), KLD_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(err.text, "auto"));
    /* A card that is away for a moment does not make this a CPU service. */
    ck_assert_int_eq(open_as("auto", "0", "gone", &device, &err), KLD_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(err.text, "gone back end"));
    ck_assert_int_eq(open_as("cpu", "0", "gone", &device, &err), KLD_OK); /* as it was told */
    device->backend->device_close(device);
}
END_TEST

/* Of the host's memory, or the container's, clients may share half, and there is staging. */
START_TEST(a_pool_in_the_hosts_memory_is_a_part_of_it) {
    const uint64_t gib = (uint64_t)1 << 30;
    const struct {
        const char *workers;
        uint64_t host, staging, wanted, expected;
    } cases[] = {{"0", 16 * gib, gib, 0, 6 * gib},
                 {"0,0", 16 * gib, gib, 0, 3 * gib},
                 {"0", 4 * gib, gib, 0, 3 * gib / 4},
                 {"0", 2 * gib, gib, 0, gib / 4},
                 {"0", 4 * gib, gib, 3 * gib, 3 * gib}};
    struct kld_stats_device unknown = {.backend = ""};
    const struct kld_backend *found;
    struct kld_device *device;
    struct kld_error passed_over, err;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct kld_config config = {.backend = "cpu", .threads = 1};
        strcpy(config.device, cases[i].workers);
        config.staging_bytes_max = cases[i].staging;
        config.pool_bytes_max = cases[i].wanted;
        ck_assert_int_eq(kld_worker_device_open(&config, 0, &unknown, cases[i].host, &found,
                                                &device, &passed_over, &err),
                         KLD_OK);
        ck_assert_uint_eq(device->info.pool_bytes_max, cases[i].expected);
        device->backend->device_close(device);
    }
}
END_TEST

START_TEST(a_successor_does_not_take_its_neighbours_card) {
    struct kld_device *device = NULL;
    struct kld_error err;
    known.described = 1;
    ck_assert_int_eq(open_as("cpu", "0", "cpu", &device, &err), KLD_OK);
    device->backend->device_close(device);
    known.uuid[0] = 7; /* as the first worker found it */
    ck_assert_int_eq(open_as("cpu", "0", "cpu", &device, &err), KLD_UNAVAILABLE);
    ck_assert_str_eq(err.text, "device 0 is another card than the one that served so far");
}
END_TEST

UNIT_MAIN("server/worker/device", no_completion_is_lost, device_is_chosen_or_the_reason_is_told,
          a_successor_does_not_take_its_neighbours_card, a_pool_in_the_hosts_memory_is_a_part_of_it)
