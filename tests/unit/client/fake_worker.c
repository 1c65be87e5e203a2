/* fake_worker.c - see fake_worker.h. One thread, poll(), blocking sends of small frames. */
#include "tests/unit/client/fake_worker.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

struct fake_publication;

struct fake_region {
    uint64_t id, bytes;
    char *data;
    struct fake_publication *attached; /* its memory is another's */
    uint64_t unanswered;               /* the request that registered it; 0: it was answered */
    uint64_t has_bytes;                /* of a space, whose pieces are memfds; else as `bytes` */
};

/* Of any client. */
struct fake_publication {
    struct kld_frame_publish frame;
    struct fake_client *owner; /* NULL: free */
    struct fake_region region; /* whose memory it is */
};

struct fake_held {
    union kld_frame frame; /* SUBMIT or COPY */
    int answered;
};

struct fake_fence {
    uint64_t event; /* 0: free */
    _Atomic uint32_t *word;
    uint32_t number;
};

struct fake_client {
    struct fake_worker *worker;
    int fd;
    uint64_t last_event;
    struct fake_fence fences[8];
    int device_lost, leaving;
    uint64_t last_region;
    struct fake_region regions[FAKE_REGIONS_MAX];
    struct fake_held held[64]; /* in order of arrival */
    int held_count;
};

/* Of a worker, so of its thread. */
static _Thread_local struct fake_publication publications[16];

static void reply(struct fake_client *client, const union kld_frame *frame) {
    union kld_frame sent = *frame;
    sent.header.length -= frame->header.type == client->worker->cut_type ? 8 : 0;
    send(client->fd, &sent, sent.header.length, MSG_NOSIGNAL);
}

static void reply_error(struct fake_client *client, uint64_t request, enum kld_status status) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_ERROR, request);
    frame.as_ERROR.status = (uint32_t)status;
    if (!client->worker->wordless)
        snprintf(frame.as_ERROR.text, sizeof frame.as_ERROR.text, "fake: %s",
                 kld_status_text(status));
    reply(client, &frame);
}

static struct fake_region *region_find(struct fake_client *client, uint64_t id) {
    for (int i = 0; i < FAKE_REGIONS_MAX; i++)
        if (client->regions[i].id == id)
            return &client->regions[i];
    return NULL;
}

static void publications_end(const struct fake_client *owner, uint64_t region) {
    for (int i = 0; i < 16; i++)
        if (publications[i].owner == owner && (!region || publications[i].region.id == region))
            publications[i].owner = NULL;
}

static struct fake_publication *publication_find(const struct fake_worker *worker,
                                                 const char *name) {
    for (int i = 0; i < 16; i++)
        if (publications[i].owner && publications[i].owner->worker == worker &&
            strcmp(publications[i].frame.name, name) == 0)
            return &publications[i];
    return NULL;
}

static void region_close(struct fake_worker *worker, struct fake_region *region) {
    if (region->data && !region->attached)
        munmap(region->data, region->bytes);
    memset(region, 0, sizeof *region);
    worker->regions_now--;
}

static void client_close(struct fake_worker *worker, struct fake_client *client) {
    publications_end(client, 0);
    worker->events_now -= (int)client->last_event;
    for (int i = 0; i < FAKE_REGIONS_MAX; i++)
        if (client->regions[i].id)
            region_close(worker, &client->regions[i]);
    close(client->fd);
    memset(client, 0, sizeof *client);
    client->fd = -1;
}

static void answer_regions(struct fake_client *client) {
    for (int i = 0; i < FAKE_REGIONS_MAX; i++) {
        struct fake_region *region = &client->regions[i];
        union kld_frame frame;
        if (!region->unanswered)
            continue;
        kld_frame_init(&frame, KLD_FRAME_REGION, region->unanswered);
        frame.as_REGION.region = region->id;
        frame.as_REGION.bytes = region->has_bytes;
        region->unanswered = 0;
        reply(client, &frame);
    }
}

static void region_add(struct fake_worker *worker, struct fake_client *client,
                       const struct kld_frame_region_add *add, int fd) {
    struct fake_region *region = region_find(client, 0);
    worker->regions_added++;
    int refuse = worker->refuse_regions_once ? worker->refuse_regions_once : worker->refuse_regions;
    worker->refuse_regions_once = 0;
    if (worker->shared_bytes_max && add->bytes > worker->shared_bytes_max)
        refuse = KLD_TOO_LARGE;
    if (worker->one_region && worker->regions_now)
        refuse = KLD_TOO_LARGE;
    if (refuse || !region) {
        reply_error(client, add->header.request, (enum kld_status)refuse);
        return;
    }
    void *data = fd >= 0 ? mmap(NULL, add->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                         : mmap(NULL, add->bytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t has = add->kind == KLD_REGION_CUDA_SPACE ? 0 : add->bytes;
    *region = (struct fake_region){++client->last_region, add->bytes, data, NULL,
                                   add->header.request,   has};
    worker->regions_now++;
    if (!worker->slow_regions)
        answer_regions(client);
}

static void region_grow(struct fake_worker *worker, struct fake_client *client,
                        const struct kld_frame_region_grow *grow, int fd) {
    struct fake_region *region = region_find(client, grow->region);
    worker->pieces++;
    if (worker->refuse_grow || !region || region->unanswered ||
        grow->offset_bytes != region->has_bytes) {
        reply_error(client, grow->header.request,
                    worker->refuse_grow ? (enum kld_status)worker->refuse_grow : KLD_NOT_FOUND);
        return;
    }
    mmap(region->data + grow->offset_bytes, grow->bytes, PROT_READ | PROT_WRITE,
         MAP_SHARED | MAP_FIXED, fd, 0);
    region->has_bytes += grow->bytes;
    region->unanswered = grow->header.request;
    if (!worker->slow_regions)
        answer_regions(client);
}

static float *tensor_row(struct fake_client *client, const struct kld_frame_submit *submit,
                         enum kld_slot slot, uint64_t row, uint64_t classes) {
    const struct kld_wire_tensor *tensor = &submit->tensor[slot];
    struct fake_region *region = tensor->dtype ? region_find(client, tensor->region) : NULL;
    uint64_t stride = tensor->row_stride_bytes ? tensor->row_stride_bytes : classes * 4;
    return region ? (float *)(region->data + tensor->offset_bytes + row * stride) : NULL;
}

/* The number of a request, which the device has reached, unless it is stuck. */
static uint32_t fence_number(struct fake_client *client, const struct kld_frame_submit *submit) {
    for (int i = 0; i < 8; i++) {
        struct fake_fence *fence = &client->fences[i];
        if (!submit->done_event || fence->event != submit->done_event)
            continue;
        fence->number++;
        if (!client->worker->stuck)
            atomic_store(fence->word, fence->number);
        return fence->number;
    }
    return 0;
}

static void submit_done(struct fake_client *client, const struct kld_frame_submit *submit,
                        int answer) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_DONE, submit->header.request);
    uint64_t rows = submit->rank == 2 ? submit->shape[0] : 1;
    uint64_t classes = submit->shape[submit->rank - 1];
    for (uint64_t row = 0; row < rows; row++) {
        float *q = tensor_row(client, submit, KLD_SLOT_PREDICTIONS, row, classes);
        float *p = tensor_row(client, submit, KLD_SLOT_TARGETS, row, classes);
        float *gradient = tensor_row(client, submit, KLD_SLOT_GRAD_PREDICTIONS, row, classes);
        const struct fake_region *targets =
            region_find(client, submit->tensor[KLD_SLOT_TARGETS].region);
        if (!q || !p || (targets->attached && !targets->attached->owner)) {
            reply_error(client, submit->header.request, q && p ? KLD_GONE : KLD_NOT_FOUND);
            return;
        }
        for (uint64_t i = 0; i < classes; i++) {
            frame.as_DONE.loss += (double)q[i] - (double)p[i];
            if (gradient)
                gradient[i] = 2 * q[i];
        }
    }
    frame.as_DONE.scalar = 1;
    frame.as_DONE.kernel_ns = 7;
    if (submit->flags & KLD_SUBMIT_EARLY) {
        kld_frame_init(&frame, KLD_FRAME_DONE, submit->header.request);
        if (submit->ready_event == 0 || submit->done_event == 0 ||
            submit->ready_event > client->last_event || submit->done_event > client->last_event)
            abort();
    }
    frame.as_DONE.fence_number = fence_number(client, submit);
    if (answer)
        reply(client, &frame);
}

static int due(atomic_int *countdown) { return *countdown > 0 && --*countdown == 0; }

/* 0: the connection ends here. */
static int submit_received(struct fake_worker *worker, struct fake_client *client,
                           const struct kld_frame_submit *submit) {
    /* What the test set is read before it can see that the request is here, and set something else
     * for the next. */
    int dies = due(&worker->die_at_submit), lost = !dies && due(&worker->lost_at_submit);
    int leaves = !dies && due(&worker->leave_at_submit), hold = worker->hold;
    int poison = worker->poison_rows;
    worker->submits++;
    worker->traced += worker->last_trace.target == submit->header.request;
    worker->early += submit->flags & KLD_SUBMIT_EARLY ? 1 : 0;
    if (dies) {
        worker->mute = 0;
        return 0;
    }
    if (lost || (poison && submit->shape[0] == (uint64_t)poison))
        client->device_lost = 1;
    if (leaves)
        client->leaving = 1;
    if (client->device_lost)
        reply_error(client, submit->header.request, KLD_DEVICE_LOST);
    else if (client->leaving)
        reply_error(client, submit->header.request, KLD_UNAVAILABLE);
    else if (due(&worker->busy_at_submit))
        reply_error(client, submit->header.request, KLD_BUSY);
    else if (hold && client->held_count < 64)
        client->held[client->held_count++] = (struct fake_held){{.as_SUBMIT = *submit}, 0};
    else
        submit_done(client, submit, !worker->mute);
    return 1;
}

static void cancel(struct fake_worker *worker, struct fake_client *client,
                   const struct kld_frame_cancel *frame) {
    worker->cancels++;
    for (int i = 0; i < client->held_count; i++) {
        if (client->held[i].frame.header.request != frame->target || client->held[i].answered)
            continue;
        reply_error(client, frame->target, KLD_CANCELLED);
        client->held[i].answered = 1;
        if (!worker->linger)
            memmove(&client->held[i], &client->held[i + 1],
                    (size_t)(--client->held_count - i) * sizeof client->held[0]);
        break;
    }
    union kld_frame done;
    kld_frame_init(&done, KLD_FRAME_DONE, frame->header.request);
    reply(client, &done);
}

static void copy(struct fake_client *client, const struct kld_frame_copy *frame, int answer) {
    struct fake_region *to = region_find(client, frame->destination);
    struct fake_region *from = region_find(client, frame->source);
    memcpy(to->data + frame->destination_offset_bytes, from->data + frame->source_offset_bytes,
           frame->bytes);
    union kld_frame done;
    kld_frame_init(&done, KLD_FRAME_DONE, frame->header.request);
    if (answer)
        reply(client, &done);
}

static void release_held(struct fake_client *client) {
    for (int i = 0; i < client->held_count; i++) {
        const struct fake_held *held = &client->held[i];
        if (held->frame.header.type == KLD_FRAME_COPY)
            copy(client, &held->frame.as_COPY, 1);
        else
            submit_done(client, &held->frame.as_SUBMIT, !held->answered);
    }
    client->held_count = 0;
}

static void copy_received(struct fake_worker *worker, struct fake_client *client,
                          const struct kld_frame_copy *frame) {
    int keep = worker->hold && worker->linger && client->held_count < 64, mute = worker->mute;
    if (due(&worker->leave_at_copy))
        client->leaving = 1;
    int leaves = client->leaving;
    worker->copies++; /* as with submits */
    if (leaves)
        reply_error(client, frame->header.request, KLD_UNAVAILABLE);
    else if (keep)
        client->held[client->held_count++] = (struct fake_held){{.as_COPY = *frame}, 0};
    else
        copy(client, frame, !mute);
}

static void hello(struct fake_worker *worker, struct fake_client *client, uint64_t request) {
    if (worker->refuse_hello) {
        reply_error(client, request, (enum kld_status)worker->refuse_hello);
        return;
    }
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_WELCOME, request);
    struct kld_frame_welcome *welcome = &frame.as_WELCOME;
    welcome->epoch = worker->epoch ? worker->epoch : (uint64_t)worker->accepted;
    welcome->version = KLD_WIRE_VERSION;
    welcome->device = (uint16_t)worker->device;
    welcome->devices = worker->devices ? worker->devices : 1;
    snprintf(welcome->backend, sizeof welcome->backend, "fake");
    for (uint32_t i = 0; i < welcome->devices; i++) {
        welcome->device_list[i].uuid[0] = worker->devices ? (uint8_t)(i + 1) : 0;
        snprintf(welcome->device_list[i].name, KLD_WIRE_NAME_MAX, "fake device");
    }
    welcome->regions_max = worker->regions_max;
    welcome->requests_max = worker->requests_max;
    welcome->streams_max = 4;
    welcome->flags = worker->flags;
    welcome->region_bytes_max = worker->region_bytes_max;
    reply(client, &frame);
}

static void reply_done(struct fake_client *client, uint64_t request) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_DONE, request);
    reply(client, &frame);
}

static void publish(struct fake_worker *worker, struct fake_client *client,
                    const struct kld_frame_publish *frame) {
    int i = 0;
    while (i < 15 && publications[i].owner)
        i++;
    struct fake_region *region = region_find(client, frame->region);
    if (!region || publication_find(worker, frame->name)) {
        reply_error(client, frame->header.request, region ? KLD_EXISTS : KLD_NOT_FOUND);
        return;
    }
    worker->published++;
    publications[i] = (struct fake_publication){*frame, client, *region};
    reply_done(client, frame->header.request);
}

/* second: of another ERROR in the same packet; 0: none. */
static void not_found(struct fake_client *client, uint64_t request, uint32_t second) {
    union kld_frame frames[2];
    uint8_t packet[sizeof frames];
    size_t bytes = 0;
    for (int i = 0; i < (second ? 2 : 1); i++) {
        kld_frame_init(&frames[i], KLD_FRAME_ERROR, request);
        frames[i].as_ERROR.status = i ? second : KLD_NOT_FOUND;
        memcpy(packet + bytes, &frames[i], frames[i].header.length);
        bytes += frames[i].header.length;
    }
    send(client->fd, packet, bytes, MSG_NOSIGNAL);
}

static void attach(struct fake_worker *worker, struct fake_client *client,
                   const struct kld_frame_attach *frame) {
    struct fake_publication *publication = publication_find(worker, frame->name);
    struct fake_region *region = region_find(client, 0);
    if (!publication) {
        not_found(client, frame->header.request, (uint32_t)worker->behind_not_found);
        return;
    }
    worker->attached++;
    worker->regions_now++;
    uint64_t offset = publication->frame.offset_bytes;
    *region = (struct fake_region){++client->last_region,
                                   publication->region.bytes - offset,
                                   publication->region.data + offset,
                                   publication,
                                   0,
                                   0};
    union kld_frame answer;
    kld_frame_init(&answer, KLD_FRAME_ATTACHED, frame->header.request);
    answer.as_ATTACHED.region = region->id;
    answer.as_ATTACHED.bytes = region->bytes;
    answer.as_ATTACHED.tensor = publication->frame.tensor;
    answer.as_ATTACHED.uid = frame->uid;
    if (worker->attached_rank)
        answer.as_ATTACHED.tensor.rank = (uint32_t)worker->attached_rank;
    reply(client, &answer);
}

static void detach(struct fake_worker *worker, struct fake_client *client,
                   const struct kld_frame_name *frame) {
    struct fake_publication *publication = publication_find(worker, frame->name);
    worker->detached++;
    if (publication)
        publication->owner = NULL;
    reply_done(client, frame->header.request);
}

static void event_add(struct fake_worker *worker, struct fake_client *client,
                      const struct kld_frame_event_add *frame) {
    worker->events_added++;
    worker->events_now++;
    union kld_frame answer;
    kld_frame_init(&answer, KLD_FRAME_EVENT, frame->header.request);
    answer.as_EVENT.event = ++client->last_event;
    memset(answer.as_EVENT.ipc_handle, frame->kind == KLD_EVENT_DONE ? 0x5a : 0, 64);
    reply(client, &answer);
}

static void fence_add(struct fake_worker *worker, struct fake_client *client,
                      const struct kld_frame_fence_add *frame) {
    struct fake_region *region = region_find(client, frame->region);
    int i = 0;
    while (i < 8 && client->fences[i].event)
        i++;
    if (worker->refuse_fences || i == 8 || !region) {
        reply_error(client, frame->header.request,
                    worker->refuse_fences ? (enum kld_status)worker->refuse_fences : KLD_NOT_FOUND);
        return;
    }
    worker->events_added++;
    worker->events_now++;
    union kld_frame answer;
    kld_frame_init(&answer, KLD_FRAME_EVENT, frame->header.request);
    answer.as_EVENT.event = ++client->last_event;
    client->fences[i] = (struct fake_fence){
        client->last_event, (_Atomic uint32_t *)(void *)(region->data + frame->offset_bytes), 0};
    reply(client, &answer);
}

static void event_drop(struct fake_worker *worker, struct fake_client *client,
                       const struct kld_frame_event_drop *frame) {
    worker->events_dropped++;
    for (int i = 0; i < 8; i++)
        if (client->fences[i].event == frame->event)
            client->fences[i] = (struct fake_fence){0};
    reply_done(client, frame->header.request);
}

/* What is shared with others; 0: another frame. */
static int share(struct fake_worker *worker, struct fake_client *client,
                 const union kld_frame *frame) {
    switch (frame->header.type) {
    case KLD_FRAME_PUBLISH: publish(worker, client, &frame->as_PUBLISH); return 1;
    case KLD_FRAME_ATTACH: attach(worker, client, &frame->as_ATTACH); return 1;
    case KLD_FRAME_DETACH: detach(worker, client, &frame->as_DETACH); return 1;
    case KLD_FRAME_EVENT_ADD: event_add(worker, client, &frame->as_EVENT_ADD); return 1;
    case KLD_FRAME_FENCE_ADD: fence_add(worker, client, &frame->as_FENCE_ADD); return 1;
    case KLD_FRAME_EVENT_DROP: event_drop(worker, client, &frame->as_EVENT_DROP); return 1;
    case KLD_FRAME_TRACE:
        worker->traces++;
        worker->last_trace = frame->as_TRACE;
        return 1;
    case KLD_FRAME_STREAM:
        worker->streams_set++;
        worker->last_priority = frame->as_STREAM.priority;
        reply_done(client, frame->header.request);
        return 1;
    default: return 0;
    }
}

static void region_drop(struct fake_worker *worker, struct fake_client *client,
                        const struct kld_frame_region_drop *frame) {
    struct fake_region *region = region_find(client, frame->region);
    worker->regions_dropped++;
    if (region)
        publications_end(client, region->id);
    if (region)
        region_close(worker, region);
}

static void plain(struct fake_client *client, const union kld_frame *frame) {
    union kld_frame answer;
    kld_frame_init(&answer,
                   frame->header.type == KLD_FRAME_PING ? KLD_FRAME_PONG : KLD_FRAME_STATS_REPLY,
                   frame->header.request);
    if (frame->header.type == KLD_FRAME_STATS)
        answer.as_STATS_REPLY.requests_total = 42;
    reply(client, &answer);
}

static int frame_received(struct fake_worker *worker, struct fake_client *client,
                          const union kld_frame *frame, int fd) {
    if (worker->garbage) {
        worker->garbage = 0;
        send(client->fd, "nonsense", 8, MSG_NOSIGNAL);
        return 1;
    }
    if (share(worker, client, frame))
        return 1;
    switch (frame->header.type) {
    case KLD_FRAME_HELLO: hello(worker, client, frame->header.request); return 1;
    case KLD_FRAME_REGION_ADD: region_add(worker, client, &frame->as_REGION_ADD, fd); return 1;
    case KLD_FRAME_REGION_GROW: region_grow(worker, client, &frame->as_REGION_GROW, fd); return 1;
    case KLD_FRAME_REGION_DROP: region_drop(worker, client, &frame->as_REGION_DROP); return 1;
    case KLD_FRAME_COPY: copy_received(worker, client, &frame->as_COPY); return 1;
    case KLD_FRAME_SUBMIT: return submit_received(worker, client, &frame->as_SUBMIT);
    case KLD_FRAME_CANCEL: cancel(worker, client, &frame->as_CANCEL); return 1;
    default: plain(client, frame); return 1;
    }
}

static int packet_received(struct fake_worker *worker, struct fake_client *client,
                           const uint8_t *data, size_t bytes, int fd) {
    int more = 1;
    worker->packets++;
    for (size_t at = 0; at < bytes && more;) {
        union kld_frame frame;
        memcpy(&frame, data + at, sizeof frame.header);
        memcpy(&frame, data + at, frame.header.length);
        more = frame_received(worker, client, &frame, fd);
        at += frame.header.length;
    }
    return more;
}

static int receive(struct fake_worker *worker, struct fake_client *client) {
    union {
        union kld_frame frame;
        uint8_t data[KLD_WIRE_PACKET_BYTES_MAX];
    } packet;
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec bytes = {&packet, sizeof packet};
    struct msghdr message = {.msg_iov = &bytes,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    ssize_t count = recvmsg(client->fd, &message, MSG_DONTWAIT);
    if (count <= 0)
        return count < 0;
    int fd = -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header)
        memcpy(&fd, CMSG_DATA(header), sizeof fd);
    uint64_t request;
    struct kld_error error = {0};
    unsigned frames;
    int more = 0;
    if (kld_packet_check(&packet, (size_t)count, fd >= 0, 0, &frames, &request, &error) ||
        (frames > 1 && !(worker->flags & KLD_WELCOME_PACKETS)))
        fprintf(stderr, "fake worker: %s\n", error.text);
    else
        more = packet_received(worker, client, packet.data, (size_t)count, fd);
    if (fd >= 0)
        close(fd);
    return more;
}

static void *run(void *argument) {
    struct fake_worker *worker = argument;
    struct fake_client *clients = calloc(FAKE_CLIENTS_MAX, sizeof *clients);
    for (int i = 0; i < FAKE_CLIENTS_MAX && clients; i++)
        clients[i].fd = -1;
    if (!clients)
        abort();
    while (!worker->stop) {
        struct pollfd polled[FAKE_CLIENTS_MAX + 1] = {{worker->listener, POLLIN, 0}};
        for (int i = 0; i < FAKE_CLIENTS_MAX; i++)
            polled[i + 1] = (struct pollfd){clients[i].fd, POLLIN, 0};
        poll(polled, FAKE_CLIENTS_MAX + 1, 5);
        for (int i = 0; i < FAKE_CLIENTS_MAX && worker->hang_up; i++)
            if (clients[i].fd >= 0)
                client_close(worker, &clients[i]);
        worker->hang_up = 0;
        for (int i = 0; i < FAKE_CLIENTS_MAX; i++) {
            struct fake_client *client = &clients[i];
            if (client->fd >= 0 && !worker->hold)
                release_held(client);
            if (client->fd >= 0 && !worker->slow_regions)
                answer_regions(client);
            if (client->fd == polled[i + 1].fd && client->fd >= 0 && polled[i + 1].revents &&
                !receive(worker, client)) {
                client_close(worker, client);
                worker->hang_up = worker->all_die;
            }
        }
        int free_slot = -1;
        for (int i = 0; i < FAKE_CLIENTS_MAX; i++)
            if (clients[i].fd < 0)
                free_slot = i;
        if (free_slot >= 0 && (polled[0].revents & POLLIN)) {
            clients[free_slot].worker = worker;
            clients[free_slot].fd = accept(worker->listener, NULL, NULL);
            worker->accepted += clients[free_slot].fd >= 0;
        }
    }
    for (int i = 0; i < FAKE_CLIENTS_MAX; i++)
        if (clients[i].fd >= 0)
            client_close(worker, &clients[i]);
    free(clients);
    return NULL;
}

void fake_worker_path(struct fake_worker *worker) {
    char folder[] = "/tmp/kld-fake-XXXXXX";
    if (!mkdtemp(folder))
        abort();
    snprintf(worker->path, sizeof worker->path, "%s/socket", folder);
}

void fake_worker_start(struct fake_worker *worker) {
    if (worker->requests_max == 0)
        worker->requests_max = 64;
    if (worker->regions_max == 0)
        worker->regions_max = 128;
    if (worker->region_bytes_max == 0)
        worker->region_bytes_max = 1ull << 40;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, worker->path, sizeof address.sun_path);
    worker->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (bind(worker->listener, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(worker->listener, 16) != 0 ||
        pthread_create(&worker->thread, NULL, run, worker) != 0)
        abort();
}

void fake_worker_open(struct fake_worker *worker) {
    fake_worker_path(worker);
    fake_worker_start(worker);
}

void fake_worker_open_beside(struct fake_worker *worker, const struct fake_worker *first) {
    snprintf(worker->path, sizeof worker->path, "%.100s.%u", first->path, worker->device);
    fake_worker_start(worker);
}

void fake_worker_close(struct fake_worker *worker) {
    worker->stop = 1;
    pthread_join(worker->thread, NULL);
    close(worker->listener);
    unlink(worker->path);
    *strrchr(worker->path, '/') = '\0';
    rmdir(worker->path);
}
