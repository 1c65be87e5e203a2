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

struct kld_peers {
    uint32_t uids[KLD_PEER_LIST_MAX], gids[KLD_PEER_LIST_MAX];
    uint32_t uids_count, gids_count;
};

/* Parses allow_uids and allow_gids. */
enum kld_status kld_peers_init(struct kld_peers *peers, const struct kld_config *config,
                               struct kld_error *err);
/* The peer of a connected socket passes if no list is configured, if it runs as our own user (the
 * gateway does), or if a list names its user or one of its groups. Else KLD_FORBIDDEN. */
enum kld_status kld_peer_check(const struct kld_peers *peers, int fd, struct ucred *ret_peer,
                               struct kld_error *err);
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
