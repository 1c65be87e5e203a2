/* connect.c - opening a connection by its URL, closing it, and the questions that go straight to
 * its kind (unix.c, http.c, local.c). The one file that names them all. The thread that owns the
 * connection. */
#include "client/connection.h"

#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

static const struct kld_transport *const transports[] = {
    &kld_transport_unix,  &kld_transport_http,  &kld_transport_https,
    &kld_transport_local, &kld_transport_split,
};

const char *kld_version(void) { return KLD_RELEASE; }

/* ---- Opening and closing -------------------------------------------------------------------- */

static char *copy_text(const char *text, bool *ok) {
    char *copy = text ? strdup(text) : NULL;
    *ok = *ok && (copy || !text);
    return copy;
}

/* 0: the default. For ever is long enough from now on not to wrap around. */
static uint64_t timeout_of(uint64_t ns, uint64_t otherwise) {
    return ns == 0 ? otherwise : ns > INT64_MAX / 2 ? INT64_MAX / 2 : ns;
}

static bool resolve_options(struct kld_connect_options *to,
                            const struct kld_connect_options *from) {
    bool ok = true;
    if (from)
        *to = *from;
    to->client_name = copy_text(to->client_name ? to->client_name : "libkld", &ok);
    to->token = copy_text(to->token, &ok);
    to->ca_file = copy_text(to->ca_file, &ok);
    to->cert_file = copy_text(to->cert_file, &ok);
    to->key_file = copy_text(to->key_file, &ok);
    to->connect_timeout_ns = timeout_of(to->connect_timeout_ns, 5000000000ull);
    to->part_timeout_ns = timeout_of(to->part_timeout_ns, 60000000000ull);
    if (to->staging_bytes_max == 0)
        to->staging_bytes_max = 4ull << 30;
    if (to->part_bytes_max == 0)
        to->part_bytes_max = 64ull << 20;
    return ok;
}

static enum kld_status open_events(struct kld_connection *connection, struct kld_error *err) {
    connection->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    connection->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    connection->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (connection->epoll_fd < 0 || connection->timer_fd < 0 || connection->wake_fd < 0)
        return kld_error_set(err, KLD_NO_MEMORY,
                             "no file descriptors left for a connection (RLIMIT_NOFILE)");
    enum kld_status status =
        kld_connection_watch(connection, connection->timer_fd, KLD_TAG_TIMER, EPOLLIN, err);
    return status
               ? status
               : kld_connection_watch(connection, connection->wake_fd, KLD_TAG_WAKE, EPOLLIN, err);
}

enum kld_status kld_connect(const char *url, const struct kld_connect_options *options,
                            struct kld_connection **ret_connection, struct kld_error *err) {
    const struct kld_transport *transport = NULL;
    for (size_t i = 0; url && i < sizeof transports / sizeof transports[0]; i++)
        if (strncmp(url, transports[i]->prefix, strlen(transports[i]->prefix)) == 0)
            transport = transports[i];
    if (!transport)
        return kld_error_set(err, KLD_INVALID,
                             "unknown kind of server; expected unix:/PATH, http://HOST:PORT, "
                             "https://HOST:PORT, local:, or split: and several of them by comma");
    struct kld_connection *connection = calloc(1, transport->connection_bytes);
    if (!connection)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for a connection");
    connection->transport = transport;
    connection->process = getpid();
    connection->epoll_fd = connection->timer_fd = connection->wake_fd = -1;
    connection->armed_ns = KLD_NEVER;
    connection->calls_max = KLD_CALLS_MAX;
    enum kld_status status = KLD_OK;
    if (!resolve_options(&connection->options, options))
        status = kld_error_set(err, KLD_NO_MEMORY, "no memory for a connection");
    if (!status)
        status = open_events(connection, err);
    if (!status) {
        connection->opened = true;
        status = transport->open(connection, url, err);
    }
    if (status) {
        kld_close(connection);
        return status;
    }
    *ret_connection = connection;
    return KLD_OK;
}

static void close_fd(int fd) {
    if (fd >= 0)
        close(fd);
}

/* In a child made by fork(): the threads of a device, libcurl's sockets and the set of what is
 * waited for are the parent's, and nothing here can be taken apart without them. */
static void leave(struct kld_connection *connection) {
    if (connection->transport->leave)
        connection->transport->leave(connection);
    close_fd(connection->epoll_fd);
    close_fd(connection->timer_fd);
    close_fd(connection->wake_fd);
}

void kld_close(struct kld_connection *connection) {
    if (!connection)
        return;
    if (connection->process != getpid() && !connection->transport->closes_in_a_child) {
        leave(connection);
        return;
    }
    /* The transport ends its side of every call, so that regions lose their users. */
    if (connection->opened)
        connection->transport->close(connection);
    for (struct kld_region *region = connection->regions, *next; region; region = next) {
        next = region->next;
        region->dropped = true;
        connection->transport->region_release(region);
    }
    for (struct kld_event *event = connection->events, *next; event; event = next) {
        next = event->next;
        connection->transport->event_release(event);
    }
    for (uint32_t i = 0; i < connection->slots_max; i++)
        free(connection->slots[i]);
    for (struct kld_call *call = connection->spare, *next; call; call = next) {
        next = call->next;
        free(call);
    }
    free(connection->slots);
    close_fd(connection->epoll_fd);
    close_fd(connection->timer_fd);
    close_fd(connection->wake_fd);
    free((char *)connection->options.client_name);
    free((char *)connection->options.token);
    free((char *)connection->options.ca_file);
    free((char *)connection->options.cert_file);
    free((char *)connection->options.key_file);
    free(connection);
}

/* ---- Questions to the server ---------------------------------------------------------------- */

enum kld_status kld_info(struct kld_connection *connection, struct kld_server_info *ret_info,
                         struct kld_error *err) {
    return connection->transport->info(connection, ret_info, err);
}

bool kld_missing(const struct kld_connection *connection, uint32_t index,
                 struct kld_error *ret_why) {
    return connection->transport->missing &&
           connection->transport->missing(connection, index, ret_why);
}

uint64_t kld_losses(const struct kld_connection *connection) { return connection->losses; }

enum kld_status kld_ping(struct kld_connection *connection, uint64_t *ret_ns,
                         struct kld_error *err) {
    if (!connection->transport->ping)
        return kld_unimplemented(connection, "ping", err);
    uint64_t start = kld_now_ns();
    enum kld_status status = connection->transport->ping(connection, err);
    if (!status && ret_ns)
        *ret_ns = kld_now_ns() - start;
    return status;
}

enum kld_status kld_stats(struct kld_connection *connection, struct kld_server_stats *ret_stats,
                          struct kld_error *err) {
    return connection->transport->stats ? connection->transport->stats(connection, ret_stats, err)
                                        : kld_unimplemented(connection, "statistics", err);
}

enum kld_status kld_metrics(struct kld_connection *connection, char *ret_text, size_t capacity,
                            struct kld_error *err) {
    if (capacity == 0)
        return kld_error_set(err, KLD_INVALID, "the metrics need room; there are 0 bytes of it");
    ret_text[0] = '\0';
    return connection->transport->metrics
               ? connection->transport->metrics(connection, ret_text, capacity, err)
               : kld_unimplemented(connection, "metrics", err);
}

enum kld_status kld_measure_ceiling(struct kld_connection *connection, uint64_t bytes,
                                    double *ret_read_per_s, double *ret_read_write_per_s,
                                    struct kld_error *err) {
    return connection->transport->measure_ceiling
               ? connection->transport->measure_ceiling(connection, bytes, ret_read_per_s,
                                                        ret_read_write_per_s, err)
               : kld_unimplemented(connection, "measuring the ceiling", err);
}
