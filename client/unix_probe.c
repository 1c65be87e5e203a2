/* unix_probe.c - is a name published at another worker of the same server? Asked over a connection
 * of its own, so that the one that wants to know stays where it is, with all that it registered
 * there, and a worker that is away costs PROBE_NS and not the wait for the next one. Blocks for so
 * long at most, and not beyond the deadline. The thread that owns the connection. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/unix.h"

#define PROBE_NS 200000000ull /* from the connection to the last answer */

/* One frame there, one back. */
static bool ask(int fd, const union kld_frame *question, uint64_t until_ns,
                union kld_frame *ret_answer) {
    struct pollfd answer = {.fd = fd, .events = POLLIN};
    uint64_t request, now;
    int ready;
    if (send(fd, question, question->header.length, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
        return false;
    do {
        now = kld_now_ns();
        ready = poll(&answer, 1, now < until_ns ? (int)((until_ns - now) / 1000000) + 1 : 0);
    } while (ready < 0 && errno == EINTR);
    ssize_t bytes = ready > 0 ? recv(fd, ret_answer, sizeof *ret_answer, MSG_DONTWAIT) : -1;
    return bytes > 0 && kld_frame_check(ret_answer, (size_t)bytes, 0, 0, &request, NULL) == KLD_OK;
}

static enum unix_probe ask_all(const struct unix_connection *u, int fd, uint64_t until_ns,
                               const struct unix_region *region) {
    union kld_frame question, answer;
    kld_frame_init(&question, KLD_FRAME_HELLO, KLD_NUMBER_CONTROL);
    question.as_HELLO.version_min = question.as_HELLO.version_max = KLD_WIRE_VERSION;
    snprintf(question.as_HELLO.client_name, sizeof question.as_HELLO.client_name, "%s",
             u->base.options.client_name);
    if (!ask(fd, &question, until_ns, &answer) || answer.header.type != KLD_FRAME_WELCOME)
        return UNIX_PROBE_AWAY;
    kld_frame_init(&question, KLD_FRAME_ATTACH, KLD_NUMBER_CONTROL);
    memcpy(question.as_ATTACH.name, region->name, sizeof region->name);
    question.as_ATTACH.uid = region->uid;
    if (!ask(fd, &question, until_ns, &answer))
        return UNIX_PROBE_AWAY;
    if (answer.header.type != KLD_FRAME_ERROR)
        return UNIX_PROBE_THERE;
    switch (answer.as_ERROR.status) {
    case KLD_NOT_FOUND: return UNIX_PROBE_NOT_THERE;
    case KLD_DEVICE_LOST:
    case KLD_UNAVAILABLE: return UNIX_PROBE_AWAY;
    default: return UNIX_PROBE_THERE; /* who goes there is told why not */
    }
}

enum unix_probe kld_unix_probe(const struct unix_connection *u, const char *path,
                               uint64_t deadline_ns, const struct unix_region *region) {
    uint64_t until_ns = kld_now_ns() + PROBE_NS;
    until_ns = until_ns < deadline_ns ? until_ns : deadline_ns;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, path, strlen(path)); /* shorter than it: path_of() */
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    enum unix_probe found = UNIX_PROBE_AWAY;
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
        found = ask_all(u, fd, until_ns, region);
    if (fd >= 0)
        close(fd);
    return found;
}
