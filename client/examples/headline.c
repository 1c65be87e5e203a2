/* headline.c - the headline job: predictions = softmax(4 rand), targets = softmax(rand), FP32,
 * 16384 x 16384, forward_kl, batchmean, with and without gradient; through shared memory and, where
 * the server has a GPU, through CUDA IPC handles too.
 *
 *   headline UNIX-URL [ROWS [CLASSES]]
 *
 * Prints time, GB/s and the share of what this machine's memory gives (measured here). Checks the
 * loss against FP64 and the gradient of every 64th row; exit status 1 if one is off. Uses libkld,
 * and for the GPU rows the NVIDIA driver, looked up at run time. */
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <kld/kld.h>

#define RUNS 5
#define THREADS_MAX 64
#define CHECK_EVERY 64 /* rows */
#define ULPS_MAX 4.0
#define RELATIVE_MAX 1e-6

enum { PREDICTIONS, TARGETS, GRADIENT, TENSORS };

struct job {
    struct kld_connection *connection;
    uint64_t rows, classes, bytes; /* bytes of one tensor */
    struct kld_region *region[TENSORS];
    double expected;                  /* FP64 */
    double ceiling_read, ceiling_all; /* bytes a second; 0: not measured */
    int failed;
};

/* ---- the tensors -------------------------------------------------------------------------------
 */

struct slice {
    struct job *job;
    uint64_t begin, end; /* rows */
    double sum;          /* of the FP64 terms */
    double ulps;         /* worst gradient */
};

static float next_random(uint64_t *state) { /* xorshift64*, the upper 24 bits */
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (float)((*state * UINT64_C(2685821657736338717)) >> 40) * 0x1p-24f;
}

static void softmax_of_random(float *row, uint64_t classes, float factor, uint64_t seed) {
    uint64_t state = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    double sum = 0;
    for (uint64_t i = 0; i < classes; i++) {
        row[i] = expf(factor * next_random(&state));
        sum += (double)row[i];
    }
    for (uint64_t i = 0; i < classes; i++)
        row[i] = (float)((double)row[i] / sum);
}

static float *row_of(struct job *job, int tensor, uint64_t row) {
    return (float *)kld_region_data(job->region[tensor]) + row * job->classes;
}

static void *fill_slice(void *user) {
    struct slice *slice = user;
    for (uint64_t row = slice->begin; row < slice->end; row++) {
        float *q = row_of(slice->job, PREDICTIONS, row), *p = row_of(slice->job, TARGETS, row);
        softmax_of_random(q, slice->job->classes, 4, 2 * row + 1);
        softmax_of_random(p, slice->job->classes, 1, 2 * row + 2);
        for (uint64_t i = 0; i < slice->job->classes; i++)
            slice->sum += (double)p[i] * log((double)p[i] / (double)q[i]);
    }
    return NULL;
}

static void *check_slice(void *user) {
    struct slice *slice = user;
    for (uint64_t row = slice->begin; row < slice->end; row++) {
        if (row % CHECK_EVERY != 0)
            continue;
        const float *q = row_of(slice->job, PREDICTIONS, row);
        const float *p = row_of(slice->job, TARGETS, row), *g = row_of(slice->job, GRADIENT, row);
        for (uint64_t i = 0; i < slice->job->classes; i++) {
            float truth = (float)(-(double)p[i] / (double)q[i] / (double)slice->job->rows);
            float step = nextafterf(fabsf(truth), INFINITY) - fabsf(truth);
            double ulps = fabs((double)g[i] - (double)truth) / (double)step;
            if (!(ulps <= slice->ulps))
                slice->ulps = ulps;
        }
    }
    return NULL;
}

/* Runs function over all rows on every CPU. The sums are added in the order of the slices. */
static struct slice over_rows(struct job *job, void *(*function)(void *)) {
    struct slice slice[THREADS_MAX], all = {.job = job};
    pthread_t thread[THREADS_MAX];
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t count = cpus < 1 ? 1 : cpus > THREADS_MAX ? THREADS_MAX : (uint64_t)cpus;
    for (uint64_t i = 0; i < count; i++) {
        slice[i] = (struct slice){
            .job = job, .begin = job->rows * i / count, .end = job->rows * (i + 1) / count};
        if (i > 0 && pthread_create(&thread[i], NULL, function, &slice[i]) != 0) {
            fprintf(stderr, "headline: cannot start a thread\n");
            exit(1);
        }
    }
    function(&slice[0]);
    for (uint64_t i = 0; i < count; i++) {
        if (i > 0)
            pthread_join(thread[i], NULL);
        all.sum += slice[i].sum;
        if (!(slice[i].ulps <= all.ulps))
            all.ulps = slice[i].ulps;
    }
    return all;
}

/* ---- the requests ------------------------------------------------------------------------------
 */

static int by_value(const void *a, const void *b) {
    double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

/* Median of RUNS after one for warming up; prints a line of the table. */
static int run(struct job *job, const char *way, struct kld_region *const *region, int gradient,
               double *ret_loss) {
    struct kld_request request;
    struct kld_result result;
    struct kld_error err = {.status = KLD_OK};
    double ms[RUNS];
    memset(&request, 0, sizeof request);
    kld_op_init(&request.op); /* forward_kl, batchmean, probabilities on both sides */
    request.op.rank = 2;
    request.op.shape[0] = job->rows;
    request.op.shape[1] = job->classes;
    const enum kld_slot slots[] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS,
                                   KLD_SLOT_GRAD_PREDICTIONS};
    for (int i = 0; i < 2 + gradient; i++) {
        request.op.tensor[slots[i]].dtype = KLD_DTYPE_FP32;
        request.bytes[slots[i]].region = region[i];
    }
    for (int i = -1; i < RUNS; i++) {
        if (kld_run(job->connection, &request, &result, &err) != KLD_OK) {
            fprintf(stderr, "headline: %s: %s\n", way, err.text);
            return job->failed = 1;
        }
        if (i >= 0)
            ms[i] = (double)result.total_ns / 1e6;
    }
    qsort(ms, RUNS, sizeof ms[0], by_value);
    double best = ms[RUNS / 2], rate = (double)job->bytes * (2 + gradient) / (best / 1e3);
    double ceiling = gradient ? job->ceiling_all : job->ceiling_read;
    double relative = fabs(result.loss - job->expected) / job->expected;
    int wrong = !(relative <= RELATIVE_MAX);
    printf("  %-16s %-16s %10.3f ms %9.1f GB/s", way, gradient ? "loss + gradient" : "loss", best,
           rate / 1e9);
    if (ceiling > 0)
        printf("   %4.0f %%", 100 * rate / ceiling);
    printf("   %.9f (off FP64 %.1e)%s\n", result.loss, relative, wrong ? " WRONG" : "");
    job->failed |= wrong;
    *ret_loss = result.loss;
    return wrong;
}

static void check_gradient(struct job *job) {
    double ulps = over_rows(job, check_slice).ulps;
    int wrong = !(ulps <= ULPS_MAX);
    printf("  gradient of every %dth row against FP64: at most %.0f ulp%s\n", CHECK_EVERY, ulps,
           wrong ? " WRONG" : "");
    job->failed |= wrong;
}

/* ---- tensors in GPU memory, by handle
 * ------------------------------------------------------------ */

struct driver {
    int (*init)(unsigned);
    int (*device_get)(int *, int);
    int (*device_uuid)(unsigned char *, int);
    int (*context_retain)(void **, int);
    int (*context_set)(void *);
    int (*alloc)(unsigned long long *, size_t);
    int (*to_device)(unsigned long long, const void *, size_t);
    int (*to_host)(void *, unsigned long long, size_t);
    int (*handle)(unsigned char (*)[64], unsigned long long);
    int (*release)(unsigned long long);
};

static int driver_open(struct driver *driver) {
    static const char *const names[] = {"cuInit",
                                        "cuDeviceGet",
                                        "cuDeviceGetUuid",
                                        "cuDevicePrimaryCtxRetain",
                                        "cuCtxSetCurrent",
                                        "cuMemAlloc_v2",
                                        "cuMemcpyHtoD_v2",
                                        "cuMemcpyDtoH_v2",
                                        "cuIpcGetMemHandle",
                                        "cuMemFree_v2"};
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        void *function = library ? dlsym(library, names[i]) : NULL;
        if (!function)
            return 1;
        memcpy((void **)driver + i, &function, sizeof function); /* the order of the struct */
    }
    return 0;
}

/* The driver passes a handle's struct by pointer to its result and reads it by value nowhere here.
 */
static int run_on_gpu(struct job *job) {
    struct driver cuda;
    int device = 0, bad = driver_open(&cuda);
    unsigned char uuid[16], handle[64];
    void *context = NULL;
    unsigned long long memory[TENSORS] = {0};
    struct kld_region *region[TENSORS] = {NULL};
    struct kld_error err = {.status = KLD_OK};
    bad = bad || cuda.init(0) || cuda.device_get(&device, 0) || cuda.device_uuid(uuid, device) ||
          cuda.context_retain(&context, device) || cuda.context_set(context);
    for (int i = 0; i < TENSORS && !bad; i++) {
        bad = cuda.alloc(&memory[i], job->bytes) || cuda.handle(&handle, memory[i]);
        if (!bad && i != GRADIENT)
            bad = cuda.to_device(memory[i], kld_region_data(job->region[i]), job->bytes);
        if (!bad)
            bad = kld_region_import_cuda_ipc(job->connection, handle, uuid, job->bytes, 0,
                                             job->bytes, &region[i], &err) != KLD_OK;
    }
    if (bad) {
        fprintf(stderr, "headline: GPU memory: %s\n", err.text[0] ? err.text : "the driver failed");
        return job->failed = 1;
    }
    double loss, again, host_loss;
    unsigned char *copy = malloc(job->bytes);
    bad = run(job, "CUDA handle", region, 0, &loss) || run(job, "CUDA handle", region, 1, &again) ||
          run(job, "shared memory", job->region, 1, &host_loss);
    /* Where the tensors lie must not change a bit. */
    if (!bad && copy) {
        bad = loss != again || loss != host_loss ||
              cuda.to_host(copy, memory[GRADIENT], job->bytes) ||
              memcmp(copy, kld_region_data(job->region[GRADIENT]), job->bytes) != 0;
        printf("  handle and shared memory: %s\n", bad ? "DIFFERENT" : "bit-identical");
    }
    free(copy);
    for (int i = 0; i < TENSORS; i++) {
        kld_region_drop(region[i]);
        cuda.release(memory[i]);
    }
    return job->failed |= bad;
}

/* ---- setting up
 * ---------------------------------------------------------------------------------- */

/* What this process may still take, bytes: of the machine and of its container. */
static uint64_t memory_available(void) {
    uint64_t machine = UINT64_MAX, limit = UINT64_MAX, used = 0;
    unsigned long long number;
    char line[128];
    FILE *file = fopen("/proc/meminfo", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %llu", &number) == 1)
            machine = (uint64_t)number << 10;
    if (file)
        fclose(file);
    static const char *const names[] = {"/sys/fs/cgroup/memory.max",
                                        "/sys/fs/cgroup/memory.current"};
    uint64_t *const values[] = {&limit, &used};
    for (int i = 0; i < 2; i++) {
        file = fopen(names[i], "r");
        if (file && fscanf(file, "%llu", &number) == 1)
            *values[i] = number;
        if (file)
            fclose(file);
    }
    uint64_t container = limit == UINT64_MAX ? UINT64_MAX : limit > used ? limit - used : 0;
    return machine < container ? machine : container;
}

/* This machine's own ceiling, before the tensors take the memory. */
static void measure(struct job *job, const char *backend) {
    char url[32];
    struct kld_connection *local = NULL;
    struct kld_error err = {.status = KLD_OK};
    snprintf(url, sizeof url, "local:%s", backend);
    if (kld_connect(url, NULL, &local, &err) != KLD_OK ||
        kld_measure_ceiling(local, job->bytes, &job->ceiling_read, &job->ceiling_all, &err) !=
            KLD_OK)
        printf("  (no ceiling: %s)\n", err.text);
    kld_close(local);
}

int main(int argc, char **argv) {
    struct job job = {.rows = 16384, .classes = 16384};
    struct kld_error err = {.status = KLD_OK};
    struct kld_server_info info;
    if (argc < 2 || argc > 4) {
        fprintf(stderr, "usage: headline UNIX-URL [ROWS [CLASSES]]\n");
        return 2;
    }
    job.rows = argc > 2 ? strtoull(argv[2], NULL, 10) : job.rows;
    job.classes = argc > 3 ? strtoull(argv[3], NULL, 10) : job.classes;
    uint64_t asked = job.rows, available = memory_available();
    while (job.rows > 1 && job.rows * job.classes * 16 > available) /* 3 tensors and room */
        job.rows /= 2;
    job.bytes = job.rows * job.classes * sizeof(float);
    if (kld_connect(argv[1], NULL, &job.connection, &err) != KLD_OK ||
        kld_info(job.connection, &info, &err) != KLD_OK) {
        fprintf(stderr, "headline: %s\n", err.text);
        return 1;
    }
    printf("Headline: softmax(4 rand), softmax(rand), %llu x %llu, FP32, on %s (%s)\n",
           (unsigned long long)job.rows, (unsigned long long)job.classes, info.backend,
           info.device);
    if (job.rows != asked)
        printf("  %llu rows instead of %llu: only %.1f GiB of memory are free\n",
               (unsigned long long)job.rows, (unsigned long long)asked,
               (double)available / (double)(1u << 30));
    measure(&job, info.backend);
    if (job.ceiling_read > 0)
        printf("  memory ceiling: %.1f GB/s reading, %.1f GB/s reading two and writing one\n",
               job.ceiling_read / 1e9, job.ceiling_all / 1e9);
    for (int i = 0; i < TENSORS; i++)
        if (kld_region_create(job.connection, job.bytes, &job.region[i], &err) != KLD_OK) {
            fprintf(stderr, "headline: %s\n", err.text);
            return 1;
        }
    job.expected = over_rows(&job, fill_slice).sum / (double)job.rows;

    double loss = NAN, again = NAN;
    printf("  over             what                   time        speed   ceiling   loss\n");
    run(&job, "shared memory", job.region, 0, &loss);
    if (run(&job, "shared memory", job.region, 1, &again) == 0 && loss != again) {
        printf("  the loss with gradient DIFFERS from the one without\n");
        job.failed = 1;
    }
    check_gradient(&job);
    if (strcmp(info.backend, "cuda") == 0)
        run_on_gpu(&job);
    for (int i = 0; i < TENSORS; i++)
        kld_region_drop(job.region[i]);
    kld_close(job.connection);
    return job.failed;
}
