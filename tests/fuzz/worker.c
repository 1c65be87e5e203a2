/* worker.c - libFuzzer over a whole worker: several clients that connect, register memory, submit,
 * copy, cancel, publish, attach, drop, send nonsense, do not read, cut their connection and leave.
 *
 * Two workers: one on the CPU, one on the double of the unit tests, which can hold and fail what it
 * is given and has events and memory of a GPU. After each input every client that is still there
 * has had its answers, the next one is answered rightly, to the bit, and nothing of anybody is
 * left: no session, region, memory, stream, event or descriptor.
 *
 * Input: 1 byte that chooses the worker; then instructions, 1 byte each and what they read. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/fuzz/common/client.h"
#include "tests/unit/server/worker/fake_device.h"

#define CLIENTS 6 /* more than may connect */
#define MEMORY_BYTES (1 << 16)
#define LARGE_BYTES (2 << 20) /* from 1 MiB on a memory is mapped once for all */
#define STEPS_MAX 200
#define ROWS 4 /* of the request whose answer is known */
#define CLASSES 8

enum file {
    PLAIN,
    PLAIN_TOO,
    LARGE,
    UNSEALED,
    NOT_WRITTEN,
    READ_ONLY,
    DEVICE,
    PIPE,
    FOLDER,
    FILES
};

static struct fuzz_host cpu, faked;
static struct fake_device fake;
static int files[FILES], witness_fd;
static int allocation; /* as DEVICE, and another open file each time that it is sent */
static float *witness; /* predictions, targets, gradient: of the known request */
static uint32_t right[2][ROWS * CLASSES + 2];
static bool known[2];
static unsigned fds_at_rest;

static char *settings[] = {
    "--log-level=debug",         "--clients-max=4",        "--requests-max=12",
    "--client-requests-max=8",   "--client-regions-max=6", "--client-streams-max=3",
    "--user-publications-max=4", "--region-bytes-max=4M",  "--client-region-bytes-max=6M",
    "--pool-bytes-max=8M",       "--cuda-files-max=2",     "--event-hold-ms=60000",
};

static int memory(size_t bytes, int seals) {
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    require(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 && fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

static void make_files(void) {
    int pair[2];
    char path[40];
    files[PLAIN] = memory(MEMORY_BYTES, F_SEAL_SHRINK);
    files[PLAIN_TOO] = memory(MEMORY_BYTES, F_SEAL_SHRINK | F_SEAL_GROW);
    files[LARGE] = memory(LARGE_BYTES, F_SEAL_SHRINK);
    files[UNSEALED] = memory(MEMORY_BYTES, 0);
    files[NOT_WRITTEN] = memory(MEMORY_BYTES, F_SEAL_SHRINK | F_SEAL_WRITE);
    snprintf(path, sizeof path, "/proc/self/fd/%d", files[PLAIN]);
    files[READ_ONLY] = open(path, O_RDONLY | O_CLOEXEC);
    files[DEVICE] = open("/dev/null", O_RDWR | O_CLOEXEC);
    allocation = open("/dev/null", O_RDWR | O_CLOEXEC);
    require(pipe2(pair, O_CLOEXEC) == 0);
    files[PIPE] = pair[0];
    files[FOLDER] = open("/", O_RDONLY | O_CLOEXEC);
    witness_fd = memory(MEMORY_BYTES, F_SEAL_SHRINK);
    witness = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, witness_fd, 0);
    require(witness != MAP_FAILED);
    for (int i = 0; i < 2 * ROWS * CLASSES; i++)
        witness[i] = (float)(i % 7 + 1) / 32;
}

/* ---- The next request is answered rightly ---------------------------------------------------- */

static void add_region(union kld_frame *frame, uint32_t kind, uint64_t bytes) {
    kld_frame_init(frame, KLD_FRAME_REGION_ADD, 0);
    frame->as_REGION_ADD.kind = kind;
    frame->as_REGION_ADD.bytes = bytes;
}

static void require_right(struct fuzz_host *host) {
    static const enum kld_slot slots[3] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS,
                                           KLD_SLOT_GRAD_PREDICTIONS};
    uint32_t got[ROWS * CLASSES + 2], *expected = right[host == &faked];
    struct fuzz_client client;
    union kld_frame frame;
    fuzz_client_open(&client, host);
    fuzz_client_hello(&client);
    add_region(&frame, KLD_REGION_MEMFD, MEMORY_BYTES);
    uint64_t number = fuzz_client_send(&client, &frame, &witness_fd, 1);
    require(fuzz_client_take(&client, number, 8000, &frame));
    require(frame.header.type == KLD_FRAME_REGION);
    uint64_t region = frame.as_REGION.region;
    memset(witness + 2 * ROWS * CLASSES, 0, ROWS * CLASSES * sizeof(float));
    kld_frame_init(&frame, KLD_FRAME_SUBMIT, 0);
    frame.as_SUBMIT.rank = 2;
    frame.as_SUBMIT.shape[0] = ROWS;
    frame.as_SUBMIT.shape[1] = CLASSES;
    for (uint64_t i = 0; i < 3; i++)
        frame.as_SUBMIT.tensor[slots[i]] =
            (struct kld_wire_tensor){.dtype = KLD_DTYPE_FP32,
                                     .region = region,
                                     .offset_bytes = i * ROWS * CLASSES * sizeof(float)};
    number = fuzz_client_send(&client, &frame, NULL, 0);
    require(fuzz_client_take(&client, number, 8000, &frame));
    require(frame.header.type == KLD_FRAME_DONE && frame.as_DONE.scalar == 1);
    memcpy(got, &frame.as_DONE.loss, sizeof frame.as_DONE.loss);
    memcpy(got + 2, witness + 2 * ROWS * CLASSES, sizeof got - 8);
    fuzz_client_close(&client);
    if (!known[host == &faked])
        memcpy(expected, got, sizeof got);
    known[host == &faked] = true;
    require(memcmp(expected, got, sizeof got) == 0);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    const int count = sizeof settings / sizeof settings[0];
    make_files();
    fuzz_host_open(&cpu, count, settings, NULL);
    fuzz_host_start(&cpu, NULL, NULL);
    fuzz_host_open(&faked, count, settings, NULL);
    fake_device_init(&fake);
    fuzz_host_start(&faked, &fake_backend, &fake.head);
    for (int i = 0; i < 2; i++) { /* what is made once, uv's pool, is made */
        require_right(&cpu);
        require_right(&faked);
    }
    fuzz_host_require_idle(&cpu);
    fuzz_host_require_idle(&faked);
    fuzz_nap_us(20000);
    return 0;
}

/* ---- Frames ---------------------------------------------------------------------------------- */

/* One of those that the client had, now and then another one's, or a number. */
static uint64_t id(struct fuzz_input *input, const uint64_t *kept) {
    uint8_t which = fuzz_byte(input);
    return which < 0xf0 ? kept[which % FUZZ_KEPT] : fuzz_long(input);
}

static void put_regions(struct fuzz_input *input, const struct fuzz_client *client,
                        struct kld_frame_submit *submit) {
    uint16_t slots = fuzz_short(input);
    for (unsigned slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        if (slot > KLD_SLOT_TARGETS && !(slots & 1 << slot))
            continue;
        struct kld_wire_tensor *tensor = &submit->tensor[slot];
        uint8_t how = fuzz_byte(input);
        uint32_t plain = slot == KLD_SLOT_ROW_MASK ? KLD_DTYPE_BOOL : KLD_DTYPE_FP32;
        tensor->dtype = how & 0x80 ? how % 8 : plain;
        tensor->region = id(input, client->region);
        tensor->offset_bytes = how & 0x40 ? fuzz_short(input) : slot * 2048u;
        if (how & 0x20)
            tensor->row_stride_bytes = fuzz_short(input);
    }
}

static void make_submit(struct fuzz_input *input, const struct fuzz_client *client,
                        union kld_frame *frame) {
    static const uint64_t sizes[8] = {1, 2, 3, 8, 17, 64, 1000, 1 << 16};
    struct kld_frame_submit *submit = &frame->as_SUBMIT;
    kld_frame_init(frame, KLD_FRAME_SUBMIT, 0);
    uint8_t shape = fuzz_byte(input), what = fuzz_byte(input), more = fuzz_byte(input);
    submit->rank = 1 + shape % 3;
    for (uint32_t i = 0; i < submit->rank; i++)
        submit->shape[i] = sizes[(shape >> (2 + 2 * i)) % (i + 1 < submit->rank ? 4 : 8)];
    submit->divergence = what % 10;
    submit->reduction = what / 10 % 7;
    submit->predictions_form = more % 3;
    submit->targets_form = more / 3 % 3;
    submit->stream = more / 9 % 4;
    if (more & 0x80) {
        submit->given = fuzz_byte(input);
        for (unsigned i = 0; i < KLD_NUMBER_COUNT; i++)
            if (submit->given & 1u << i)
                submit->number[i] = fuzz_byte(input) / 128.0;
        submit->timeout_ns = fuzz_byte(input) * UINT64_C(100000);
        submit->flags = fuzz_byte(input) % 3;
    }
    if (shape & 0x80) {
        submit->ready_event = id(input, client->event);
        submit->done_event = id(input, client->event);
    }
    put_regions(input, client, submit);
}

static void make_region(struct fuzz_input *input, union kld_frame *frame, int *ret_fds,
                        unsigned *ret_count) {
    uint8_t how = fuzz_byte(input);
    struct kld_frame_region_add *add = &frame->as_REGION_ADD;
    uint32_t kind = how & 0x80 ? 2 + how % 3 : KLD_REGION_MEMFD;
    unsigned file = how % 16 < FILES ? how % 16 : PLAIN;
    if (kind == KLD_REGION_POOL && (how & 0x20))
        kind = KLD_REGION_CUDA_SPACE;
    add_region(frame, kind, file == LARGE ? LARGE_BYTES : MEMORY_BYTES);
    *ret_count = kind == KLD_REGION_MEMFD || kind == KLD_REGION_CUDA_FD;
    ret_fds[0] = ret_fds[1] = files[kind == KLD_REGION_CUDA_FD && !(how & 0x10) ? DEVICE : file];
    if (how & 0x40) {
        add->bytes = fuzz_short(input) << fuzz_byte(input) % 16;
        *ret_count = fuzz_byte(input) % 3;
    }
    if (kind == KLD_REGION_CUDA_SPACE)
        memset(add->device_uuid, 7, sizeof add->device_uuid);
    if (kind == KLD_REGION_CUDA_IPC || kind == KLD_REGION_CUDA_FD) {
        memset(add->device_uuid, how & 0x20 ? 9 : 7, sizeof add->device_uuid);
        add->base_bytes = add->bytes;
        if (kind == KLD_REGION_CUDA_IPC)
            memset(add->ipc_handle, 1 + how % 3, sizeof add->ipc_handle);
    }
}

static void make_publish(struct fuzz_input *input, const struct fuzz_client *client,
                         union kld_frame *frame) {
    uint8_t how = fuzz_byte(input);
    struct kld_frame_publish *publish = &frame->as_PUBLISH;
    kld_frame_init(frame, KLD_FRAME_PUBLISH, 0);
    publish->name[0] = (char)('a' + how % 6);
    publish->region = id(input, client->region);
    publish->tensor.dtype = how & 0x40 ? fuzz_byte(input) % 8 : KLD_DTYPE_FP32;
    publish->tensor.rank = 2;
    publish->tensor.shape[0] = 2;
    publish->tensor.shape[1] = 8;
    if (how & 0x80) {
        publish->offset_bytes = fuzz_short(input);
        publish->tensor.shape[0] = fuzz_short(input);
        publish->tensor.row_stride_bytes = fuzz_short(input);
        publish->uids_count = fuzz_byte(input) % 10;
    }
}

static void make_copy(struct fuzz_input *input, const struct fuzz_client *client,
                      union kld_frame *frame) {
    kld_frame_init(frame, KLD_FRAME_COPY, 0);
    frame->as_COPY.destination = id(input, client->region);
    frame->as_COPY.source = id(input, client->region);
    frame->as_COPY.destination_offset_bytes = fuzz_short(input);
    frame->as_COPY.source_offset_bytes = fuzz_short(input);
    frame->as_COPY.bytes = fuzz_short(input) % 4096;
    frame->as_COPY.stream = fuzz_byte(input) % 4;
}

static void make_named(struct fuzz_input *input, uint8_t what, union kld_frame *frame) {
    kld_frame_init(frame, what & 1 ? KLD_FRAME_DETACH : KLD_FRAME_ATTACH, 0);
    char *name = what & 1 ? frame->as_DETACH.name : frame->as_ATTACH.name;
    name[0] = (char)('a' + fuzz_byte(input) % 6);
    if (!(what & 1))
        frame->as_ATTACH.uid = what & 2 ? fuzz_byte(input) : KLD_WIRE_UID_OWN;
}

static void make_grow(struct fuzz_input *input, const struct fuzz_client *client,
                      union kld_frame *frame, int *ret_fds, unsigned *ret_count) {
    uint8_t how;
    kld_frame_init(frame, KLD_FRAME_REGION_GROW, 0);
    frame->as_REGION_GROW.region = id(input, client->region);
    how = fuzz_byte(input);
    frame->as_REGION_GROW.offset_bytes = how % 16 * 4096u;
    frame->as_REGION_GROW.bytes = (how / 16 % 4 + 1) * 4096u;
    if (how & 0x80) {
        frame->as_REGION_GROW.offset_bytes = fuzz_long(input);
        frame->as_REGION_GROW.bytes = fuzz_long(input);
    }
    close(allocation);
    allocation = open("/dev/null", O_RDWR | O_CLOEXEC);
    ret_fds[0] = how & 0x40 ? files[DEVICE] : allocation;
    *ret_count = 1;
}

static void make_small(struct fuzz_input *input, const struct fuzz_client *client,
                       union kld_frame *frame) {
    static const enum kld_frame_type types[] = {
        KLD_FRAME_REGION_DROP, KLD_FRAME_CANCEL, KLD_FRAME_EVENT_ADD, KLD_FRAME_EVENT_DROP,
        KLD_FRAME_STREAM,      KLD_FRAME_TRACE,  KLD_FRAME_STATS,     KLD_FRAME_PING,
    };
    uint8_t what = fuzz_byte(input);
    kld_frame_init(frame, types[what % 8], 0);
    switch (frame->header.type) {
    case KLD_FRAME_REGION_DROP: frame->as_REGION_DROP.region = id(input, client->region); break;
    case KLD_FRAME_CANCEL: frame->as_CANCEL.target = client->next_number - what / 8; break;
    case KLD_FRAME_EVENT_DROP: frame->as_EVENT_DROP.event = id(input, client->event); break;
    case KLD_FRAME_STREAM:
        frame->as_STREAM.stream = what / 8 % 4;
        frame->as_STREAM.priority = what / 32 % 4 - 2;
        break;
    case KLD_FRAME_EVENT_ADD:
        if (what / 8 % 6 == KLD_EVENT_FENCE) {
            kld_frame_init(frame, KLD_FRAME_FENCE_ADD, 0);
            frame->as_FENCE_ADD.region = id(input, client->region);
            frame->as_FENCE_ADD.offset_bytes = fuzz_short(input);
            break;
        }
        frame->as_EVENT_ADD.kind = 1 + what / 8 % 3;
        memset(frame->as_EVENT_ADD.device_uuid, 7, KLD_WIRE_UUID_BYTES);
        if (frame->as_EVENT_ADD.kind == KLD_EVENT_READY)
            memset(frame->as_EVENT_ADD.ipc_handle, 3, KLD_WIRE_IPC_HANDLE_BYTES);
        break;
    case KLD_FRAME_TRACE:
        frame->as_TRACE.target = client->next_number + 2;
        frame->as_TRACE.id[0] = frame->as_TRACE.span[0] = what / 8;
        break;
    default: break;
    }
}

/* Bytes of the fuzzer's, with what may come along. Its number is not kept account of. */
static void send_raw(struct fuzz_input *input, struct fuzz_client *client) {
    union kld_frame frame;
    uint8_t how = fuzz_byte(input);
    memset(&frame, 0, sizeof frame);
    size_t bytes = fuzz_short(input) % (sizeof frame + 1);
    if (how & 0x80) { /* whole, but for its contents */
        kld_frame_init(&frame, how % 20, 0);
        bytes = kld_frame_bytes(how % 20);
        fuzz_bytes(input, (char *)&frame + sizeof frame.header,
                   bytes > sizeof frame.header ? bytes - sizeof frame.header : 0);
    } else {
        bytes = fuzz_bytes(input, &frame, bytes);
    }
    frame.header.request &= FUZZ_NUMBER_MIN - 1;
    int fds[3] = {files[how % FILES], files[PLAIN], files[PIPE]};
    if (client->fd >= 0)
        fuzz_send(client->fd, &frame, bytes, fds, how / 16 % 4);
}

/* ---- Instructions ---------------------------------------------------------------------------- */

static void release_fake(void) {
    atomic_store(&fake.hold, false);
    atomic_store(&fake.hold_memory, false);
    atomic_store(&fake.job_us, 0);
    atomic_store(&fake.fail_job, KLD_OK);
    atomic_store(&fake.fail_call, 0);
    atomic_store(&fake.fail_all, false);
    atomic_store(&fake.fail_launch, false);
    atomic_store(&fake.launches_directly, false);
    atomic_store(&fake.stage, 0);
    atomic_store(&fake.stage_plain, 0);
    atomic_store(&fake.peers, false);
    atomic_store(&faked.stats->value[KLD_STAT_pool_kept_bytes], 0);
}

static void turn_knob(struct fuzz_input *input) {
    static const int statuses[] = {KLD_NO_MEMORY, KLD_INVALID, KLD_INTERNAL, KLD_GONE};
    uint8_t what = fuzz_byte(input), more = what / 16;
    switch (what % 16) {
    case 0: atomic_store(&fake.hold, more & 1); break;
    case 1: atomic_store(&fake.hold_memory, more & 1); break;
    case 2: atomic_store(&fake.job_us, more * 20); break;
    case 3: atomic_store(&fake.fail_job, more & 4 ? statuses[more % 4] : KLD_OK); break;
    case 4:
        atomic_store(&fake.fail_status, statuses[more % 4]);
        atomic_store(&fake.fail_call, 1 + more / 4);
        break;
    case 5:
        atomic_store(&fake.fail_status, statuses[more % 4]);
        atomic_store(&fake.fail_all, more / 4 & 1);
        break;
    case 6: atomic_store(&fake.fail_launch, more & 1); break;
    case 7: atomic_store(&fake.launches_directly, more & 1); break;
    case 8:
        atomic_store(&fake.stage, more % 4);
        atomic_store(&fake.stage_plain, more / 4);
        break;
    case 9: atomic_store(&fake.peers, more & 1); break;
    case 10: atomic_store(&faked.stats->value[KLD_STAT_pool_kept_bytes], (more & 1) * 4096u); break;
    default: release_fake();
    }
}

/* Requests in one packet, some with a trace. */
static void send_packet(struct fuzz_input *input, unsigned count, struct fuzz_client *client) {
    union kld_frame frames[2 * 9];
    unsigned filled = 0;
    for (unsigned i = 0; i < count; i++) {
        uint8_t what = fuzz_byte(input);
        if (what & 0x80) {
            kld_frame_init(&frames[filled], KLD_FRAME_TRACE, 0);
            frames[filled].as_TRACE.target = client->next_number + filled + 2;
            frames[filled].as_TRACE.id[0] = frames[filled].as_TRACE.span[0] = what & 0x40;
            filled++;
        }
        if (what & 1)
            make_copy(input, client, &frames[filled++]);
        else
            make_submit(input, client, &frames[filled++]);
    }
    fuzz_client_send_packet(client, frames, filled);
}

static void send_made(struct fuzz_input *input, uint8_t what, struct fuzz_client *client) {
    union kld_frame frame;
    int fds[2];
    unsigned count = 0;
    if (what % 8 == 2 && what / 8) {
        send_packet(input, 2 + what / 8 % 8, client);
        return;
    }
    switch (what % 8) {
    case 0: make_region(input, &frame, fds, &count); break;
    case 1:
    case 2: make_submit(input, client, &frame); break;
    case 3: make_copy(input, client, &frame); break;
    case 4: make_publish(input, client, &frame); break;
    case 5: make_named(input, what / 8, &frame); break;
    case 6: make_small(input, client, &frame); break;
    default: /* as 6 but for one of its bits */
        if (what & 0x80)
            make_grow(input, client, &frame, fds, &count);
        else
            make_small(input, client, &frame);
    }
    uint64_t number = fuzz_client_send(client, &frame, fds, count);
    bool has_id = what % 8 == 0 || (what % 8 >= 5 && frame.header.type != KLD_FRAME_PING);
    if (number && has_id && !atomic_load(&fake.hold_memory))
        fuzz_client_take(client, number, 300, NULL);
}

/* Much that nobody reads the answers of. */
static void flood(struct fuzz_input *input, struct fuzz_client *client) {
    union kld_frame frame;
    kld_frame_init(&frame, fuzz_byte(input) & 1 ? KLD_FRAME_STATS : KLD_FRAME_CANCEL, 0);
    for (int i = 0; i < 400 && fuzz_client_send(client, &frame, NULL, 0); i++)
        ;
}

static void step(struct fuzz_input *input, struct fuzz_host *host, struct fuzz_client *clients) {
    uint8_t what = fuzz_byte(input);
    struct fuzz_client *client = &clients[what / 16 % CLIENTS];
    switch (what % 16) {
    case 0:
        fuzz_client_close(client);
        fuzz_client_open(client, host);
        break;
    case 1:
        if (client->fd < 0)
            fuzz_client_open(client, host);
        fuzz_client_hello(client);
        break;
    case 2: fuzz_client_close(client); break;
    case 3: fuzz_client_take(client, 0, 0, NULL); break;
    case 4: send_raw(input, client); break;
    case 5:
        client->cut = true;
        if (client->fd >= 0)
            shutdown(client->fd, fuzz_byte(input) % 3);
        break;
    case 6: turn_knob(input); break;
    case 7: flood(input, client); break;
    default: send_made(input, fuzz_byte(input), client);
    }
}

static void require_clean(struct fuzz_host *host) {
    fuzz_host_require_idle(host);
    if (host == &faked) {
        uint64_t until = fuzz_now_ns() + 5000000000u;
        while (atomic_load(&fake.streams) && fuzz_now_ns() < until)
            fuzz_nap_us(50);
        require(atomic_load(&fake.memories) == 0 && atomic_load(&fake.streams) == 0);
        require(atomic_load(&fake.events) == 0 && atomic_load(&fake.order_broken) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (!fds_at_rest) /* not before: libFuzzer opens some of its own */
        fds_at_rest = fuzz_open_fds();
    struct fuzz_input input = {data, data + bytes};
    struct fuzz_client clients[CLIENTS];
    struct fuzz_host *host = fuzz_byte(&input) & 1 ? &faked : &cpu;
    for (int i = 0; i < CLIENTS; i++)
        clients[i] = (struct fuzz_client){.fd = -1};
    for (int i = 0; i < STEPS_MAX && input.at < input.end; i++)
        step(&input, host, clients);
    release_fake();
    for (int i = 0; i < CLIENTS; i++)
        fuzz_client_settle(&clients[i]);
    for (int i = 0; i < CLIENTS; i++)
        fuzz_client_close(&clients[i]);
    fuzz_host_require_idle(host);
    require_right(host);
    require_clean(host);
    fuzz_require_fds(fds_at_rest);
    fuzz_require_no_leaks();
    return 0;
}
