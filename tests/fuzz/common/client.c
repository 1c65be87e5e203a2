/* client.c - see client.h. */
#include "tests/fuzz/common/client.h"

#include <string.h>
#include <unistd.h>

#define ANSWER_WAIT_MS 30000

void fuzz_client_open(struct fuzz_client *client, struct fuzz_host *host) {
    memset(client, 0, sizeof *client);
    client->fd = fuzz_connect(host);
    client->next_number = FUZZ_NUMBER_MIN;
}

void fuzz_client_close(struct fuzz_client *client) {
    if (client->fd >= 0)
        close(client->fd);
    client->fd = -1;
}

static enum kld_frame_type answer_of(uint16_t type) {
    switch (type) {
    case KLD_FRAME_HELLO: return KLD_FRAME_WELCOME;
    case KLD_FRAME_REGION_ADD:
    case KLD_FRAME_REGION_GROW: return KLD_FRAME_REGION;
    case KLD_FRAME_EVENT_ADD:
    case KLD_FRAME_FENCE_ADD: return KLD_FRAME_EVENT;
    case KLD_FRAME_ATTACH: return KLD_FRAME_ATTACHED;
    case KLD_FRAME_STATS: return KLD_FRAME_STATS_REPLY;
    case KLD_FRAME_PING: return KLD_FRAME_PONG;
    default: return KLD_FRAME_DONE;
    }
}

static void wants_answer(struct fuzz_client *client, const union kld_frame *frame) {
    unsigned i = 0;
    if (frame->header.type == KLD_FRAME_TRACE) /* that one has none if it is good */
        return;
    while (client->pending[i].number)
        i++;
    client->pending[i] =
        (struct fuzz_pending){.number = frame->header.request, .type = frame->header.type};
    client->pending_count++;
}

uint64_t fuzz_client_send(struct fuzz_client *client, union kld_frame *frame, const int *fds,
                          unsigned count) {
    if (client->fd < 0 || client->pending_count == FUZZ_PENDING_MAX)
        return 0;
    uint64_t number = frame->header.request = ++client->next_number;
    if (!fuzz_send(client->fd, frame, frame->header.length, fds, count))
        return 0;
    wants_answer(client, frame);
    return frame->header.type == KLD_FRAME_TRACE ? 0 : number;
}

bool fuzz_client_send_packet(struct fuzz_client *client, union kld_frame *frames, unsigned count) {
    uint8_t packet[KLD_WIRE_PACKET_BYTES_MAX];
    size_t bytes = 0;
    if (client->fd < 0 || client->pending_count + count > FUZZ_PENDING_MAX)
        return false;
    for (unsigned i = 0; i < count; i++) {
        frames[i].header.request = ++client->next_number;
        require(bytes + frames[i].header.length <= sizeof packet);
        memcpy(packet + bytes, &frames[i], frames[i].header.length);
        bytes += frames[i].header.length;
    }
    if (!fuzz_send(client->fd, packet, bytes, NULL, 0))
        return false;
    for (unsigned i = 0; i < count; i++)
        wants_answer(client, &frames[i]);
    client->packs = client->packs || count > 1;
    return true;
}

static void answered(struct fuzz_client *client, const union kld_frame *frame) {
    uint64_t number = frame->header.request;
    unsigned i = 0;
    if (frame->header.type == KLD_FRAME_ERROR) {
        struct kld_error err = {.status = (enum kld_status)frame->as_ERROR.status};
        memcpy(err.text, frame->as_ERROR.text, sizeof err.text);
        require_error(err.status, &err);
        client->refused = client->refused || (!number && err.status == KLD_BUSY);
    }
    if (frame->header.type == KLD_FRAME_REGION)
        client->region[client->regions++ % FUZZ_KEPT] = frame->as_REGION.region;
    if (frame->header.type == KLD_FRAME_ATTACHED)
        client->region[client->regions++ % FUZZ_KEPT] = frame->as_ATTACHED.region;
    if (frame->header.type == KLD_FRAME_EVENT)
        client->event[client->events++ % FUZZ_KEPT] = frame->as_EVENT.event;
    if (number < FUZZ_NUMBER_MIN)
        return;
    while (i < FUZZ_PENDING_MAX && client->pending[i].number != number)
        i++;
    if (i == FUZZ_PENDING_MAX) { /* of a TRACE that was refused */
        require(frame->header.type == KLD_FRAME_ERROR && number <= client->next_number);
        return;
    }
    require(frame->header.type == KLD_FRAME_ERROR ||
            frame->header.type == answer_of(client->pending[i].type));
    client->pending[i].number = 0;
    client->pending_count--;
}

/* Each of a packet's frames; whether one of them answers `number`, which is then *ret_frame. */
static bool took(struct fuzz_client *client, const struct fuzz_packet *packet, uint64_t number,
                 union kld_frame *ret_frame) {
    union kld_frame frame;
    bool found = false;
    for (size_t at = 0; at < packet->bytes; at += frame.header.length) {
        memcpy(&frame, packet->data + at, sizeof frame.header);
        require(client->packs || frame.header.length == packet->bytes);
        memcpy(&frame, packet->data + at, frame.header.length);
        answered(client, &frame);
        if (ret_frame && !found)
            *ret_frame = frame;
        found = found || (number && frame.header.request == number);
    }
    return found;
}

bool fuzz_client_take(struct fuzz_client *client, uint64_t number, int ms,
                      union kld_frame *ret_frame) {
    struct fuzz_packet packet;
    int came;
    while (client->fd >= 0 && (came = fuzz_receive(client->fd, ms, &packet)) >= 0) {
        if (came == 0) {
            require(client->cut || client->refused); /* nobody is hung up on */
            fuzz_client_close(client);
            return false;
        }
        if (took(client, &packet, number, ret_frame))
            return true;
    }
    return false;
}

void fuzz_client_settle(struct fuzz_client *client) {
    uint64_t until = fuzz_now_ns() + ANSWER_WAIT_MS * UINT64_C(1000000);
    union kld_frame frame;
    uint64_t number = 0;
    fuzz_client_take(client, 0, 0, NULL);
    while (client->fd >= 0 && !client->cut && !client->refused && !number) {
        require(fuzz_now_ns() < until); /* it reads again once it was read from */
        kld_frame_init(&frame, KLD_FRAME_PING, 0);
        number = fuzz_client_send(client, &frame, NULL, 0);
        fuzz_client_take(client, 0, number ? 0 : 1, NULL);
    }
    while (client->fd >= 0 && !client->cut && !client->refused && client->pending_count) {
        require(fuzz_now_ns() < until);
        fuzz_client_take(client, 0, 1, NULL);
    }
}

void fuzz_client_hello(struct fuzz_client *client) {
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_HELLO, 0);
    frame.as_HELLO.version_min = frame.as_HELLO.version_max = KLD_WIRE_VERSION;
    strcpy(frame.as_HELLO.client_name, "fuzz");
    fuzz_client_send(client, &frame, NULL, 0);
}
