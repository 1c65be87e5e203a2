/* users.h - who has how much of what all clients of a worker share: by uid, so that no number of
 * connections takes it all. One rule for requests, the device's pool, memory of the host, mappings
 * and published names: a user may have user_share percent of what others leave. Who is alone has
 * so much of all there is, the next one as much of the rest, and there is always a rest. The
 * gateway is no such user; it has what is set aside for it (quota.h). Loop thread, but for what
 * says otherwise. */
#ifndef KLD_SERVER_WORKER_USERS_H
#define KLD_SERVER_WORKER_USERS_H

#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>
#include <uv.h>

#include "proto/status.h"
#include "server/worker/tasks.h"

struct kld_user {
    TAILQ_ENTRY(kld_user) entry;
    uid_t uid;
    uint32_t holders;    /* who points here: sessions, regions, mappings, tasks; kld_users.mutex */
    uint64_t requests;   /* admitted and not yet back in the pool */
    uint64_t pool_bytes; /* of regions in the device's pool */
    uint64_t mapped;     /* regions that are mappings of this process */
    uint32_t tasks;      /* with uv's pool; see tasks.h */
    struct kld_task_list tasks_waiting;
    uint64_t shared_bytes; /* of the host's; mapping.h, under its mutex, as the next */
    uint32_t listed;       /* mappings that are known again */
};

struct kld_users {
    uv_mutex_t mutex; /* of list, and of its users' holders */
    TAILQ_HEAD(kld_user_list, kld_user) list;
    struct kld_user gateway; /* not on it, and never freed */
};

enum kld_status kld_users_init(struct kld_users *users, struct kld_error *err);
void kld_users_done(struct kld_users *users); /* none is held any more */

/* Any thread. NULL: no memory. */
struct kld_user *kld_user_acquire(struct kld_users *users, uid_t uid);
void kld_user_hold(struct kld_users *users, struct kld_user *user);
void kld_user_release(struct kld_users *users, struct kld_user *user);

/* The most of `all` that a user may have of whom the others have `others`: at least one, where
 * there is any. Any thread. */
uint64_t kld_share_max(uint64_t percent, uint64_t all, uint64_t others);

#endif
