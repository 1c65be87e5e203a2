/* sockets.c - opens the listening sockets that outlive every child: TCP for the gateway,
 * SOCK_SEQPACKET for the worker. It accepts nothing. Supervisor, at start and end. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "proto/wire.h"
#include "server/supervisor/supervisor.h"

#define BACKLOG 4096 /* the kernel cuts it to net.core.somaxconn */

/* ---- HTTP ------------------------------------------------------------------------------------ */

static bool is_loopback(const struct sockaddr *address) {
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)(const void *)address;
        return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
    }
    const struct in6_addr *v6 = &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(v6) || (IN6_IS_ADDR_V4MAPPED(v6) && v6->s6_addr[12] == 127);
}

/* Numbers only, but for "localhost": a name server has no say in where we listen. */
static enum kld_status resolve(const char *flag, const char *text, struct addrinfo **ret_list,
                               struct kld_error *err) {
    char host[KLD_CONFIG_TEXT_MAX];
    snprintf(host, sizeof host, "%s", text);
    char *colon = strrchr(host, ':');
    const char *name = host;
    const char *expected = "expected ADDR:PORT, as 127.0.0.1:8080, [::1]:8080 or localhost:0";
    if (!colon || !colon[1] || strspn(colon + 1, "0123456789") != strlen(colon + 1) ||
        strlen(colon + 1) > 5 || atoi(colon + 1) > 65535)
        return kld_error_set(err, KLD_INVALID, "%s: %s", flag, expected);
    *colon = '\0';
    size_t bytes = strlen(host);
    if (bytes >= 2 && host[0] == '[' && host[bytes - 1] == ']') {
        host[bytes - 1] = '\0';
        name++;
    } else if (strchr(host, ':')) {
        return kld_error_set(err, KLD_INVALID, "%s: %s", flag, expected);
    }
    if (strcmp(name, "localhost") == 0)
        name = "127.0.0.1";
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE};
    int wrong = *name ? getaddrinfo(name, colon + 1, &hints, ret_list) : EAI_NONAME;
    if (wrong == EAI_MEMORY || wrong == EAI_SYSTEM) /* that says nothing of the address */
        return kld_error_set(err, KLD_NO_MEMORY, "%s: %s", flag, gai_strerror(wrong));
    if (wrong && strchr(name, '%')) /* on an interface that may yet come */
        return kld_error_set(err, KLD_UNAVAILABLE, "%s: '%.60s' is on no interface there is", flag,
                             name);
    if (wrong)
        return kld_error_set(err, KLD_INVALID, "%s: '%.60s' is not an address; %s", flag, name,
                             expected);
    return KLD_OK;
}

static void describe(int fd, char ret_text[KLD_ADDRESS_TEXT_MAX]) {
    struct sockaddr_storage bound = {.ss_family = AF_UNSPEC};
    socklen_t bytes = sizeof bound;
    char host[INET6_ADDRSTRLEN] = "", port[8] = "";
    if (getsockname(fd, (struct sockaddr *)&bound, &bytes) == 0)
        getnameinfo((struct sockaddr *)&bound, bytes, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV);
    bool v6 = bound.ss_family == AF_INET6;
    snprintf(ret_text, KLD_ADDRESS_TEXT_MAX, "%s%s%s:%s", v6 ? "[" : "", host, v6 ? "]" : "", port);
}

static enum kld_status refuse(const char *flag, const char *text, struct kld_error *err) {
    return kld_error_set(err, KLD_FORBIDDEN,
                         "%s: %.60s can be reached from other machines and there are "
                         "no tokens; --tokens names a file of them, --insecure-bind allows "
                         "it without",
                         flag, text);
}

/* An interface may yet come. */
enum kld_status kld_http_address_check(const char *flag, const char *text, bool insecure,
                                       struct kld_error *err) {
    struct addrinfo *list = NULL;
    enum kld_status status = resolve(flag, text, &list, err);
    if (status == KLD_OK && !insecure && !is_loopback(list->ai_addr))
        status = refuse(flag, text, err);
    if (list)
        freeaddrinfo(list);
    return status == KLD_UNAVAILABLE ? KLD_OK : status;
}

enum kld_status kld_http_socket_adopt(const char *flag, int fd, bool insecure,
                                      struct kld_http_socket *ret_socket, struct kld_error *err) {
    struct sockaddr_storage bound;
    socklen_t bytes = sizeof bound;
    memset(&bound, 0, sizeof bound);
    ret_socket->fd = fd;
    describe(fd, ret_socket->address);
    if (getsockname(fd, (struct sockaddr *)&bound, &bytes) < 0)
        return kld_error_set(err, KLD_INTERNAL, "%s: %s", flag, strerror(errno));
    return insecure || is_loopback((const struct sockaddr *)&bound)
               ? KLD_OK
               : refuse(flag, ret_socket->address, err);
}

enum kld_status kld_http_socket_open(const char *flag, const char *text, bool insecure,
                                     struct kld_http_socket *ret_socket, struct kld_error *err) {
    ret_socket->fd = -1;
    ret_socket->address[0] = '\0';
    if (!*text)
        return KLD_OK;
    struct addrinfo *list = NULL;
    enum kld_status status = resolve(flag, text, &list, err);
    if (status != KLD_OK)
        return status;
    int fd = -1, yes = 1;
    if (!insecure && !is_loopback(list->ai_addr)) {
        status = refuse(flag, text, err);
    } else if ((fd = socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0)) < 0 ||
               setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) < 0 ||
               bind(fd, list->ai_addr, list->ai_addrlen) < 0 || listen(fd, BACKLOG) < 0) {
        status = kld_error_set(err, KLD_UNAVAILABLE, "%s: cannot listen on %.60s: %s", flag, text,
                               strerror(errno));
        if (fd >= 0)
            close(fd);
    } else {
        ret_socket->fd = fd;
        describe(fd, ret_socket->address);
    }
    freeaddrinfo(list);
    return status;
}

/* ---- Unix ------------------------------------------------------------------------------------ */

enum kld_status kld_unix_socket_name(const char *path, uint32_t index,
                                     char ret_path[KLD_CONFIG_TEXT_MAX], struct kld_error *err) {
    size_t max = sizeof((struct sockaddr_un *)NULL)->sun_path - 1;
    int bytes = index ? snprintf(ret_path, KLD_CONFIG_TEXT_MAX, "%s.%u", path, index)
                      : snprintf(ret_path, KLD_CONFIG_TEXT_MAX, "%s", path);
    if (bytes < 0 || (size_t)bytes > max)
        return kld_error_set(err, KLD_INVALID, "--unix: the path is longer than %zu bytes", max);
    return KLD_OK;
}

enum kld_status kld_unix_socket_path(const char *configured, char ret_path[KLD_CONFIG_TEXT_MAX],
                                     struct kld_error *err) {
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    char path[2 * KLD_CONFIG_TEXT_MAX] = "/run/kld/kld.sock";
    if (*configured)
        snprintf(path, sizeof path, "%s", configured);
    else if (runtime && *runtime == '/')
        snprintf(path, sizeof path, "%s/kld/kld.sock", runtime);
    return kld_unix_socket_name(path, 0, ret_path, err);
}

enum kld_status kld_unix_socket_adopt(int fd, const char *path, struct kld_unix_socket *ret_socket,
                                      struct kld_error *err) {
    struct sockaddr_un bound = {.sun_family = AF_UNSPEC};
    socklen_t bytes = sizeof bound;
    ret_socket->fd = fd;
    ret_socket->device = 0;
    ret_socket->inode = 0; /* no file has that: we unlink nothing */
    if (getsockname(fd, (struct sockaddr *)&bound, &bytes) < 0)
        return kld_error_set(err, KLD_INTERNAL, "--unix: %s", strerror(errno));
    if (strcmp(bound.sun_path, path) == 0)
        return KLD_OK;
    return kld_error_set(err, KLD_INVALID,
                         "--unix: the socket that was passed is at %.100s; expected %.100s",
                         bound.sun_path, path);
}

void kld_unix_socket_where(int fd, char ret_path[KLD_CONFIG_TEXT_MAX]) {
    struct sockaddr_un bound = {.sun_family = AF_UNSPEC};
    socklen_t bytes = sizeof bound;
    ret_path[0] = '\0';
    if (getsockname(fd, (struct sockaddr *)&bound, &bytes) == 0)
        snprintf(ret_path, KLD_CONFIG_TEXT_MAX, "%s", bound.sun_path);
}

/* The folder of the path, made if asked for; a descriptor to lock it by, or -1. */
static int open_folder(const char *path, bool make) {
    char folder[KLD_CONFIG_TEXT_MAX];
    snprintf(folder, sizeof folder, "%s", path);
    char *slash = strrchr(folder, '/');
    if (slash == folder)
        slash++;
    if (slash)
        *slash = '\0';
    else
        snprintf(folder, sizeof folder, ".");
    if (make)
        mkdir(folder, 0755); /* a failure shows in bind() */
    return open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

#define OWNER_WAIT_NS UINT64_C(5000000000) /* a lost worker's successor answers in far less */

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

enum owner { OWNER_NONE, OWNER_SILENT, OWNER_ALIVE };

/* One look at who holds the socket. The connection is non-blocking: a full backlog has an owner
 * too. */
static enum owner ask_owner(const struct sockaddr_un *address, int timeout_ms) {
    int probe = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0)
        return OWNER_ALIVE; /* cannot tell: leave it alone */
    enum owner owner = OWNER_SILENT;
    union kld_frame frame;
    kld_frame_init(&frame, KLD_FRAME_PING,
                   1); /* before a HELLO: answered all the same, by an ERROR */
    if (connect(probe, (const struct sockaddr *)address, sizeof *address) < 0) {
        /* ENOENT: it ended in order and removed its file, since we saw that. */
        owner = errno == ECONNREFUSED || errno == ENOENT ? OWNER_NONE : OWNER_SILENT;
    } else if (send(probe, &frame, frame.header.length, MSG_NOSIGNAL) > 0) {
        struct pollfd readable = {.fd = probe, .events = POLLIN};
        if (poll(&readable, 1, timeout_ms) > 0 && recv(probe, &frame, sizeof frame, 0) > 0)
            owner = OWNER_ALIVE;
    }
    close(probe);
    return owner;
}

/* Does a server live behind this path? A process killed a moment ago may hold its socket for a
 * while yet (a GPU context takes 0.2 s to tear down): it answers nothing, and then it is gone. A
 * live server whose worker is just starting again answers nothing either, until it does. */
static bool is_served(const struct sockaddr_un *address) {
    uint64_t until = now_ns() + OWNER_WAIT_NS;
    enum owner owner;
    while ((owner = ask_owner(address, 200)) == OWNER_SILENT && now_ns() < until) {
        struct timespec pause = {.tv_nsec = 10000000};
        nanosleep(&pause, NULL);
    }
    return owner != OWNER_NONE;
}

static enum kld_status bind_at(int fd, const char *path, uint32_t mode, struct kld_error *err) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    struct stat info;
    if (lstat(path, &info) == 0) {
        if (!S_ISSOCK(info.st_mode))
            return kld_error_set(err, KLD_EXISTS,
                                 "--unix: %.100s is there and is not a socket; not replaced", path);
        if (is_served(&address))
            return kld_error_set(err, KLD_EXISTS,
                                 "--unix: another server is serving at %.100s; stop it or choose "
                                 "another path",
                                 path);
        unlink(path);
    }
    mode_t before = umask((mode_t)(~mode & 0777)); /* no moment with a wider mode */
    int result = bind(fd, (const struct sockaddr *)&address, sizeof address);
    int bind_errno = errno;
    umask(before);
    if (result < 0)
        return kld_error_set(err, KLD_UNAVAILABLE, "--unix: cannot make %.100s: %s%s", path,
                             strerror(bind_errno),
                             bind_errno == ENOENT ? " (is its folder there?)" : "");
    return KLD_OK;
}

enum kld_status kld_unix_socket_open(const char *path, uint32_t mode, bool make_folder,
                                     uint64_t *lock_waited_ns, struct kld_unix_socket *ret_socket,
                                     struct kld_error *err) {
    ret_socket->fd = -1;
    int folder = open_folder(path, make_folder);
    /* Two servers that start at once must not each unlink the other's new socket. Anybody can hold
     * this lock of a folder like /tmp: after more than a server needs we go on without it. */
    uint64_t began = now_ns();
    while (folder >= 0 && flock(folder, LOCK_EX | LOCK_NB) < 0 &&
           *lock_waited_ns + (now_ns() - began) < OWNER_WAIT_NS + OWNER_WAIT_NS / 5)
        usleep(10000);
    *lock_waited_ns += now_ns() - began;
    enum kld_status status = KLD_OK;
    struct stat info;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        status = kld_error_set(err, KLD_UNAVAILABLE, "--unix: %s", strerror(errno));
    else
        status = bind_at(fd, path, mode, err);
    if (status == KLD_OK && (listen(fd, BACKLOG) < 0 || lstat(path, &info) < 0))
        status = kld_error_set(err, KLD_UNAVAILABLE, "--unix: cannot listen at %.100s: %s", path,
                               strerror(errno));
    if (folder >= 0)
        close(folder); /* drops the lock */
    if (status != KLD_OK) {
        if (fd >= 0)
            close(fd);
        return status;
    }
    ret_socket->fd = fd;
    ret_socket->device = info.st_dev;
    ret_socket->inode = info.st_ino;
    return KLD_OK;
}

void kld_unix_socket_close(struct kld_unix_socket *unix_socket, const char *path) {
    struct stat info;
    if (unix_socket->fd < 0)
        return;
    if (lstat(path, &info) == 0 && info.st_dev == unix_socket->device &&
        info.st_ino == unix_socket->inode)
        unlink(path);
    close(unix_socket->fd);
    unix_socket->fd = -1;
}
