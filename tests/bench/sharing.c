/* sharing.c - what it costs to compute in another process: one run, printed as JSON.
 *
 *   sharing UNIX-URL [--seconds S] [--quick] [--only latency|rates|beside] [--streams N]
 *
 * On the GPU of a running server (with MPS, if both are its clients): a small request (two tensors
 * of 64 x 512 FP32) and the headline job (16384 x 16384 FP32, loss alone and with gradient), in
 * this process (local:cuda), through the server with a client that is idle between requests, and
 * with one that launches work of its own; then small requests a second of 1, 4 and 16 clients,
 * alone and beside one that sends the headline job in a loop, and how evenly they are served. One
 * client has its requests on four streams, each of several on one of its own; --streams says
 * otherwise. Every
 * client is a process of its own, with a context of its own. At the end, for each aim of the
 * project that it measured, whether it was met. Uses the NVIDIA driver, looked up at run time. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/kld.h"

#define CLIENTS_MAX 17
#define SAMPLES_MAX 20000
#define IN_FLIGHT 4    /* of each client, where rates are measured */
#define SPINNING_MAX 5 /* processes that spin; more of them sleep */

struct gpu {
    int (*init)(unsigned);
    int (*device_get)(int *, int);
    int (*device_uuid)(unsigned char *, int);
    int (*context_retain)(void **, int);
    int (*context_set)(void *);
    int (*alloc)(unsigned long long *, size_t);
    int (*set_words)(unsigned long long, unsigned, size_t);
    int (*handle)(unsigned char (*)[64], unsigned long long);
    int (*set_words_later)(unsigned long long, unsigned, size_t, void *);
    int (*attribute)(int *, int, int);
};
static const char *const names[] = {
    "cuInit",           "cuDeviceGet",         "cuDeviceGetUuid", "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",  "cuMemAlloc_v2",       "cuMemsetD32_v2",  "cuIpcGetMemHandle",
    "cuMemsetD32Async", "cuDeviceGetAttribute"};
#define MPS_ENABLED 133 /* CU_DEVICE_ATTRIBUTE_MPS_ENABLED */

/* A process: its connection, its tensors, one request over them. */
struct client {
    struct gpu gpu;
    struct kld_connection *connection;
    struct kld_request request;
    unsigned long long scratch; /* for work of its own */
    int mps;
    uint64_t answers, until_ns;
    uint32_t streams; /* that its requests take in turn */
};

/* Of one measurement, in memory that parent and children share. */
struct result {
    int failed, mps;
    uint32_t count;
    double us[SAMPLES_MAX], queue_us[SAMPLES_MAX], kernel_us[SAMPLES_MAX];
    double per_s;
};
struct board {
    volatile int ready, go;
    struct result result[CLIENTS_MAX];
};

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int fail(const char *what, const struct kld_error *error) {
    fprintf(stderr, "sharing: %s: %s\n", what, error ? error->text : "the driver failed");
    return 1;
}

static int gpu_open(struct client *client, unsigned char uuid[16]) {
    struct gpu *gpu = &client->gpu;
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context = NULL;
    int device = 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        void *function = library ? dlsym(library, names[i]) : NULL;
        if (!function)
            return 1;
        memcpy((void **)gpu + i, &function, sizeof function);
    }
    if (gpu->init(0) || gpu->device_get(&device, 0) || gpu->device_uuid(uuid, device) ||
        gpu->context_retain(&context, device) || gpu->context_set(context))
        return 1;
    if (gpu->attribute(&client->mps, MPS_ENABLED, device))
        client->mps = 0; /* an older driver */
    return gpu->alloc(&client->scratch, 8 << 20);
}

/* Constant rows: 1 / classes for targets, the same for predictions. */
static int client_open(struct client *client, const char *url, uint64_t rows, uint64_t classes,
                       int gradient) {
    struct kld_error error = {.status = KLD_OK};
    unsigned char uuid[16], handle[64];
    memset(client, 0, sizeof *client);
    if (gpu_open(client, uuid))
        return fail("opening the GPU", NULL);
    if (kld_connect(url, NULL, &client->connection, &error))
        return fail("connecting", &error);
    struct kld_request *request = &client->request;
    kld_op_init(&request->op);
    request->op.rank = 2;
    request->op.shape[0] = rows;
    request->op.shape[1] = classes;
    const enum kld_slot slots[] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS,
                                   KLD_SLOT_GRAD_PREDICTIONS};
    uint64_t bytes = rows * classes * 4;
    float value = 1.0f / (float)classes;
    unsigned word;
    memcpy(&word, &value, sizeof word);
    for (int i = 0; i < 2 + gradient; i++) {
        unsigned long long at;
        uint64_t base = bytes < (4u << 20) ? 4u << 20 : bytes;
        if (client->gpu.alloc(&at, base) || client->gpu.set_words(at, word, bytes / 4) ||
            client->gpu.handle(&handle, at))
            return fail("taking GPU memory", NULL);
        request->op.tensor[slots[i]].dtype = KLD_DTYPE_FP32;
        if (strncmp(url, "local:", 6) == 0)
            request->bytes[slots[i]].data = (void *)(uintptr_t)at;
        else if (kld_region_import_cuda_ipc(client->connection, handle, uuid, base, 0, bytes,
                                            &request->bytes[slots[i]].region, &error))
            return fail("registering GPU memory", &error);
    }
    return 0;
}

/* ---- One client, one request at a time --------------------------------------------------------
 */

static int measure(struct client *client, struct result *result, uint32_t count, int busy) {
    struct kld_error error;
    struct kld_result answer;
    for (uint32_t i = 0; i < count + 10; i++) {
        if (busy && client->gpu.set_words_later(client->scratch, i, 1 << 20, NULL))
            return fail("launching work of its own", NULL);
        uint64_t start = now_ns();
        if (kld_run(client->connection, &client->request, &answer, &error))
            return fail("computing", &error);
        if (i < 10)
            continue;
        result->us[i - 10] = (double)(now_ns() - start) / 1e3;
        result->queue_us[i - 10] = (double)answer.queue_ns / 1e3;
        result->kernel_us[i - 10] = (double)answer.kernel_ns / 1e3;
    }
    result->count = count;
    return 0;
}

/* ---- Many clients -----------------------------------------------------------------------------
 */

static void on_end(void *user, enum kld_status status, const struct kld_result *answer,
                   const struct kld_error *error) {
    struct client *client = user;
    if (status) {
        fail("computing", error);
        exit(1);
    }
    client->answers++;
    client->request.stream = (client->request.stream + 1) % client->streams;
    if (now_ns() < client->until_ns &&
        kld_submit(client->connection, &client->request, on_end, client, NULL, NULL))
        exit(1);
}

/* spins: between answers, as kld_run() does; else asleep, as many processes have to be. */
static int flood(struct client *client, struct board *board, struct result *result, double seconds,
                 int in_flight, int spins) {
    struct kld_error error;
    if (kld_run(client->connection, &client->request, NULL, &error))
        return fail("computing", &error);
    __atomic_add_fetch(&board->ready, 1, __ATOMIC_SEQ_CST);
    while (!board->go)
        usleep(100);
    uint64_t start = now_ns();
    client->until_ns = start + (uint64_t)(seconds * 1e9);
    for (int i = 0; i < in_flight; i++) {
        client->request.stream = (uint32_t)i % client->streams;
        if (kld_submit(client->connection, &client->request, on_end, client, NULL, &error))
            return fail("submitting", &error);
    }
    while (now_ns() < client->until_ns)
        if (kld_process(client->connection, spins ? 0 : -1, &error))
            return fail("waiting", &error);
    result->per_s = (double)client->answers / ((double)(now_ns() - start) / 1e9);
    return 0;
}

/* ---- Experiments ------------------------------------------------------------------------------
 */

static const struct {
    uint64_t rows, classes;
    int gradient;
    uint32_t count;
} jobs[] = {{64, 512, 0, 5000}, {16384, 16384, 0, 200}, {16384, 16384, 1, 200}};
enum { SMALL, HEADLINE, HEADLINE_GRADIENT };

static struct board *board;

/* What is aimed at, and what was measured for it. */
#define TARGETS_MAX 32
static struct {
    char name[64];
    double aim, measured;
    int at_most;
} targets[TARGETS_MAX];
static int targets_count;

static void aim(const char *name, const char *what, int at_most, double limit, double measured) {
    if (targets_count == TARGETS_MAX)
        return;
    snprintf(targets[targets_count].name, sizeof targets[0].name, "%.31s_%.31s", name, what);
    targets[targets_count].aim = limit;
    targets[targets_count].at_most = at_most;
    targets[targets_count++].measured = measured;
}

static void print_targets(void) {
    printf(",\n \"targets\":{");
    for (int i = 0; i < targets_count; i++) {
        double limit = targets[i].aim, measured = targets[i].measured;
        int met = targets[i].at_most ? measured <= limit : measured >= limit;
        printf("%s\n  \"%s\":{\"aim\":\"%s %g\",\"measured\":%.5g,\"met\":%s}", i ? "," : "",
               targets[i].name, targets[i].at_most ? "at most" : "at least", limit, measured,
               met ? "true" : "false");
    }
    printf("}");
}

static pid_t start_measuring(const char *url, int job, int busy, uint32_t count) {
    pid_t pid = fork();
    if (pid)
        return pid;
    static struct client client;
    struct result *result = &board->result[0];
    result->failed =
        client_open(&client, url, jobs[job].rows, jobs[job].classes, jobs[job].gradient) ||
        measure(&client, result, count, busy);
    result->mps = client.mps;
    kld_close(client.connection);
    _exit(result->failed);
}

static int ended_well(pid_t pid) {
    int status = 1;
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double percentile(double *values, uint32_t count, double share) {
    qsort(values, count, sizeof *values, by_value);
    uint32_t at = (uint32_t)((double)count * share);
    return count ? values[at < count ? at : count - 1] : 0;
}

/* over_us_max: what may be added to the kernel's time; 0: nothing is aimed at. */
static int latency(const char *name, const char *url, int job, int busy, uint32_t divide,
                   double over_us_max) {
    memset(board, 0, sizeof *board);
    if (!ended_well(start_measuring(url, job, busy, jobs[job].count / divide)))
        return 1;
    struct result *r = &board->result[0];
    double over = percentile(r->us, r->count, 0.5) - percentile(r->kernel_us, r->count, 0.5);
    if (over_us_max > 0 && (!busy || r->mps))
        aim(name, "over_kernel_us", 1, over_us_max, over);
    printf(",\n \"%s\":{\"us_p50\":%.1f,\"us_p99\":%.1f,\"us_min\":%.1f,\"queue_us_p50\":%.1f,"
           "\"kernel_us_p50\":%.1f,\"over_kernel_us_p50\":%.1f}",
           name, percentile(r->us, r->count, 0.5), percentile(r->us, r->count, 0.99),
           percentile(r->us, r->count, 0), percentile(r->queue_us, r->count, 0.5),
           percentile(r->kernel_us, r->count, 0.5), over);
    fflush(stdout);
    return 0;
}

static pid_t start_flooding(const char *url, int index, int job, double seconds, int spins,
                            uint32_t streams) {
    pid_t pid = fork();
    if (pid)
        return pid;
    static struct client client;
    struct result *result = &board->result[index];
    result->failed =
        client_open(&client, url, jobs[job].rows, jobs[job].classes, jobs[job].gradient);
    client.streams = streams;
    if (!result->failed)
        result->failed =
            flood(&client, board, result, seconds, job == SMALL ? IN_FLIGHT : 2, spins);
    if (result->failed)
        __atomic_add_fetch(&board->ready, 1, __ATOMIC_SEQ_CST);
    _exit(result->failed);
}

/* beside: and one more that sends the headline job. streams: of a client with small ones. */
static int rates(const char *url, int clients, int beside, double seconds, uint32_t streams) {
    pid_t pid[CLIENTS_MAX];
    int failed = 0, count = clients + beside;
    memset(board, 0, sizeof *board);
    for (int i = 0; i < count; i++)
        pid[i] = start_flooding(url, i, i < clients ? SMALL : HEADLINE, seconds,
                                count <= SPINNING_MAX, i < clients ? streams : 1);
    while (board->ready < count)
        usleep(1000);
    board->go = 1;
    double sum = 0, most = 0, least = 1e30;
    for (int i = 0; i < count; i++)
        failed |= !ended_well(pid[i]);
    for (int i = 0; i < clients; i++) {
        double rate = board->result[i].per_s;
        sum += rate;
        most = rate > most ? rate : most;
        least = rate < least ? rate : least;
    }
    char name[32];
    snprintf(name, sizeof name, "clients_%d%s", clients, beside ? "_beside_headline" : "");
    aim(name, "per_s", 0, 50000, sum);
    if (beside && clients > 1)
        aim(name, "most_to_least", 1, 1.5, least > 0 ? most / least : 1e9);
    printf(",\n \"%s\":{\"streams\":%u,\"clients_spin\":%s,\"per_s\":%.0f,\"most_per_s\":%.0f,"
           "\"least_per_s\":%.0f,\"most_to_least\":%.3f,\"headline_per_s\":%.1f}",
           name, streams, count <= SPINNING_MAX ? "true" : "false", sum, most, least,
           least > 0 ? most / least : 0, beside ? board->result[clients].per_s : 0);
    fflush(stdout);
    return failed;
}

static int latencies(const char *url, uint32_t divide) {
    const char *local = "local:cuda";
    int failed = 0;
    failed |= latency("small_in_process", local, SMALL, 0, divide, 0);
    failed |= latency("small_client_idle", url, SMALL, 0, divide, 0);
    failed |= latency("small_client_busy", url, SMALL, 1, divide, 0);
    printf(",\n \"mps\":%s", board->result[0].mps ? "true" : "false");
    failed |= latency("headline_in_process", local, HEADLINE, 0, divide, 0);
    failed |= latency("headline_client_idle", url, HEADLINE, 0, divide, 25);
    failed |= latency("headline_client_busy", url, HEADLINE, 1, divide, 45);
    failed |= latency("headline_gradient_in_process", local, HEADLINE_GRADIENT, 0, divide, 0);
    failed |= latency("headline_gradient_client_idle", url, HEADLINE_GRADIENT, 0, divide, 25);
    failed |= latency("headline_gradient_client_busy", url, HEADLINE_GRADIENT, 1, divide, 45);
    return failed;
}

int main(int argc, char **argv) {
    double seconds = 2;
    uint32_t divide = 1, streams = 0;
    const char *only = "";
    if (argc < 2 || argv[1][0] == '-') {
        fprintf(stderr, "usage: sharing UNIX-URL [--seconds S] [--quick] "
                        "[--only latency|rates|beside] [--streams N]\n");
        return 2;
    }
    for (int i = 2; i < argc; i++) {
        if (strcmp(argv[i], "--seconds") == 0 && i + 1 < argc)
            seconds = strtod(argv[++i], NULL);
        else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc)
            only = argv[++i];
        else if (strcmp(argv[i], "--streams") == 0 && i + 1 < argc)
            streams = (uint32_t)strtoul(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--quick") == 0)
            divide = 10;
    }
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED)
        return 1;
    int failed = 0;
    printf("{\"what\":\"sharing\",\"version\":\"%s\",\"seconds\":%g", kld_version(), seconds);
    if (!*only || strcmp(only, "latency") == 0)
        failed |= latencies(argv[1], divide);
    static const int clients[] = {1, 4, 16};
    for (int beside = 0; beside < 2; beside++)
        for (size_t i = 0; i < 3 && !failed; i++)
            if (!*only || strcmp(only, beside ? "beside" : "rates") == 0)
                failed |= rates(argv[1], clients[i], beside, seconds,
                                streams          ? streams
                                : clients[i] > 1 ? 1
                                                 : IN_FLIGHT);
    print_targets();
    printf(",\n \"failed\":%s}\n", failed ? "true" : "false");
    return failed;
}
