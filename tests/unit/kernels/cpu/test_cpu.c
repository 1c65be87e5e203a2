/* test_cpu.c - the CPU device as an object: the pool's limit, copies, and that neither the number
 * of threads nor the instruction set's choice of a moment changes a bit. The order of jobs:
 * test_queue.c. What the numbers must be is the case table's business. */
#include "tests/unit/kernels/cpu/fixture.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/unit/kernels/table.h"

START_TEST(test_options) {
    struct kld_device *device = NULL;
    struct kld_error err;
    struct kld_device_options options = {.device = 1};
    ck_assert_int_eq(kld_backend_cpu.device_open(&options, &device, &err), KLD_NOT_FOUND);
    options = (struct kld_device_options){.threads = 100000};
    ck_assert_int_eq(kld_backend_cpu.device_open(&options, &device, &err), KLD_INVALID);
    ck_assert_ptr_null(device);
    device = device_open(0, 0, 0);
    ck_assert_uint_ge(device->info.threads, 1);
    ck_assert_uint_eq(device->info.pool_bytes_max, device->info.memory_bytes / 2);
    ck_assert_str_eq(device->info.backend, "cpu");
    ck_assert(!device->info.imports_cuda_ipc);
    kld_backend_cpu.device_close(device);
    kld_backend_cpu.device_close(NULL);
    kld_backend_cpu.memory_free(NULL);
    kld_backend_cpu.stream_close(NULL);
}
END_TEST

START_TEST(test_pool) {
    struct kld_device *device = device_open(1, 1 << 20, 0);
    struct kld_memory *memory = memory_alloc(device, 600000), *more = NULL;
    struct kld_error err;
    const unsigned char *bytes = memory->host;
    for (size_t i = 0; i < 600000; i++)
        ck_assert_uint_eq(bytes[i], 0);
    ck_assert_uint_ge(kld_backend_cpu.pool_bytes(device), 600000);
    ck_assert_int_eq(kld_backend_cpu.memory_alloc(device, 600000, &more, &err), KLD_NO_MEMORY);
    ck_assert_ptr_null(more);
    ck_assert_ptr_nonnull(strstr(err.text, "600000"));
    ck_assert_int_eq(kld_backend_cpu.memory_alloc(device, UINT64_MAX - 5, &more, &err),
                     KLD_INVALID);
    ck_assert_int_eq(kld_backend_cpu.memory_alloc(device, 0, &more, &err), KLD_INVALID);
    memset(memory->host, 0xff, 600000);
    kld_backend_cpu.memory_free(memory);
    ck_assert_uint_eq(kld_backend_cpu.pool_bytes(device), 0);
    memory = memory_alloc(device, 1 << 20); /* all of it, and zero again */
    ck_assert_uint_eq(((unsigned char *)memory->host)[1000], 0);
    kld_backend_cpu.memory_free(memory);
    kld_backend_cpu.device_close(device);
}
END_TEST

START_TEST(test_memory_kinds) {
    struct kld_device *device = device_open(1, 0, 0);
    struct kld_memory *memory = NULL;
    struct kld_error err;
    uint8_t handle[64] = {0};
    ck_assert_int_eq(
        kld_backend_cpu.memory_import_ipc(device, handle, 4096, 0, 4096, &memory, &err),
        KLD_UNIMPLEMENTED);
    ck_assert_ptr_nonnull(strstr(err.text, "CUDA"));
    ck_assert_int_eq(kld_backend_cpu.memory_reserve(device, 4096, &memory, &err),
                     KLD_UNIMPLEMENTED);
    ck_assert_int_eq(kld_backend_cpu.memory_grow_fd(NULL, 0, 0, 4096, &err), KLD_UNIMPLEMENTED);
    ck_assert_ptr_nonnull(strstr(err.text, "CUDA"));
    ck_assert_int_eq(kld_backend_cpu.memory_wrap(device, NULL, 4, &memory, &err), KLD_INVALID);
    ck_assert_int_eq(kld_backend_cpu.memory_map(device, -1, 4096, &memory, &err), KLD_INVALID);
    ck_assert_int_eq(kld_backend_cpu.memory_map(device, 0, 0, &memory, &err), KLD_INVALID);
    ck_assert_ptr_null(memory);
    int fd = memfd_create("test", MFD_CLOEXEC);
    ck_assert_int_eq(ftruncate(fd, 8192), 0);
    ck_assert_int_eq(kld_backend_cpu.memory_map(device, fd, 8192, &memory, &err), KLD_OK);
    ck_assert(memory->pinned); /* nothing is slower for it */
    memcpy((char *)memory->host + 5000, "seen", 4);
    char text[5] = "";
    ck_assert_int_eq(pread(fd, text, 4, 5000), 4);
    ck_assert_str_eq(text, "seen");
    ck_assert_uint_eq(memory->bytes, 8192);
    ck_assert_uint_eq(kld_backend_cpu.pool_bytes(device), 0);
    kld_backend_cpu.memory_free(memory);
    close(fd);
    kld_backend_cpu.device_close(device);
}
END_TEST

static void check_copy(struct kld_device *device, size_t bytes) {
    struct kld_memory *from = memory_alloc(device, bytes), *to = memory_alloc(device, bytes + 100);
    struct kld_stream *stream = stream_open(device);
    struct shared shared = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, {0}};
    unsigned char *a = from->host, *b = to->host;
    for (size_t i = 0; i < bytes; i++)
        a[i] = (unsigned char)(i * 2654435761u >> 13);
    struct kld_job job;
    copy_init(&job, &shared, 0, to, from, bytes - 7);
    job.copy_from.offset_bytes = 7;
    job.copy_to.offset_bytes = 50;
    kld_backend_cpu.submit(stream, &job);
    wait_count(&shared, 1);
    ck_assert_int_eq(job.status, KLD_OK);
    ck_assert_uint_eq(job.bytes, bytes - 7);
    ck_assert_int_eq(memcmp(b + 50, a + 7, bytes - 7), 0);
    ck_assert_uint_eq(b[49], 0);
    ck_assert_uint_eq(b[50 + bytes - 7], 0);
    kld_backend_cpu.stream_close(stream);
    kld_backend_cpu.memory_free(from);
    kld_backend_cpu.memory_free(to);
}

START_TEST(test_copy) {
    struct kld_device *device = device_open(3, 0, 20);
    check_copy(device, (5u << 20) + 123); /* several chunks and a rest */
    check_copy(device, (9u << 20) + 123); /* into a buffer that no cache holds: past them */
    kld_backend_cpu.device_close(device);
}
END_TEST
static void compare_threads(const struct table_case *at) {
    static const uint32_t threads[] = {1, 2, 3, 5};
    const struct table_place place = {TABLE_POOL, 0, false, 1};
    struct table_truth truth;
    struct table_outputs first = {0};
    char failure[256] = "";
    table_truth_init(&truth, at, 11);
    ck_assert_str_eq(truth.failure, "");
    for (int i = 0; i < 4; i++) {
        struct kld_device *device = device_open(threads[i], 0, 5);
        struct table_outputs outputs;
        bool fine = table_run(device, &truth, at, &place, &outputs, failure);
        ck_assert_msg(fine, "%s", failure);
        if (i == 0) {
            first = outputs;
            fine = table_check(&truth, at, &outputs, failure);
        } else {
            fine = table_outputs_equal(&truth, &first, &outputs, failure);
            table_outputs_done(&outputs);
        }
        ck_assert_msg(fine, "%s %s, %u threads: %s", kld_divergence_name(at->divergence),
                      kld_form_name(at->form[0]), threads[i], failure);
        kld_backend_cpu.device_close(device);
    }
    table_outputs_done(&first);
    table_truth_done(&truth);
}

/* Many short rows, a few long ones that are cut into pieces, one very long one. FP64 too: its loss
 * shows the last bit of every sum. */
START_TEST(test_thread_count) {
    static const uint64_t shape[][2] = {{700, 211}, {3, 40000}, {1, 100001}, {9, 20000}};
    static const uint32_t divergences[] = {KLD_DIVERGENCE_FORWARD_KL, KLD_DIVERGENCE_JS,
                                           KLD_DIVERGENCE_REVERSE_KL, KLD_DIVERGENCE_TV,
                                           KLD_DIVERGENCE_CROSS_ENTROPY};
    for (int i = 0; i < 12; i++)
        for (uint32_t form = 0; form < 3; form++) {
            uint32_t dtype = i < 4 ? KLD_DTYPE_FP64 : KLD_DTYPE_FP32;
            struct table_case at = {.name = "threads",
                                    .divergence = divergences[i % 5],
                                    .parameter = 0.3,
                                    .data = i < 8 || form != KLD_FORM_LOGITS ? TABLE_RANDOM
                                                                             : TABLE_NEAR,
                                    .noise = 0.03,
                                    .form = {form, form},
                                    .dtype = {dtype, dtype},
                                    .rank = 2,
                                    .shape = {shape[i % 4][0], shape[i % 4][1]},
                                    .weights = true,
                                    .mask = i % 4 != 2,
                                    .gradient = {true, i % 2},
                                    .loss = true,
                                    .row_loss = true};
            compare_threads(&at);
        }
}
END_TEST

/* A row alone and the same row among others: the same bits. */
START_TEST(test_row_alone) {
    struct kld_device *device = device_open(2, 0, 5);
    const struct table_place place = {TABLE_POOL, 0, false, 1};
    for (uint32_t i = 0; i < 6; i++) {
        uint32_t form = i % 3, classes = i < 3 ? 17001 : 19; /* cut in pieces; several at a time */
        struct table_case at = {.name = "alone",
                                .form = {form, form},
                                .dtype = {KLD_DTYPE_FP32, KLD_DTYPE_FP32},
                                .reduction = KLD_REDUCTION_ROW,
                                .rank = 2,
                                .shape = {1, classes},
                                .gradient = {true, true},
                                .loss = true};
        struct table_truth truth[2];
        struct table_outputs outputs[2];
        char failure[256] = "";
        for (int k = 0; k < 2; k++) {
            at.shape[0] = k ? 20 : 1;
            table_truth_init(&truth[k], &at, 5);
            ck_assert_msg(table_run(device, &truth[k], &at, &place, &outputs[k], failure), "%s",
                          failure);
        }
        ck_assert_int_eq(memcmp(truth[0].input[0], truth[1].input[0], classes * 4), 0);
        ck_assert(table_outputs_equal(&truth[0], &outputs[0], &outputs[1], failure));
        for (int k = 0; k < 2; k++) {
            table_outputs_done(&outputs[k]);
            table_truth_done(&truth[k]);
        }
    }
    kld_backend_cpu.device_close(device);
}
END_TEST

/* The case table, a part of it, with kernels that this processor would not choose. */
static void check_kernels(const struct kld_cpu_kernels *kernels, size_t step) {
    struct kld_device *device = device_open(2, 0, 5);
    ((struct cpu_device *)device)->run.kernels = kernels; /* nothing is in flight yet */
    const struct table_place place = {TABLE_POOL, 1, false, 1};
    size_t count;
    struct table_case *cases = table_cases(true, &count);
    for (size_t i = 0; i < count; i += step) {
        struct table_truth truth;
        struct table_outputs outputs = {0};
        char failure[256] = "";
        table_truth_init(&truth, &cases[i], 77 + i);
        bool fine = table_run(device, &truth, &cases[i], &place, &outputs, failure) &&
                    table_check(&truth, &cases[i], &outputs, failure);
        ck_assert_msg(fine, "%s: %s: %s", kernels->name, cases[i].name, failure);
        table_outputs_done(&outputs);
        table_truth_done(&truth);
    }
    free(cases);
    kld_backend_cpu.device_close(device);
}

/* Of the table, within a test's limit: ThreadSanitizer takes five minutes of two busy cores for
 * a third of it. */
#ifdef __SANITIZE_THREAD__
#define EACH 23
#else
#define EACH 11
#endif

START_TEST(test_base) { check_kernels(&kld_cpu_kernels_base, EACH); }
END_TEST

START_TEST(test_avx2) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        check_kernels(&kld_cpu_kernels_avx2, EACH);
#endif
}
END_TEST

/* What kld_cpu_kernels_choose() takes where there is all of it. Many machines that build have it
 * not: it is said, and no failure anywhere. */
START_TEST(test_avx512) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        check_kernels(&kld_cpu_kernels_avx512, EACH);
        return;
    }
#endif
    fprintf(stderr, "left out: test_avx512: needs a processor with AVX-512\n");
}
END_TEST

START_TEST(test_ceiling) {
    struct kld_device *device = device_open(2, 0, 5);
    struct kld_error err;
    double read = 0, both = 0;
    ck_assert_int_eq(kld_backend_cpu.measure_ceiling(device, 1 << 20, &read, &both, &err), KLD_OK);
    ck_assert_double_gt(read, 1e8);
    ck_assert_double_gt(both, 1e8);
    ck_assert_uint_eq(kld_backend_cpu.pool_bytes(device), 0);
    kld_backend_cpu.device_close(device);
    device = device_open(1, 1 << 20, 5);
    ck_assert_int_eq(kld_backend_cpu.measure_ceiling(device, 1 << 20, &read, &both, &err),
                     KLD_NO_MEMORY);
    kld_backend_cpu.device_close(device);
}
END_TEST
UNIT_MAIN("kernels/cpu/cpu", test_options, test_pool, test_memory_kinds, test_copy,
          test_thread_count, test_row_alone, test_base, test_avx2, test_avx512, test_ceiling)
