/* share.c - a teacher publishes its logits once; students in other processes read them where they
 * are, each at temperatures of its own. No tensor byte is copied or crosses a socket.
 *
 *   share unix:/run/kld/kld.sock                    the three below, in processes of their own
 *   share teacher unix:/run/kld/kld.sock            until its standard input ends
 *   share student unix:/run/kld/kld.sock 1          a student that begins with temperature 1
 *
 * On a CPU the tensors lie in shared memory. On a GPU they lie in each process's own device memory,
 * and a student's steps run without a host that waits: its stream records an event that the
 * server's stream waits for, and waits for a fence, to which the server's device writes a number
 * behind each step; the losses are written to its memory. The NVIDIA driver is looked up at run
 * time.
 *
 *   gcc share.c -o share $(pkg-config --cflags --libs kld)      (in this tree: make examples) */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* pipe2() */
#endif
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kld/kld.h>

#define NAME "example/logits"
#define ROWS 64
#define CLASSES 1000
#define STEPS 3
#define TENSOR_BYTES (ROWS * CLASSES * sizeof(float))
#define MEMORY_BYTES (2u << 20) /* predictions, gradient, losses; a unit of the GPU's allocator */
#define LOSSES_AT (2 * TENSOR_BYTES)
#define WAIT_NS 20000000000u /* for the teacher */

typedef unsigned long long address; /* in the GPU's memory */
struct event_handle {
    unsigned char bytes[64];
};

/* Functions of the driver, in the order of `names`. */
struct gpu {
    int (*init)(unsigned);
    int (*device_get)(int *, int);
    int (*device_uuid)(unsigned char *, int);
    int (*context_retain)(void **, int);
    int (*context_set)(void *);
    int (*alloc)(address *, size_t);
    int (*memory_handle)(unsigned char (*)[64], address);
    int (*stream_create)(void **, unsigned);
    int (*stream_wait)(void *, address, unsigned, unsigned);
    int (*stream_finish)(void *);
    int (*to_device)(address, const void *, size_t, void *);
    int (*to_host)(void *, address, size_t, void *);
    int (*event_create)(void **, unsigned);
    int (*event_record)(void *, void *);
    int (*event_handle)(struct event_handle *, void *);
    int (*pin)(void *, size_t, unsigned);
    int (*pinned_at)(address *, void *, unsigned);
    int (*unpin)(void *);
};
static const char *const names[] = {"cuInit",
                                    "cuDeviceGet",
                                    "cuDeviceGetUuid",
                                    "cuDevicePrimaryCtxRetain",
                                    "cuCtxSetCurrent",
                                    "cuMemAlloc_v2",
                                    "cuIpcGetMemHandle",
                                    "cuStreamCreate",
                                    "cuStreamWaitValue32_v2",
                                    "cuStreamSynchronize",
                                    "cuMemcpyHtoDAsync_v2",
                                    "cuMemcpyDtoHAsync_v2",
                                    "cuEventCreate",
                                    "cuEventRecord",
                                    "cuIpcGetEventHandle",
                                    "cuMemHostRegister_v2",
                                    "cuMemHostGetDevicePointer_v2",
                                    "cuMemHostUnregister"};
#define EVENT_INTERPROCESS 6u /* CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS */
#define STREAM_NON_BLOCKING 1u
#define PIN_MAPPED 2u     /* CU_MEMHOSTREGISTER_DEVICEMAP */
#define WAIT_VALUE_GEQ 0u /* CU_STREAM_WAIT_VALUE_GEQ */

/* One process: its connection and its memory, of which the server has a region. */
struct process {
    struct kld_connection *connection;
    struct kld_error error;
    struct kld_server_info info;
    unsigned char uuid[16]; /* of the GPU that the memory lies on, and with it the events */
    struct kld_region *region;
    char *host; /* CPU: the region itself. GPU: what is copied to and from it */
    int on_gpu;
    struct gpu gpu;
    address device;
    void *stream;
    void *ready;    /* our event, as the driver knows it */
    uint32_t *word; /* of the fence, */
    address done;   /* and where the GPU has it, ... */
    uint32_t last;  /* ... and the last number that it is to have */
    struct kld_event *wait, *record;
};

static int fail(struct process *process, const char *what) {
    fprintf(stderr, "share: %s: %s\n", what,
            process->error.text[0] ? process->error.text : "the GPU's driver failed");
    return 1;
}

static int gpu_open(struct process *process) {
    struct gpu *gpu = &process->gpu;
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context = NULL;
    int device = 0;
    unsigned char handle[64];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        void *function = library ? dlsym(library, names[i]) : NULL;
        if (!function)
            return 1;
        memcpy((void **)gpu + i, &function, sizeof function);
    }
    return gpu->init(0) || gpu->device_get(&device, 0) || gpu->device_uuid(process->uuid, device) ||
           gpu->context_retain(&context, device) || gpu->context_set(context) ||
           gpu->alloc(&process->device, MEMORY_BYTES) ||
           gpu->memory_handle(&handle, process->device) ||
           gpu->stream_create(&process->stream, STREAM_NON_BLOCKING) ||
           kld_region_import_cuda_ipc(process->connection, handle, process->uuid, MEMORY_BYTES, 0,
                                      MEMORY_BYTES, &process->region, &process->error);
}

/* Connects, and gets MEMORY_BYTES that the server can reach. */
static int open_process(struct process *process, const char *url) {
    memset(process, 0, sizeof *process);
    if (kld_connect(url, NULL, &process->connection, &process->error) ||
        kld_info(process->connection, &process->info, &process->error))
        return fail(process, "connecting");
    process->on_gpu = strcmp(process->info.backend, "cuda") == 0;
    if (process->on_gpu) {
        static char copy[MEMORY_BYTES];
        process->host = copy;
        return gpu_open(process) ? fail(process, "opening GPU memory") : 0;
    }
    if (kld_region_create(process->connection, MEMORY_BYTES, &process->region, &process->error))
        return fail(process, "making shared memory");
    process->host = kld_region_data(process->region);
    return 0;
}

/* Stands for a model. */
static void fill(float *logits, unsigned seed) {
    for (int i = 0; i < ROWS * CLASSES; i++) {
        seed = seed * 1664525u + 1013904223u;
        logits[i] = (float)(seed >> 8) * 0x1p-22f; /* 0 to 4 */
    }
}

/* ---- The teacher ----------------------------------------------------------------------------- */

static int teacher(const char *url) {
    struct process process;
    struct kld_tensor_view view = {
        .dtype = KLD_DTYPE_FP32, .form = KLD_FORM_LOGITS, .rank = 2, .shape = {ROWS, CLASSES}};
    if (open_process(&process, url))
        return 1;
    fill((float *)process.host, 1);
    if (process.on_gpu &&
        (process.gpu.to_device(process.device, process.host, TENSOR_BYTES, process.stream) ||
         process.gpu.stream_finish(process.stream)))
        return fail(&process, "copying to the GPU");
    if (kld_publish(process.connection, NAME, process.region, &view, NULL, 0, &process.error))
        return fail(&process, "publishing");
    printf("teacher: published %s on %s\n", NAME, process.info.backend);
    fflush(stdout);
    /* libkld publishes it again when the server was replaced: it only has to be let. */
    struct pollfd polled[2] = {{.fd = STDIN_FILENO, .events = POLLIN},
                               {.fd = kld_fd(process.connection), .events = POLLIN}};
    char byte;
    while (poll(polled, 2, -1) > 0) {
        if (polled[0].revents && read(STDIN_FILENO, &byte, 1) <= 0)
            break;
        if (polled[1].revents && kld_process(process.connection, 0, &process.error))
            return fail(&process, "waiting");
    }
    kld_close(process.connection); /* the tensor is no longer published */
    return 0;
}

/* ---- A student ------------------------------------------------------------------------------- */

/* Our event, which the server waits for, and the fence that we wait for: a stream that waits for a
 * fence goes on when the server is lost, and kld_run() then says so. */
static int open_events(struct process *process) {
    struct gpu *gpu = &process->gpu;
    struct event_handle ours;
    return gpu->event_create(&process->ready, EVENT_INTERPROCESS) ||
           gpu->event_handle(&ours, process->ready) ||
           kld_event_import(process->connection, ours.bytes, process->uuid, &process->wait,
                            &process->error) ||
           kld_fence_create(process->connection, &process->word, &process->record,
                            &process->error) ||
           gpu->pin(process->word, KLD_FENCE_BYTES, PIN_MAPPED) ||
           gpu->pinned_at(&process->done, process->word, 0);
}

/* One step: loss and gradient of our logits against the teacher's. On a GPU it is all enqueued when
 * this returns. */
static int step(struct process *process, struct kld_region *targets, double temperature, int at) {
    struct kld_request request;
    struct kld_result result;
    memset(&request, 0, sizeof request);
    kld_op_init(&request.op);
    request.op.rank = 2;
    request.op.shape[0] = ROWS;
    request.op.shape[1] = CLASSES;
    request.op.predictions_form = request.op.targets_form = KLD_FORM_LOGITS;
    if (kld_op_set_number(&request.op, "temperature", temperature, &process->error))
        return fail(process, "temperature");
    const enum kld_slot slots[] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_GRAD_PREDICTIONS, KLD_SLOT_LOSS,
                                   KLD_SLOT_TARGETS};
    const uint64_t offsets[] = {0, TENSOR_BYTES, LOSSES_AT + (uint64_t)at * sizeof(float), 0};
    for (int i = 0; i < 4; i++) {
        request.op.tensor[slots[i]].dtype = KLD_DTYPE_FP32;
        request.bytes[slots[i]].region = slots[i] == KLD_SLOT_TARGETS ? targets : process->region;
        request.bytes[slots[i]].offset_bytes = offsets[i];
    }
    request.wait = process->wait;
    request.record = process->record;
    request.early = process->on_gpu;
    if (process->on_gpu && process->gpu.event_record(process->ready, process->stream))
        return fail(process, "recording an event");
    if (kld_run(process->connection, &request, &result, &process->error))
        return fail(process, "computing");
    if (process->on_gpu && process->gpu.stream_wait(process->stream, process->done,
                                                    result.fence_number, WAIT_VALUE_GEQ))
        return fail(process, "waiting for a fence");
    process->last = result.fence_number;
    return 0;
}

static int student(const char *url, double temperature) {
    struct process process;
    struct kld_region *targets;
    struct kld_tensor_view view;
    if (open_process(&process, url))
        return 1;
    if (kld_attach(process.connection, NAME, WAIT_NS, &targets, &view, &process.error))
        return fail(&process, "attaching");
    if (view.dtype != KLD_DTYPE_FP32 || view.form != KLD_FORM_LOGITS || view.rank != 2 ||
        view.shape[0] != ROWS || view.shape[1] != CLASSES) {
        fprintf(stderr, "share: the teacher's tensor is of another shape\n");
        return 1;
    }
    fill((float *)process.host, 2);
    if (process.on_gpu &&
        (open_events(&process) ||
         process.gpu.to_device(process.device, process.host, TENSOR_BYTES, process.stream)))
        return fail(&process, "preparing the GPU");
    for (int i = 0; i < STEPS; i++)
        if (step(&process, targets, temperature * (i + 1), i))
            return 1;
    /* The one place where the host waits for the GPU. */
    if (process.on_gpu && (process.gpu.to_host(process.host, process.device,
                                               LOSSES_AT + STEPS * sizeof(float), process.stream) ||
                           process.gpu.stream_finish(process.stream)))
        return fail(&process, "copying from the GPU");
    /* Behind the last step no kld_run() says that the server was lost. */
    if (process.on_gpu && !kld_fence_passed(process.record, process.last))
        return fail(&process, "the server was lost before it had computed the last steps");
    const float *losses = (const float *)(process.host + LOSSES_AT);
    for (int i = 0; i < STEPS; i++)
        printf("student: temperature %g: loss %.9g\n", temperature * (i + 1), (double)losses[i]);
    printf("student: gradient[0] %.9g\n", (double)((float *)(process.host + TENSOR_BYTES))[0]);
    if (process.on_gpu)
        process.gpu.unpin(process.word);
    kld_close(process.connection);
    return 0;
}

/* ---- Together ---------------------------------------------------------------------------------
 */

static pid_t start(const char *role, const char *url, const char *temperature, int input) {
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    if (input >= 0)
        dup2(input, STDIN_FILENO);
    execl("/proc/self/exe", "share", role, url, temperature, (char *)NULL);
    _exit(127);
}

static int finish(pid_t pid) {
    int status = 1;
    return pid < 0 || waitpid(pid, &status, 0) != pid || status != 0;
}

static int together(const char *url) {
    int until[2]; /* the teacher goes when we close it */
    if (pipe2(until, O_CLOEXEC) != 0)
        return 1;
    pid_t teaches = start("teacher", url, NULL, until[0]);
    pid_t first = start("student", url, "1", -1);
    pid_t second = start("student", url, "2.5", -1);
    int failed = finish(first) | finish(second);
    close(until[1]);
    return failed | finish(teaches);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "teacher") == 0)
        return teacher(argv[2]);
    if (argc == 4 && strcmp(argv[1], "student") == 0)
        return student(argv[2], strtod(argv[3], NULL));
    if (argc == 2)
        return together(argv[1]);
    fprintf(stderr, "usage: share [teacher|student] UNIX-URL [TEMPERATURE]\n");
    return 2;
}
