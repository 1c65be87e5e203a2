/* kernels.c - how fast a back end computes, as a fraction of what its memory allows: medians of
 * repeated runs beside the ceilings measured in the same run. Goes through kernels/backend.h only,
 * so it measures any back end; needs no server. Checks no number: that is tests/unit/kernels.
 *
 *   kernels [--backend auto|cpu|cuda] [--device N] [--runs N] [--json FILE] [--ceiling-mib N]
 *           [--classes | --shape NxC [--dtype FP32] [--form probs] [--alike]...]
 *
 * --classes: rows of logits of many lengths, the same number of classes in all.
 * --alike: logits of a teacher and of a student that has learnt from it; without it the two tensors
 * have nothing in common. Kernels take other ways for rows that are close or have a heavy class. */
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backend.h"

#ifndef KLD_COMMIT
#define KLD_COMMIT "unknown"
#endif

#define CASES_MAX 32
#define RUNS_MAX 1000
#define TILE_BYTES ((uint64_t)64 << 20) /* of random values, repeated over a tensor */

struct shape {
    uint64_t rows, classes;
    enum kld_dtype dtype;
    enum kld_form form;
    bool alike;
};

static const struct shape standard[] = {
    {16384, 16384, KLD_DTYPE_FP32, KLD_FORM_PROBS, false},
    {8192, 32768, KLD_DTYPE_BF16, KLD_FORM_LOGITS, false},
    {4096, 131072, KLD_DTYPE_BF16, KLD_FORM_LOGITS, false},
    {2048, 262144, KLD_DTYPE_BF16, KLD_FORM_LOGITS, false},
    {4096, 32768, KLD_DTYPE_FP32, KLD_FORM_LOGITS, false},
    {8192, 32768, KLD_DTYPE_BF16, KLD_FORM_LOGITS, true},
    {4096, 32768, KLD_DTYPE_FP32, KLD_FORM_LOGITS, true},
    /* Short rows, 1 GiB in both tensors together; and 10^7 of them. */
    {67108864, 2, KLD_DTYPE_FP32, KLD_FORM_LOGITS, false},
    {134217728, 2, KLD_DTYPE_BF16, KLD_FORM_LOGITS, false},
    {10000000, 10, KLD_DTYPE_FP32, KLD_FORM_LOGITS, false},
    {10000000, 10, KLD_DTYPE_BF16, KLD_FORM_LOGITS, false},
    {2097152, 64, KLD_DTYPE_FP32, KLD_FORM_LOGITS, false},
    {4194304, 64, KLD_DTYPE_BF16, KLD_FORM_LOGITS, false},
    {1342177, 100, KLD_DTYPE_FP32, KLD_FORM_LOGITS, false},
    {2684354, 100, KLD_DTYPE_BF16, KLD_FORM_LOGITS, false},
    {524288, 256, KLD_DTYPE_FP32, KLD_FORM_LOGITS, false},
    {1048576, 256, KLD_DTYPE_BF16, KLD_FORM_LOGITS, false},
};

/* Of --classes: powers of 2, and vocabularies as they are. */
static const uint64_t lengths[] = {512,   1000,  1024,  2048,   4096,   8192,   16384, 32000,
                                   32768, 50257, 65536, 128256, 131072, 151936, 262144};
#define ELEMENTS ((uint64_t)1 << 28)

struct bench {
    const struct kld_backend *backend;
    struct kld_device *device;
    struct kld_stream *stream;
    double read_per_s, read_write_per_s;
    int runs;
    FILE *json;
    int results;
    char driver[64];
    pthread_mutex_t mutex;
    pthread_cond_t done;
    int running; /* jobs; mutex */
};

static void fail(const char *what, const struct kld_error *err) {
    fprintf(stderr, "kernels: %s: %s\n", what, err->text);
    exit(1);
}

/* ---- running one job --------------------------------------------------------------------------
 */

static void on_done(struct kld_job *job) {
    struct bench *bench = job->owner;
    pthread_mutex_lock(&bench->mutex);
    bench->running--;
    pthread_cond_signal(&bench->done);
    pthread_mutex_unlock(&bench->mutex);
}

/* One after the other on the stream, submitted at once. */
static void run(struct bench *bench, struct kld_job *jobs, int count) {
    bench->running = count;
    for (int i = 0; i < count; i++) {
        jobs[i].owner = bench;
        jobs[i].done = on_done;
        bench->backend->submit(bench->stream, &jobs[i]);
    }
    pthread_mutex_lock(&bench->mutex);
    while (bench->running)
        pthread_cond_wait(&bench->done, &bench->mutex);
    pthread_mutex_unlock(&bench->mutex);
    for (int i = 0; i < count; i++)
        if (jobs[i].status)
            fail("a job failed", &jobs[i].error);
}

/* What the device took for a job. It has another one to do while the host enqueues this one: else
 * the time between two of the host's calls would count. */
static double time_of(struct bench *bench, const struct kld_job *job, uint64_t *ret_bytes) {
    struct kld_job jobs[2] = {*job, *job};
    int count = strcmp(bench->backend->name, "cpu") == 0 ? 1 : 2;
    run(bench, jobs, count);
    *ret_bytes = jobs[0].bytes;
    return (double)jobs[count - 1].kernel_ns / 1e6;
}

/* ---- tensors ----------------------------------------------------------------------------------
 */

static float uniform(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (float)(*state >> 40) * 0x1p-24f;
}

/* probs: around 1 / C, within a factor of 3; the logarithmic forms: about normal, sigma 2. */
static float sample(const struct shape *shape, uint64_t *state) {
    if (shape->form == KLD_FORM_PROBS)
        return (0.5f + uniform(state)) / (float)shape->classes;
    float z = 0;
    for (int i = 0; i < 4; i++)
        z += uniform(state) - 0.5f;
    z *= 3.4641f;
    return shape->form == KLD_FORM_LOGITS ? z : z - logf((float)shape->classes) - 2.0f;
}

/* Of two sides with the same base: each row has one class with 0.1 to 0.999 of the mass, and the
 * sides differ by noise, sigma 0.4: KL is some 0.05. */
static float sample_alike(const struct shape *shape, uint64_t i, uint64_t *base, uint64_t *own) {
    uint64_t dice = (i / shape->classes + 1) * 0x9e3779b97f4a7c15u;
    float z = sample(shape, base), noise = 0.2f * sample(shape, own);
    if (i % shape->classes == (dice >> 20) % shape->classes) {
        float mass = 0.1f + 0.899f * (float)(dice >> 40) * 0x1p-24f;
        z = logf((float)shape->classes * mass / (1 - mass)) + 2;
    }
    return z + noise;
}

static void write_element(void *tile, uint64_t i, enum kld_dtype dtype, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    switch (dtype) {
    case KLD_DTYPE_FP64: ((double *)tile)[i] = x; break;
    case KLD_DTYPE_BF16: ((uint16_t *)tile)[i] = (uint16_t)((bits + 0x8000u) >> 16); break;
    case KLD_DTYPE_FP16: /* normal FP16 range or 0: enough for timing */
        ((uint16_t *)tile)[i] =
            fabsf(x) < 0x1p-14f
                ? 0
                : (uint16_t)((bits >> 16 & 0x8000u) | ((bits & 0x7fffffffu) - 0x38000000u) >> 13);
        break;
    default: ((float *)tile)[i] = x;
    }
}

static struct kld_memory *random_tensor(struct bench *bench, const struct shape *shape,
                                        uint64_t seed) {
    struct kld_error err;
    struct kld_memory *memory, *host;
    uint64_t bytes = shape->rows * shape->classes * kld_dtype_bytes(shape->dtype);
    uint64_t tile_bytes = bytes < TILE_BYTES ? bytes : TILE_BYTES;
    uint64_t base = 3935559000370003845u;
    void *tile = malloc(tile_bytes);
    if (!tile || bench->backend->memory_alloc(bench->device, bytes, &memory, &err))
        fail("no memory for a tensor", &err);
    for (uint64_t i = 0; i < tile_bytes / kld_dtype_bytes(shape->dtype); i++)
        write_element(tile, i, shape->dtype,
                      shape->alike ? sample_alike(shape, i, &base, &seed) : sample(shape, &seed));
    if (bench->backend->memory_wrap(bench->device, tile, tile_bytes, &host, &err))
        fail("wrapping memory", &err);
    for (uint64_t at = 0; at < bytes; at += tile_bytes) {
        struct kld_job job = {.kind = KLD_JOB_COPY};
        job.copy_from.memory = host;
        job.copy_to = (struct kld_place){memory, at};
        job.copy_bytes = bytes - at < tile_bytes ? bytes - at : tile_bytes;
        run(bench, &job, 1);
    }
    bench->backend->memory_free(host);
    free(tile);
    return memory;
}

/* ---- one measurement --------------------------------------------------------------------------
 */

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void make_job(const struct shape *shape, enum kld_divergence divergence,
                     struct kld_memory *const memory[3], struct kld_job *job) {
    const enum kld_slot slots[3] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS,
                                    KLD_SLOT_GRAD_PREDICTIONS};
    memset(job, 0, sizeof *job);
    kld_op_init(&job->op);
    job->op.divergence = divergence;
    job->op.predictions_form = job->op.targets_form = shape->form;
    job->op.rank = 2;
    job->op.shape[0] = shape->rows;
    job->op.shape[1] = shape->classes;
    for (int i = 0; i < 3; i++) {
        if (!memory[i])
            continue;
        job->op.tensor[slots[i]].dtype = shape->dtype;
        job->op.tensor[slots[i]].region = (uint64_t)i + 1;
        job->place[slots[i]].memory = memory[i];
    }
    struct kld_error err;
    if (kld_op_check(&job->op, &job->geometry, &err))
        fail("the operator", &err);
}

static void report(struct bench *bench, const struct shape *shape, const char *divergence,
                   bool gradient, double ms, double low_ms, uint64_t bytes) {
    double ceiling = gradient ? bench->read_write_per_s : bench->read_per_s;
    double floor_ms = (double)bytes / ceiling * 1e3;
    printf("%-10s %-8s %-4s %8" PRIu64 " x %-7" PRIu64
           " %-9s %-5s %8.4f ms  %7.1f GB/s  %5.3f of ceiling\n",
           divergence, kld_form_name(shape->form), kld_dtype_name(shape->dtype), shape->rows,
           shape->classes, gradient ? "loss+grad" : "loss", shape->alike ? "alike" : "", ms,
           (double)bytes / ms / 1e6, floor_ms / ms);
    fflush(stdout);
    if (!bench->json)
        return;
    fprintf(
        bench->json,
        "%s\n    {\"divergence\": \"%s\", \"form\": \"%s\", \"dtype\": \"%s\", \"rows\": %" PRIu64
        ", \"classes\": %" PRIu64 ", \"gradient\": %s, \"alike\": %s, \"bytes\": %" PRIu64
        ", \"ms\": %.5f, \"ms_min\": %.5f, \"fraction_of_ceiling\": %.4f}",
        bench->results++ ? "," : "", divergence, kld_form_name(shape->form),
        kld_dtype_name(shape->dtype), shape->rows, shape->classes, gradient ? "true" : "false",
        shape->alike ? "true" : "false", bytes, ms, low_ms, floor_ms / ms);
}

static void measure(struct bench *bench, const struct shape *shape) {
    struct kld_memory *memory[3] = {random_tensor(bench, shape, 88172645463325252u),
                                    random_tensor(bench, shape, 2463534242u), NULL};
    struct kld_memory *gradient;
    struct kld_error err;
    if (bench->backend->memory_alloc(bench->device, memory[0]->bytes, &gradient, &err))
        fail("no memory for the gradient", &err);
    static const enum kld_divergence divergences[] = {KLD_DIVERGENCE_FORWARD_KL,
                                                      KLD_DIVERGENCE_REVERSE_KL, KLD_DIVERGENCE_JS};
    enum {
        VARIANTS = 2 * sizeof divergences / sizeof divergences[0]
    }; /* with the gradient, and not */
    static double ms[VARIANTS][RUNS_MAX];
    uint64_t bytes[VARIANTS] = {0};
    for (int i = -2; i < bench->runs; i++) { /* two rounds to warm up */
        for (int variant = 0; variant < VARIANTS; variant++) {
            struct kld_job job;
            memory[2] = variant & 1 ? gradient : NULL;
            make_job(shape, divergences[variant / 2], memory, &job);
            double took = time_of(bench, &job, &bytes[variant]);
            if (i >= 0)
                ms[variant][i] = took;
        }
    }
    for (int variant = 0; variant < VARIANTS; variant++) {
        qsort(ms[variant], (size_t)bench->runs, sizeof(double), by_value);
        report(bench, shape, kld_divergence_name(divergences[variant / 2]), variant & 1,
               ms[variant][bench->runs / 2], ms[variant][0], bytes[variant]);
    }
    bench->backend->memory_free(gradient);
    bench->backend->memory_free(memory[0]);
    bench->backend->memory_free(memory[1]);
}

/* ---- program ----------------------------------------------------------------------------------
 */

static void find_driver(char *text, size_t size) {
    snprintf(text, size, "none");
    FILE *file = fopen("/sys/module/nvidia/version", "r");
    if (!file)
        return;
    if (fgets(text, (int)size, file))
        text[strcspn(text, "\n")] = 0;
    fclose(file);
}

struct options {
    const char *backend, *json;
    uint32_t device;
    int runs;
    uint64_t ceiling_mib;
    struct shape shape[CASES_MAX];
    int shapes;
};

static bool parse_form(const char *text, enum kld_form *ret_form) {
    for (uint32_t form = 0; form <= KLD_FORM_LOGITS; form++) {
        if (strcmp(kld_form_name(form), text) == 0) {
            *ret_form = (enum kld_form)form;
            return true;
        }
    }
    return false;
}

static void add_lengths(struct options *options) {
    static const enum kld_dtype dtypes[] = {KLD_DTYPE_BF16, KLD_DTYPE_FP32};
    options->shapes = 0;
    for (size_t i = 0; i < 2 * sizeof lengths / sizeof lengths[0]; i++) {
        uint64_t classes = lengths[i / 2];
        options->shape[options->shapes++] =
            (struct shape){ELEMENTS / classes, classes, dtypes[i % 2], KLD_FORM_LOGITS, false};
    }
}

/* False: something is not understood. */
static bool parse(int argc, char **argv, struct options *ret_options) {
    static const struct option known[] = {{"backend", 1, NULL, 'b'}, {"device", 1, NULL, 'd'},
                                          {"runs", 1, NULL, 'r'},    {"json", 1, NULL, 'j'},
                                          {"shape", 1, NULL, 's'},   {"dtype", 1, NULL, 't'},
                                          {"form", 1, NULL, 'f'},    {"ceiling-mib", 1, NULL, 'c'},
                                          {"classes", 0, NULL, 'l'}, {"alike", 0, NULL, 'a'},
                                          {NULL, 0, NULL, 0}};
    struct options *o = ret_options;
    int option;
    while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
        struct shape *last = o->shapes ? &o->shape[o->shapes - 1] : NULL;
        switch (option) {
        case 'b': o->backend = optarg; break;
        case 'd': o->device = (uint32_t)strtoul(optarg, NULL, 10); break;
        case 'r': o->runs = atoi(optarg); break;
        case 'j': o->json = optarg; break;
        case 'c': o->ceiling_mib = strtoull(optarg, NULL, 10); break;
        case 'l': add_lengths(o); break;
        case 's':
            if (o->shapes == CASES_MAX)
                return false;
            last = &o->shape[o->shapes++];
            *last = (struct shape){0, 0, KLD_DTYPE_FP32, KLD_FORM_PROBS, false};
            if (sscanf(optarg, "%" SCNu64 "x%" SCNu64, &last->rows, &last->classes) != 2 ||
                !last->rows || !last->classes)
                return false;
            break;
        case 't':
            if (!last || !kld_dtype_from_name(optarg, &last->dtype) ||
                !kld_dtype_is_float(last->dtype))
                return false;
            break;
        case 'a':
            if (!last)
                return false;
            last->alike = true;
            break;
        case 'f':
            if (!last || !parse_form(optarg, &last->form))
                return false;
            break;
        default: return false;
        }
    }
    return optind == argc && o->runs >= 1 && o->runs <= RUNS_MAX && o->ceiling_mib >= 1;
}

static void open_bench(struct bench *bench, const struct options *options) {
    struct kld_error err;
    if (kld_backend_find(options->backend, &bench->backend, &err))
        fail("finding the back end", &err);
    struct kld_device_options device = {.device = options->device, .spin_us = 1000};
    if (bench->backend->device_open(&device, &bench->device, &err) ||
        bench->backend->stream_open(bench->device, NULL, &bench->stream, &err) ||
        bench->backend->measure_ceiling(bench->device, options->ceiling_mib << 20,
                                        &bench->read_per_s, &bench->read_write_per_s, &err))
        fail("opening the device", &err);
    find_driver(bench->driver, sizeof bench->driver);
    printf("%s, %s, driver %s, commit %s\nceilings: read %.1f GB/s, read and write %.1f GB/s\n",
           bench->backend->name, bench->device->info.name, bench->driver, KLD_COMMIT,
           bench->read_per_s / 1e9, bench->read_write_per_s / 1e9);
    if (options->json && !(bench->json = fopen(options->json, "w"))) {
        perror(options->json);
        exit(1);
    }
    if (bench->json)
        fprintf(bench->json,
                "{\n  \"commit\": \"%s\",\n  \"backend\": \"%s\",\n  \"card\": \"%s\",\n"
                "  \"driver\": \"%s\",\n  \"runs\": %d,\n  \"read_bytes_per_s\": %.4g,\n"
                "  \"read_write_bytes_per_s\": %.4g,\n  \"results\": [",
                KLD_COMMIT, bench->backend->name, bench->device->info.name, bench->driver,
                options->runs, bench->read_per_s, bench->read_write_per_s);
}

int main(int argc, char **argv) {
    struct options options = {.backend = "auto", .runs = 20, .ceiling_mib = 1024};
    if (!parse(argc, argv, &options)) {
        fprintf(stderr,
                "usage: kernels [--backend auto|cpu|cuda] [--device N] [--runs N] [--json FILE]\n"
                "               [--ceiling-mib N] [--classes | --shape NxC [--dtype %s] [--form "
                "%s]\n"
                "               [--alike]...]\n",
                kld_dtype_list(), kld_form_list());
        return 2;
    }
    static struct bench bench = {.mutex = PTHREAD_MUTEX_INITIALIZER,
                                 .done = PTHREAD_COND_INITIALIZER};
    bench.runs = options.runs;
    open_bench(&bench, &options);
    const struct shape *shapes = options.shapes ? options.shape : standard;
    int count = options.shapes ? options.shapes : (int)(sizeof standard / sizeof standard[0]);
    for (int i = 0; i < count; i++)
        measure(&bench, &shapes[i]);
    if (bench.json) {
        fprintf(bench.json, "\n  ]\n}\n");
        fclose(bench.json);
    }
    bench.backend->stream_close(bench.stream);
    bench.backend->device_close(bench.device);
    return 0;
}
