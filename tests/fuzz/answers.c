/* answers.c - libFuzzer over what libkld makes of a hostile server on the Unix socket: answers that
 * are wrong, of another type, twice, cut, late, nonsense, with descriptors; connections that end.
 *
 * The server is a function that has its turn when the client waits (turns/turns.h), which takes no
 * time; it answers each frame as the input says, and rightly once that is at its end. The client
 * does the same calls each time: each returns in time with KLD_OK and what it promises, or with an
 * error that is described; then a new connection is served rightly, and nothing is left: no memory,
 * no descriptor.
 *
 * Input: 1 byte that chooses what the client does, and whether the server also has turns between
 * two frames of the client; then for each frame 1 byte that says how it is answered, and what that
 * reads. */
#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/kld.h"
#include "proto/wire.h"
#include "tests/fuzz/common/fuzz.h"
#include "tests/fuzz/turns/turns.h"

#define PEERS 8
#define LOSS 0.25
#define CONNECT_NS 30000000ull
#define CALL_NS 30000000ull
#define RETURNS_NS 8000000000ull /* whatever the server does */
#define CLASSES 8
#define NUMBERS_MAX 1000 /* of a fence; larger ones are the server's lies */

static char path[64], url[80];
static struct fuzz_input script;
static struct pollfd polled[1 + PEERS]; /* the listener, and connections that the server has */
static unsigned peers;                  /* of these */
static unsigned fds_at_rest;

/* ---- The server ------------------------------------------------------------------------------ */

static uint64_t ids = 1;
static _Atomic uint32_t *device_word; /* of a fence; NULL: there is none */
static uint32_t device_number;        /* the last that the device wrote there */

static void welcome(union kld_frame *reply, uint64_t request) {
    kld_frame_init(reply, KLD_FRAME_WELCOME, request);
    struct kld_frame_welcome *out = &reply->as_WELCOME;
    out->epoch = 1;
    out->version = KLD_WIRE_VERSION;
    out->devices = 1;
    strcpy(out->backend, "cuda");
    out->regions_max = out->requests_max = 64;
    out->streams_max = 4;
    out->events_max = 4;
    out->region_bytes_max = out->pool_bytes_max = UINT64_C(1) << 30;
    out->publications_max = 16;
    memset(out->device_list[0].uuid, 7, KLD_WIRE_UUID_BYTES);
}

/* What a good server says to it. */
static void answer(const union kld_frame *frame, union kld_frame *reply) {
    uint64_t request = frame->header.request;
    switch (frame->header.type) {
    case KLD_FRAME_HELLO: welcome(reply, request); break;
    case KLD_FRAME_REGION_ADD:
        kld_frame_init(reply, KLD_FRAME_REGION, request);
        reply->as_REGION.region = ++ids;
        reply->as_REGION.bytes = frame->as_REGION_ADD.bytes;
        break;
    case KLD_FRAME_REGION_GROW:
        kld_frame_init(reply, KLD_FRAME_REGION, request);
        reply->as_REGION.region = frame->as_REGION_GROW.region;
        reply->as_REGION.bytes = frame->as_REGION_GROW.offset_bytes + frame->as_REGION_GROW.bytes;
        break;
    case KLD_FRAME_EVENT_ADD:
    case KLD_FRAME_FENCE_ADD:
        kld_frame_init(reply, KLD_FRAME_EVENT, request);
        reply->as_EVENT.event = ++ids;
        break;
    case KLD_FRAME_STATS: kld_frame_init(reply, KLD_FRAME_STATS_REPLY, request); break;
    case KLD_FRAME_PING: kld_frame_init(reply, KLD_FRAME_PONG, request); break;
    case KLD_FRAME_ATTACH:
        kld_frame_init(reply, KLD_FRAME_ATTACHED, request);
        reply->as_ATTACHED.region = ++ids;
        reply->as_ATTACHED.bytes = 2 * CLASSES * 4;
        reply->as_ATTACHED.tensor.dtype = KLD_DTYPE_FP32;
        reply->as_ATTACHED.tensor.rank = 2;
        reply->as_ATTACHED.tensor.shape[0] = 2;
        reply->as_ATTACHED.tensor.shape[1] = CLASSES;
        break;
    default:
        kld_frame_init(reply, KLD_FRAME_DONE, request);
        reply->as_DONE.loss = LOSS;
        reply->as_DONE.scalar = frame->header.type == KLD_FRAME_SUBMIT;
        if (frame->header.type == KLD_FRAME_SUBMIT && frame->as_SUBMIT.done_event && device_word) {
            reply->as_DONE.fence_number = ++device_number;
            atomic_store(device_word, device_number);
        }
    }
}

static void spoil(struct fuzz_input *input, union kld_frame *reply) {
    size_t bytes = reply->header.length; /* what it says may be spoiled, too */
    for (int i = fuzz_byte(input) % 4; i >= 0; i--) {
        size_t at = fuzz_short(input) % bytes;
        ((uint8_t *)reply)[at] ^= fuzz_byte(input);
    }
}

static void say(int fd, const void *data, size_t bytes, bool with_fd) {
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (with_fd) {
        int null = STDERR_FILENO;
        message.msg_control = control.space;
        message.msg_controllen = sizeof control.space;
        CMSG_FIRSTHDR(&message)->cmsg_level = SOL_SOCKET;
        CMSG_FIRSTHDR(&message)->cmsg_type = SCM_RIGHTS;
        CMSG_FIRSTHDR(&message)->cmsg_len = CMSG_LEN(sizeof null);
        memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), &null, sizeof null);
    }
    (void)!sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void say_error(struct fuzz_input *input, union kld_frame *reply) {
    uint64_t request = reply->header.request;
    uint8_t status = fuzz_byte(input);
    kld_frame_init(reply, KLD_FRAME_ERROR, request);
    reply->as_ERROR.status = status % 24;
    if (status < 200)
        strcpy(reply->as_ERROR.text, "so it is");
    else
        memset(reply->as_ERROR.text, status, sizeof reply->as_ERROR.text);
}

/* False: the connection is to be closed. */
static bool treat(int fd, const union kld_frame *frame, struct fuzz_input *input) {
    union kld_frame reply;
    uint8_t raw[sizeof reply + 64];
    uint8_t how = input->at < input->end ? fuzz_byte(input) : 0;
    if (frame->header.type == KLD_FRAME_TRACE)
        return true;
    answer(frame, &reply);
    switch (how % 10) {
    case 1: spoil(input, &reply); break;
    case 2: say_error(input, &reply); break;
    case 3: say(fd, &reply, reply.header.length, how & 0x80); break; /* twice */
    case 4: reply.header.request ^= UINT64_C(1) << how / 10 % 64; break;
    case 5: /* of another type */
        kld_frame_init(&reply, 64 + how / 10 % 8, frame->header.request);
        fuzz_bytes(input, (uint8_t *)&reply + sizeof reply.header, fuzz_byte(input));
        break;
    case 6: return true; /* nothing */
    case 7: return false;
    case 8: {
        size_t bytes = fuzz_bytes(input, raw, fuzz_short(input) % sizeof raw);
        say(fd, raw, bytes, how & 0x80);
        break;
    }
    default: break;
    }
    if (kld_frame_bytes(reply.header.type))
        say(fd, &reply, how % 10 == 9 ? how : kld_frame_bytes(reply.header.type), false);
    return true;
}

static bool serve(int fd) {
    union kld_frame frame;
    ssize_t bytes = recv(fd, &frame, sizeof frame, MSG_DONTWAIT);
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    if (bytes < (ssize_t)sizeof frame.header)
        return false;
    return treat(fd, &frame, &script);
}

static bool server_turn(void) {
    bool did = false;
    if (poll(polled, 1 + PEERS, 0) <= 0)
        return false;
    for (int i = 1; i <= PEERS; i++) {
        if (polled[i].fd < 0 || !polled[i].revents)
            continue;
        did = true;
        if (serve(polled[i].fd))
            continue;
        close(polled[i].fd);
        polled[i].fd = -1;
        peers--;
    }
    int place = 1;
    while (place <= PEERS && polled[place].fd >= 0)
        place++;
    if (!polled[0].revents || place > PEERS)
        return did;
    polled[place].fd = accept4(polled[0].fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    peers += polled[place].fd >= 0;
    return did || polled[place].fd >= 0;
}

static void remove_path(void) { unlink(path); }

/* ---- The client ------------------------------------------------------------------------------ */

static bool is_fine(enum kld_status status, const struct kld_error *err) {
    if (status)
        require_error(status, err);
    return status == KLD_OK;
}

static void fill(struct kld_request *request, float *values, uint64_t rows) {
    memset(request, 0, sizeof *request);
    kld_op_init(&request->op);
    request->op.rank = 2;
    request->op.shape[0] = rows;
    request->op.shape[1] = CLASSES;
    request->timeout_ns = CALL_NS;
    const enum kld_slot slots[] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS, KLD_SLOT_GRAD_TARGETS};
    for (int i = 0; i < 3; i++) {
        request->op.tensor[slots[i]].dtype = KLD_DTYPE_FP32;
        request->bytes[slots[i]].data = values + (size_t)i * rows * CLASSES;
    }
}

static void attach(struct kld_connection *connection, float *values, struct kld_error *err) {
    struct kld_tensor_view view;
    struct kld_region *region = NULL;
    struct kld_request request;
    struct kld_result result;
    uint64_t elements = 1;
    if (!is_fine(kld_attach(connection, "x", 1000000, &region, &view, err), err))
        return;
    require(view.rank >= 1 && view.rank <= KLD_RANK_MAX && kld_dtype_bytes(view.dtype) != 0);
    for (uint32_t i = 0; i < view.rank; i++)
        require(view.shape[i] && !__builtin_mul_overflow(elements, view.shape[i], &elements));
    fill(&request, values, 2);
    request.bytes[KLD_SLOT_TARGETS] = (struct kld_bytes){.region = region};
    is_fine(kld_run(connection, &request, &result, err), err);
    kld_region_drop(region);
}

static void ended(void *user, enum kld_status status, const struct kld_result *result,
                  const struct kld_error *error) {
    if (status)
        require_error(status, error);
    ++*(unsigned *)user;
}

static void take_ends(struct kld_connection *connection, const unsigned *over, unsigned begun,
                      struct kld_error *err) {
    uint64_t until = fuzz_now_ns() + 2 * CALL_NS;
    while (*over < begun && fuzz_now_ns() < until)
        is_fine(kld_process(connection, 1, err), err);
    require(*over <= begun);
}

/* With a deadline: kld_copy() has none, and waits as long as the server is there. */
static void copy(struct kld_connection *connection, struct kld_region *to, struct kld_region *from,
                 unsigned *over, struct kld_error *err) {
    uint64_t id;
    take_ends(
        connection, over,
        is_fine(kld_submit_copy(connection, to, 0, from, 0, 64, 0, CALL_NS, ended, over, &id, err),
                err),
        err);
}

static void share(struct kld_connection *connection, unsigned *over, struct kld_error *err) {
    const struct kld_tensor_view view = {.dtype = KLD_DTYPE_FP32, .rank = 2, .shape = {2, CLASSES}};
    struct kld_region *region = NULL, *pool = NULL;
    if (is_fine(kld_region_create(connection, 4096, &region, err), err)) {
        if (is_fine(kld_publish(connection, "mine", region, &view, NULL, 0, err), err))
            is_fine(kld_detach(connection, "mine", err), err);
        if (is_fine(kld_region_create_pool(connection, 4096, &pool, err), err)) {
            copy(connection, pool, region, over, err);
            kld_region_drop(pool);
        }
        kld_region_drop(region);
    }
}

static void use_events(struct kld_connection *connection, struct kld_error *err) {
    uint8_t handle[64] = {1}, uuid[16];
    struct kld_event *event = NULL, *other = NULL;
    struct kld_region *region = NULL;
    memset(uuid, 7, sizeof uuid);
    if (is_fine(kld_event_create(connection, handle, &event, err), err))
        kld_event_drop(event);
    if (is_fine(kld_event_import(connection, handle, uuid, &other, err), err))
        kld_event_drop(other);
    uint32_t *word = NULL;
    if (is_fine(kld_fence_create(connection, &word, &event, err), err)) {
        require(word && (*word != 1 || kld_fence_passed(event, 1)));
        kld_event_drop(event);
    }
    if (is_fine(kld_region_import_cuda_ipc(connection, handle, uuid, 4096, 0, 4096, &region, err),
                err))
        kld_region_drop(region);
    is_fine(kld_stream_priority(connection, 1, 1, err), err);
}

/* What the device did not write is not told as computed, whoever wrote ahead of it since. */
static void use_fence(struct kld_connection *connection, float *values, struct kld_error *err) {
    struct kld_event *fence = NULL;
    struct kld_request request;
    struct kld_result result;
    uint32_t *word;
    if (!is_fine(kld_fence_create(connection, &word, &fence, err), err))
        return;
    device_word = (_Atomic uint32_t *)(void *)word;
    device_number = 0;
    fill(&request, values, 4);
    request.record = fence;
    for (int i = 0; i < 3; i++) {
        uint32_t number = is_fine(kld_run(connection, &request, &result, err), err)
                              ? result.fence_number
                              : device_number + 1;
        if (number - 1 < NUMBERS_MAX && kld_fence_passed(fence, number))
            require(number <= device_number);
    }
    device_word = NULL;
    kld_event_drop(fence);
}

static void ask(struct kld_connection *connection, struct kld_error *err) {
    struct kld_server_info info;
    struct kld_server_stats stats;
    uint64_t ns;
    if (is_fine(kld_info(connection, &info, err), err)) {
        require(memchr(info.backend, 0, sizeof info.backend) != NULL);
        require(memchr(info.device, 0, sizeof info.device) != NULL);
        require(memchr(info.version, 0, sizeof info.version) != NULL);
    }
    is_fine(kld_ping(connection, &ns, err), err);
    is_fine(kld_stats(connection, &stats, err), err);
}

/* Several in flight, one of them cancelled; those that do not end here end with the connection. */
static void submit_some(struct kld_connection *connection, float *values, unsigned *over,
                        struct kld_error *err) {
    struct kld_request request;
    uint64_t id[3] = {0};
    unsigned begun = 0;
    fill(&request, values, 4);
    for (int i = 0; i < 3; i++)
        begun += is_fine(kld_submit(connection, &request, ended, over, &id[i], err), err);
    if (begun > 1)
        kld_cancel(connection, id[1]);
    take_ends(connection, over, begun, err);
}

static void use(uint8_t what, const struct kld_connect_options *options) {
    static float values[3 * 64 * CLASSES];
    struct kld_connection *connection = NULL;
    struct kld_error err = {.status = KLD_OK};
    struct kld_request request;
    struct kld_result result;
    unsigned over[2] = {
        0}; /* calls that do not end here may do so until the connection is closed */
    if (!is_fine(kld_connect(url, options, &connection, &err), &err))
        return;
    fill(&request, values, 4);
    if (!(what & 1) && is_fine(kld_run(connection, &request, &result, &err), &err))
        require(result.attempts >= 1);
    if (what & 2)
        ask(connection, &err);
    if (what & 4)
        share(connection, &over[0], &err);
    if (what & 8)
        attach(connection, values, &err);
    if (what & 16)
        use_events(connection, &err);
    if (what & 128)
        use_fence(connection, values, &err);
    if (what & 32)
        submit_some(connection, values, &over[1], &err);
    kld_close(connection);
}

static void require_right(void) {
    static float values[3 * 4 * CLASSES];
    struct kld_connection *connection = NULL;
    struct kld_error err = {.status = KLD_OK};
    struct kld_request request;
    struct kld_result result;
    fill(&request, values, 4);
    request.timeout_ns = 5000000000u;
    require(kld_connect(url, NULL, &connection, &err) == KLD_OK);
    require(kld_run(connection, &request, &result, &err) == KLD_OK);
    require(result.scalar && result.loss == LOSS);
    kld_close(connection);
}

static void require_no_peers(void) {
    fuzz_turns_give();
    require(peers == 0);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(path, sizeof path, "/tmp/kld-answers-%d.sock", (int)getpid());
    snprintf(url, sizeof url, "unix:%s", path);
    strcpy(address.sun_path, path);
    atexit(remove_path);
    unlink(path);
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    require(bind(listener, (struct sockaddr *)&address, sizeof address) == 0);
    require(listen(listener, 16) == 0);
    for (int i = 0; i <= PEERS; i++)
        polled[i] = (struct pollfd){.fd = i ? -1 : listener, .events = POLLIN};
    fuzz_turns_open(server_turn, 0);
    require_right();
    require_no_peers();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (!fds_at_rest) /* not before: libFuzzer opens some of its own */
        fds_at_rest = fuzz_open_fds();
    const struct kld_connect_options options = {.connect_timeout_ns = CONNECT_NS,
                                                .staging_bytes_max = 1 << 20};
    script = (struct fuzz_input){data, data + bytes};
    uint8_t what = fuzz_byte(&script);
    uint64_t began = fuzz_now_ns();
    fuzz_turns_between(what & 64);
    use(what, &options);
    require(fuzz_now_ns() - began < RETURNS_NS);
    script = (struct fuzz_input){NULL, NULL};
    require_no_peers();
    require_right();
    require_no_peers();
    fuzz_require_fds(fds_at_rest);
    fuzz_require_no_leaks();
    return 0;
}
