/* peer.h - who may connect to the Unix socket. Loop thread. */
#ifndef KLD_SERVER_WORKER_PEER_H
#define KLD_SERVER_WORKER_PEER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "server/config.h"

/* The gateway, as the supervisor names it. */
struct kld_gateway_process {
    pid_t pid; /* 0: none known */
    int pidfd; /* -1: the kernel has none */
};

#define KLD_PEER_NONE UINT32_MAX /* no user and no group has that number */

struct kld_peers {
    uint32_t uids[KLD_PEER_LIST_MAX], gids[KLD_PEER_LIST_MAX];
    uint32_t uids_count, gids_count;
    uint32_t nobody_uid, nobody_gid; /* kld_peer_nobody()'s */
    bool uids_known;
};

/* The number as which whoever has none in our user namespace comes, from the namespace's map in the
 * process's folder of /proc and the kernel's setting; KLD_PEER_NONE where all have one, as with a
 * kernel that knows no such maps. Not all have, or the map cannot be read (*ret_known: false): then
 * one that is mapped to it cannot be told from the others. */
uint32_t kld_peer_nobody(const char *process, const char *map, const char *overflow,
                         bool *ret_known);
/* Parses allow_uids and allow_gids, and asks who nobody is. */
enum kld_status kld_peers_init(struct kld_peers *peers, const struct kld_config *config,
                               struct kld_error *err);
/* The peer of a connected socket passes if no list is configured, if it runs as our own user (the
 * gateway does), or if a list names its user or one of its groups. Else KLD_FORBIDDEN; so is
 * whoever comes as nobody and is not the gateway: they would all be one user. */
enum kld_status kld_peer_check(const struct kld_peers *peers,
                               const struct kld_gateway_process *gateway, int fd,
                               struct ucred *ret_peer, struct kld_error *err);
/* A descriptor of the process that connected (SO_PEERPIDFD), which is the caller's then; -1 where
 * the kernel has none to give (before 6.5), or that process is gone for good already. */
int kld_peer_pidfd(int fd);
/* Has that process ended? Its parent need not have looked. Without a pidfd (-1) only a process that
 * has a number in our PID namespace and whose number is free again counts as dead. */
bool kld_peer_is_dead(int pidfd, pid_t pid);
/* Is the gateway, which has not ended, the process that connected, and not one that had its number
 * before? (That last is not seen before Linux 6.5.) */
bool kld_peer_is_gateway(const struct kld_gateway_process *gateway, int fd);

#endif
