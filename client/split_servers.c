/* split_servers.c - the servers of a split connection (split.h): opening, whether they are of one
 * kind, since only those give the same bits, and the pauses of one that could not. Knows no
 * request. The thread that owns the connection. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#include "client/split.h"

#define PAUSE_NS_MIN                                                                               \
    100000000ull /* before a server that failed is tried again; doubled up to ... */
#define PAUSE_NS_MAX 5000000000ull
/* For a server's name and release; at first less, because who is not there may not answer at all,
 * and the others wait meanwhile. */
#define ASK_NS_MIN 200000000ull
#define ASK_NS_MAX 1000000000ull
#define ASK_SHARE 4 /* questions in vain take one part in so many of the time, and less ... */
#define REST_NS_MAX 60000000000ull /* but nobody is left out for longer */
#define OPEN_STEP_NS 20000000ull
#define OPEN_GRACE_NS 1000000000ull /* for the others, once one has answered */

static struct split_connection *split_of(struct kld_connection *connection) {
    return (struct split_connection *)connection;
}

/* ---- Are they alike? --------------------------------------------------------------------------
 */

/* What decides about bits: the back end; of CPUs the width of the vectors, which is named behind
 * the model; of GPUs the model. */
static void kind_of(const struct kld_server_info *info, char *ret_kind, size_t capacity) {
    const char *vectors = strrchr(info->device, '(');
    if (strcmp(info->backend, "remote") == 0)
        ret_kind[0] = '\0';
    else if (strcmp(info->backend, "cpu") == 0 && vectors)
        snprintf(ret_kind, capacity, "cpu %s", vectors);
    else
        snprintf(ret_kind, capacity, "%s %s", info->backend, info->device);
}

static enum kld_status refuse(struct split_server *server, enum kld_status status,
                              const char *text) {
    server->state = SPLIT_REFUSED;
    return kld_error_set(&server->error, status, "%s", text);
}

/* Is it of one kind with those before it? The first one decides. */
static enum kld_status compare(struct split_server *server, const struct kld_server_info *info) {
    struct split_connection *split = server->split;
    char kind[sizeof split->kind], text[KLD_ERROR_TEXT_MAX];
    kind_of(info, kind, sizeof kind);
    if (!kind[0])
        return refuse(server, KLD_UNIMPLEMENTED,
                      "does not say what it computes with (it is of another release, or has unlike "
                      "devices), so its bits may be others than those of one server");
    if (!split->kind[0]) {
        memcpy(split->kind, kind, sizeof kind);
        split->info = *info;
    }
    if (!split->info.version[0])
        memcpy(split->info.version, info->version, sizeof info->version);
    if (info->version[0] && strcmp(info->version, split->info.version) != 0) {
        snprintf(text, sizeof text, "is of release %s, the others are of %s: their bits may differ",
                 info->version, split->info.version);
        return refuse(server, KLD_VERSION, text);
    }
    if (strcmp(kind, split->kind) != 0) {
        snprintf(text, sizeof text, "computes with %s, the others with %s: their bits differ", kind,
                 split->kind);
        return refuse(server, KLD_UNIMPLEMENTED, text);
    }
    server->state = SPLIT_READY;
    server->answered = true;
    server->error = (struct kld_error){0};
    return KLD_OK;
}

bool kld_split_is_of_server(enum kld_status status) {
    return status == KLD_UNAVAILABLE || status == KLD_DEVICE_LOST || status == KLD_BUSY ||
           status == KLD_THROTTLED || status == KLD_NO_MEMORY || status == KLD_INTERNAL ||
           status == KLD_DEADLINE || status == KLD_CANCELLED;
}

bool kld_split_is_refusal(enum kld_status status) {
    return status == KLD_UNAUTHENTICATED || status == KLD_FORBIDDEN || status == KLD_VERSION;
}

enum kld_status kld_split_server_ask(struct split_server *server) {
    struct kld_connect_options *options = &server->member->options;
    struct kld_server_info info;
    uint64_t began = kld_now_ns(), usual = options->connect_timeout_ns;
    uint64_t limit = server->asked_ns < ASK_NS_MIN ? ASK_NS_MIN : 2 * server->asked_ns;
    options->connect_timeout_ns = kld_split_smaller(usual, limit);
    enum kld_status status = kld_info(server->member, &info, &server->error);
    options->connect_timeout_ns = usual;
    server->links = server->member->links;
    server->asked_ns = status ? kld_split_smaller(kld_now_ns() - began, ASK_NS_MAX) : 0;
    if (!status)
        return compare(server, &info);
    if (!kld_split_is_of_server(status))
        server->state = SPLIT_REFUSED;
    return status;
}

/* With this one. */
static uint64_t absent_with(const struct split_server *server) {
    uint64_t absent = 0;
    for (uint32_t i = 0; i < server->split->count; i++) {
        const struct split_server *one = &server->split->servers[i];
        absent += one == server || one->state == SPLIT_AWAY;
    }
    return absent;
}

void kld_split_server_leave(struct split_server *server, const struct kld_error *error) {
    uint64_t now = kld_now_ns();
    server->error = *error;
    /* Its parts come back one after the other: one pause for all of them. */
    if (server->state == SPLIT_READY || now >= server->retry_at_ns) {
        uint64_t pause = server->pause_ns ? server->pause_ns * 2 : PAUSE_NS_MIN;
        uint64_t rest =
            kld_split_smaller(server->asked_ns * ASK_SHARE * absent_with(server), REST_NS_MAX);
        server->pause_ns = kld_split_smaller(pause, PAUSE_NS_MAX);
        pause = kld_jitter(server->pause_ns);
        server->retry_at_ns = now + (pause < rest ? rest : pause);
    }
    if (server->state != SPLIT_REFUSED)
        server->state = SPLIT_AWAY;
    kld_connection_arm(&server->split->base, server->retry_at_ns);
}

/* At the end of a word. */
static void cut(char *text, size_t bytes_max) {
    if (strlen(text) <= bytes_max)
        return;
    size_t end = bytes_max - 3;
    while (end > bytes_max / 2 && text[end] != ' ')
        end--;
    strcpy(text + end, "...");
}

enum kld_status kld_split_none_left(const struct split_connection *split, struct kld_error *err) {
    char text[KLD_ERROR_TEXT_MAX];
    enum kld_status status = KLD_UNAVAILABLE;
    /* Of many servers each says little. */
    int each = 220 / (int)split->count - 4;
    size_t length = (size_t)snprintf(
        text, sizeof text, split->count == 1 ? "no server is left" : "none of %u servers is left",
        split->count);
    for (uint32_t i = 0; i < split->count && length < sizeof text; i++) {
        const struct split_server *server = &split->servers[i];
        char said[sizeof server->name + KLD_ERROR_TEXT_MAX + 4];
        if (server->state == SPLIT_REFUSED)
            status = server->error.status;
        snprintf(said, sizeof said, "%s: %s", server->name, server->error.text);
        cut(said, each > 30 ? (size_t)each : 30);
        length += (size_t)snprintf(text + length, sizeof text - length, "; %s", said);
    }
    return kld_error_set(err, status, "%s", text);
}

/* ---- Questions --------------------------------------------------------------------------------
 */

enum kld_status kld_split_info(struct kld_connection *connection, struct kld_server_info *ret_info,
                               struct kld_error *err) {
    const struct split_connection *split = split_of(connection);
    memset(ret_info, 0, sizeof *ret_info);
    memcpy(ret_info->backend, split->info.backend, sizeof ret_info->backend);
    memcpy(ret_info->version, split->info.version, sizeof ret_info->version);
    char of[16] = "";
    uint32_t answered = 0;
    for (uint32_t i = 0; i < split->count; i++)
        answered += split->servers[i].answered;
    if (answered < split->count)
        snprintf(of, sizeof of, " of %u", split->count);
    snprintf(ret_info->device, sizeof ret_info->device, "%u%s server%s: %.48s", answered, of,
             split->count == 1 ? "" : "s", split->info.device);
    ret_info->requests_max = KLD_CALLS_MAX;
    return KLD_OK;
}

bool kld_split_missing(const struct kld_connection *connection, uint32_t index,
                       struct kld_error *ret_why) {
    const struct split_connection *split = (const struct split_connection *)connection;
    for (uint32_t i = 0; i < split->count; i++) {
        const struct split_server *server = &split->servers[i];
        if (server->answered || index-- > 0)
            continue;
        bool said = server->error.status != KLD_OK;
        kld_error_set(ret_why, said ? server->error.status : KLD_UNAVAILABLE, "%s: %.120s",
                      server->name, said ? server->error.text : "was not asked yet");
        return true;
    }
    return false;
}

/* All of them: the first that does not answer is named. */
enum kld_status kld_split_ping(struct kld_connection *connection, struct kld_error *err) {
    struct split_connection *split = split_of(connection);
    for (uint32_t i = 0; i < split->count; i++) {
        struct kld_error error;
        enum kld_status status = kld_ping(split->servers[i].member, NULL, &error);
        if (status)
            return kld_error_set(err, status, "%s: %.120s", split->servers[i].name, error.text);
    }
    return KLD_OK;
}

/* ---- Opening ----------------------------------------------------------------------------------
 */

static enum kld_status member_open(struct split_connection *split, struct split_server *server,
                                   const char *url, struct kld_error *err) {
    struct kld_connect_options options = split->base.options;
    struct kld_error error;
    const char *host = strstr(url, "://"), *at = strrchr(host ? host : url, '@');
    if (strncmp(url, "unix:", 5) == 0 || strncmp(url, "local:", 6) == 0)
        at = NULL; /* no password, but of a path */
    snprintf(server->name, sizeof server->name, "%.*s%.100s",
             at && host ? (int)(host + 3 - url) : 0, url, at ? at + 1 : url);
    server->split = split;
    for (uint32_t k = 0; k < SPLIT_DEPTH; k++)
        server->part[k].server = server;
    if (strncmp(url, kld_transport_split.prefix, strlen(kld_transport_split.prefix)) == 0)
        return kld_error_set(err, KLD_INVALID, "%s: a split: inside of another", server->name);
    options.lazy = true;
    options.progress = NULL;
    options.connect_timeout_ns = kld_split_smaller(options.connect_timeout_ns, ASK_NS_MAX);
    enum kld_status status = kld_connect(url, &options, &server->member, &error);
    if (status)
        return kld_error_set(err, status, "%s: %.120s", server->name, error.text);
    server->member->member = true;
    return kld_connection_watch(&split->base, kld_fd(server->member),
                                KLD_TAG_TRANSPORT + (uint64_t)(server - split->servers), EPOLLIN,
                                err);
}

/* Waits until all have answered; if only some do, not long. One that computes otherwise, or does
 * not let us in, is an error at once. */
static enum kld_status wait_ready(struct split_connection *split, struct kld_error *err) {
    uint64_t start = kld_now_ns();
    for (;;) {
        uint32_t ready = 0;
        for (uint32_t i = 0; i < split->count; i++) {
            struct split_server *server = &split->servers[i];
            kld_process(server->member, 0, NULL);
            if (server->state == SPLIT_AWAY)
                kld_split_server_ask(server);
            if (server->state == SPLIT_REFUSED)
                return kld_error_set(err, server->error.status, "%s: %.120s", server->name,
                                     server->error.text);
            ready += server->state == SPLIT_READY;
        }
        uint64_t waited = kld_now_ns() - start;
        if (ready == split->count || (ready > 0 && waited > OPEN_GRACE_NS))
            return KLD_OK;
        if (waited > split->base.options.connect_timeout_ns)
            return kld_split_none_left(split, err);
        kld_connection_step(&split->base, kld_now_ns() + OPEN_STEP_NS, NULL);
    }
}

enum kld_status kld_split_open(struct kld_connection *connection, const char *url,
                               struct kld_error *err) {
    struct split_connection *split = split_of(connection);
    const char *list = url + strlen(connection->transport->prefix);
    uint32_t count = 1;
    for (const char *comma = list; (comma = strchr(comma, ',')); comma++)
        count++;
    if (count > SPLIT_SERVERS_MAX)
        return kld_error_set(err, KLD_INVALID, "%u servers; expected at most %d", count,
                             SPLIT_SERVERS_MAX);
    if (!(split->servers = calloc(count, sizeof *split->servers)))
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for a connection");
    for (split->count = 0; split->count < count;) {
        char one[SPLIT_URL_MAX];
        size_t length = strcspn(list, ",");
        if (length == 0 || length >= sizeof one)
            return kld_error_set(err, KLD_INVALID,
                                 "server %u of %u has a URL of %zu bytes; expected split: and URLs "
                                 "of 1 to %zu bytes by comma",
                                 split->count + 1, count, length, sizeof one - 1);
        memcpy(one, list, length);
        one[length] = '\0';
        list += length + (list[length] == ',');
        enum kld_status status = member_open(split, &split->servers[split->count++], one, err);
        if (status)
            return status;
    }
    enum kld_status status = connection->options.lazy ? KLD_OK : wait_ready(split, err);
    kld_connection_arm(connection, kld_now_ns()); /* looks for those that have not answered */
    return status;
}
