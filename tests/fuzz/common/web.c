/* web.c - see web.h. */
#include "tests/fuzz/common/web.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define ANSWER_WAIT_MS 30000

uint64_t fuzz_web_opened;

void fuzz_web_open(struct fuzz_web *web) {
    struct linger now = {.l_onoff = 1};
    web->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    require(web->fd >= 0);
    setsockopt(web->fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    uint64_t until = fuzz_now_ns() + ANSWER_WAIT_MS * UINT64_C(1000000);
    /* Ports of connections that the server ended are not free for a minute. */
    while (connect(web->fd, (struct sockaddr *)&web->address, sizeof web->address) != 0) {
        require((errno == EADDRNOTAVAIL || errno == EINTR) && fuzz_now_ns() < until);
        if (errno == EADDRNOTAVAIL)
            fuzz_nap_us(20000);
    }
    fuzz_web_opened++;
    web->raw = web->closes = false;
    web->heads = web->sent = 0;
    web->asked = web->status = 0;
    web->have = web->body_bytes = 0;
}

void fuzz_web_close(struct fuzz_web *web) {
    if (web->fd >= 0)
        close(web->fd);
    web->fd = -1;
}

void fuzz_web_ask(struct fuzz_web *web, bool head) {
    if (head)
        web->heads |= UINT64_C(1) << web->asked % 64;
    web->asked++;
}

static bool has(const char *head, const char *line) { return strcasestr(head, line) != NULL; }

/* The body's end in `text`, or NULL: not all of it is there. */
static const char *end_of_chunks(struct fuzz_web *web, const char *at, const char *end, char *to) {
    web->body = to;
    web->body_bytes = 0;
    for (;;) {
        const char *line = memmem(at, (size_t)(end - at), "\r\n", 2);
        if (!line)
            return NULL;
        size_t bytes = strtoull(at, NULL, 16);
        at = line + 2;
        if ((size_t)(end - at) < bytes + 2)
            return NULL;
        memcpy(to + web->body_bytes, at, bytes);
        web->body_bytes += bytes;
        at += bytes;
        require(at[0] == '\r' && at[1] == '\n');
        at += 2;
        if (!bytes)
            return at;
    }
}

/* One reply out of `text`; false: it is not whole yet. */
static bool take_reply(struct fuzz_web *web) {
    const char *end = web->text + web->have;
    const char *blank = memmem(web->text, web->have, "\r\n\r\n", 4);
    static char head[65536];
    if (!blank)
        return false;
    size_t head_bytes = (size_t)(blank + 4 - web->text);
    require(head_bytes < sizeof head);
    memcpy(head, web->text, head_bytes);
    head[head_bytes] = '\0';
    require(strncmp(head, "HTTP/1.", 7) == 0 && strlen(head) == head_bytes);
    unsigned status = (unsigned)atoi(head + 9);
    const char *body = blank + 4;
    if (status >= 200 && !(web->heads & 1) && has(head, "\r\nTransfer-Encoding: chunked")) {
        if (!(body = end_of_chunks(web, body, end, web->last)))
            return false;
    } else if (status >= 200 && !(web->heads & 1)) {
        const char *length = strcasestr(head, "\r\nContent-Length: ");
        size_t bytes = length ? strtoull(length + 18, NULL, 10) : 0;
        if ((size_t)(end - body) < bytes)
            return false;
        memcpy(web->last, body, bytes);
        web->body = web->last;
        web->body_bytes = bytes;
        body += bytes;
    }
    if (status >= 200) {
        require(status <= 505);
        require(web->asked > 0);
        if (--web->asked == 0)
            web->sent = 0;
        web->heads >>= 1;
        web->status = status;
        web->closes = web->closes || has(head, "\r\nConnection: close");
    }
    web->have = (size_t)(end - body);
    memmove(web->text, body, web->have);
    return true;
}

bool fuzz_web_take(struct fuzz_web *web, int ms) {
    struct pollfd poll_fd = {.fd = web->fd, .events = POLLIN};
    while (web->fd >= 0 && poll(&poll_fd, 1, ms) > 0) {
        if (web->have == sizeof web->text) /* of who does not look */
            web->have = 0;
        ssize_t bytes =
            recv(web->fd, web->text + web->have, sizeof web->text - web->have, MSG_DONTWAIT);
        if (bytes < 0 && (errno == EAGAIN || errno == EINTR))
            continue;
        if (bytes <= 0) {
            require(web->raw || (bytes == 0 && web->closes));
            fuzz_web_close(web);
            return false;
        }
        web->have += (size_t)bytes;
        if (web->raw)
            web->have = 0;
        while (!web->raw && web->asked && take_reply(web))
            ms = 0;
        ms = 0;
    }
    return web->fd >= 0;
}

bool fuzz_web_send(struct fuzz_web *web, const void *data, size_t bytes) {
    uint64_t until = fuzz_now_ns() + ANSWER_WAIT_MS * UINT64_C(1000000);
    const char *at = data;
    web->sent += bytes;
    web->raw = web->raw || web->sent > FUZZ_SENT_MAX;
    while (bytes && web->fd >= 0) {
        ssize_t sent = send(web->fd, at, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) {
            at += sent;
            bytes -= (size_t)sent;
            continue;
        }
        if (sent < 0 && errno != EAGAIN) {
            require(web->raw);
            fuzz_web_close(web);
            return false;
        }
        require(fuzz_now_ns() < until); /* it takes the bytes, or refuses them */
        if (!fuzz_web_take(web, 1))
            return false;
    }
    return web->fd >= 0;
}

void fuzz_web_settle(struct fuzz_web *web) {
    uint64_t until = fuzz_now_ns() + ANSWER_WAIT_MS * UINT64_C(1000000);
    while (web->fd >= 0 && !web->raw && web->asked && !web->closes) {
        require(fuzz_now_ns() < until);
        fuzz_web_take(web, 1);
    }
}
