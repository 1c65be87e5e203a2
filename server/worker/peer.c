/* peer.c - the lists of users and groups that may connect, and SO_PEERCRED against them.
 * And whether a peer is the gateway. Knows nothing of what a peer then asks. Worker process, loop
 * thread. */
#include "server/worker/peer.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define GROUPS_USUAL 256   /* supplementary groups for which there is room at once */
#define IDS_ALL UINT32_MAX /* how many the kernel knows */
#define OVERFLOW_USUAL 65534
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5; younger than the headers we build with */
#endif

static enum kld_status parse(const char *name, const char *text, uint32_t *list,
                             uint32_t *ret_count, struct kld_error *err) {
    uint32_t count = 0;
    while (*text) {
        char *end;
        unsigned long number = strtoul(text, &end, 10);
        if (*text < '0' || *text > '9' || number >= UINT32_MAX || (*end && *end != ','))
            return kld_error_set(err, KLD_INVALID, "%s: expected numbers by comma", name);
        if (count == KLD_PEER_LIST_MAX)
            return kld_error_set(err, KLD_TOO_LARGE, "%s: more than %d entries", name,
                                 KLD_PEER_LIST_MAX);
        list[count++] = (uint32_t)number;
        text = *end ? end + 1 : end;
    }
    *ret_count = count;
    return KLD_OK;
}

static FILE *open_in(const char *folder, const char *name) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return fopen(path, "re");
}

static void close_file(FILE *file) {
    if (file)
        fclose(file);
}

uint32_t kld_peer_nobody(const char *process, const char *map, const char *overflow,
                         bool *ret_known) {
    uint64_t first, lower, count, mapped = 0;
    uint32_t number = OVERFLOW_USUAL;
    /* A kernel without user namespaces has all that a process has in /proc but the maps. */
    FILE *status = NULL, *file = open_in(process, map);
    bool none = !file && errno == ENOENT && (status = open_in(process, "status"));
    *ret_known = file || none;
    while (file && fscanf(file, "%" SCNu64 " %" SCNu64 " %" SCNu64, &first, &lower, &count) == 3)
        mapped += count;
    close_file(file);
    close_file(status);
    if (none || mapped >= IDS_ALL)
        return KLD_PEER_NONE;
    file = fopen(overflow, "re");
    if (file && fscanf(file, "%" SCNu32, &number) != 1)
        number = OVERFLOW_USUAL;
    close_file(file);
    return number;
}

enum kld_status kld_peers_init(struct kld_peers *peers, const struct kld_config *config,
                               struct kld_error *err) {
    bool gids_known;
    peers->nobody_uid = kld_peer_nobody("/proc/self", "uid_map", "/proc/sys/kernel/overflowuid",
                                        &peers->uids_known);
    peers->nobody_gid =
        kld_peer_nobody("/proc/self", "gid_map", "/proc/sys/kernel/overflowgid", &gids_known);
    enum kld_status status =
        parse("allow_uids", config->allow_uids, peers->uids, &peers->uids_count, err);
    if (status)
        return status;
    return parse("allow_gids", config->allow_gids, peers->gids, &peers->gids_count, err);
}

static bool listed(const uint32_t *list, uint32_t count, uint32_t number) {
    for (uint32_t i = 0; i < count; i++)
        if (list[i] == number)
            return true;
    return false;
}

static bool gid_listed(const struct kld_peers *peers, gid_t gid) {
    return gid != peers->nobody_gid && listed(peers->gids, peers->gids_count, gid);
}

static bool group_listed(const struct kld_peers *peers, int fd, gid_t gid) {
    gid_t few[GROUPS_USUAL], *many = NULL, *groups = few;
    socklen_t bytes = sizeof few;
    if (gid_listed(peers, gid))
        return true;
    int failed = getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, few, &bytes);
    if (failed && errno == ERANGE && (many = malloc(bytes))) { /* which is as much as there are */
        groups = many;
        failed = getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, many, &bytes);
    }
    bool found = false;
    for (size_t i = 0; !failed && !found && i < bytes / sizeof *groups; i++)
        found = gid_listed(peers, groups[i]);
    free(many);
    return found;
}

enum kld_status kld_peer_check(const struct kld_peers *peers,
                               const struct kld_gateway_process *gateway, int fd,
                               struct ucred *ret_peer, struct kld_error *err) {
    socklen_t bytes = sizeof *ret_peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, ret_peer, &bytes) != 0)
        return kld_error_set(err, KLD_FORBIDDEN, "who connects cannot be determined");
    bool nobody = ret_peer->uid == peers->nobody_uid && !kld_peer_is_gateway(gateway, fd);
    if (nobody && !peers->uids_known)
        return kld_error_set(err, KLD_FORBIDDEN,
                             "which user this is cannot be told: as uid %u all may come that the "
                             "server's user namespace does not map, and the server cannot read "
                             "which those are (/proc/self/uid_map); connect as another uid, or let "
                             "it read that",
                             peers->nobody_uid);
    if (nobody)
        return kld_error_set(err, KLD_FORBIDDEN,
                             "which user this is cannot be told: its uid is not mapped in the "
                             "server's user namespace, where all such are %u; connect as a uid "
                             "that is, or run both in one user namespace",
                             peers->nobody_uid);
    if ((peers->uids_count == 0 && peers->gids_count == 0) || ret_peer->uid == geteuid() ||
        listed(peers->uids, peers->uids_count, ret_peer->uid) ||
        (peers->gids_count && group_listed(peers, fd, ret_peer->gid)))
        return KLD_OK;
    return kld_error_set(err, KLD_FORBIDDEN, "this user may not connect to the server");
}

int kld_peer_pidfd(int fd) {
    int pidfd = -1;
    socklen_t bytes = sizeof pidfd;
    return getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &bytes) == 0 ? pidfd : -1;
}

bool kld_peer_is_dead(int pidfd, pid_t pid) {
    struct pollfd process = {.fd = pidfd, .events = POLLIN};
    if (pidfd >= 0)
        return poll(&process, 1, 0) == 1;
    return pid > 0 && kill(pid, 0) != 0 && errno == ESRCH;
}

/* The process behind the number that connected is the one that has it now. Not known where the
 * kernel does not tell, or there is no descriptor left to tell by. */
static bool has_ended(int fd, pid_t pid) {
    int pidfd = -1;
    socklen_t bytes = sizeof pidfd;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &bytes) != 0)
        return errno == ESRCH || errno == EINVAL || errno == ENODATA;
    bool dead = kld_peer_is_dead(pidfd, pid);
    close(pidfd);
    return dead;
}

bool kld_peer_is_gateway(const struct kld_gateway_process *gateway, int fd) {
    struct ucred peer = {0};
    socklen_t bytes = sizeof peer;
    return gateway->pid > 0 && getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
           peer.pid == gateway->pid && !kld_peer_is_dead(gateway->pidfd, gateway->pid) &&
           !has_ended(fd, peer.pid);
}
