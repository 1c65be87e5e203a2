/* users.c - see users.h. Counts nothing itself: who gives and takes does. Worker process. */
#include "server/worker/users.h"

#include <stdbool.h>
#include <stdlib.h>

enum kld_status kld_users_init(struct kld_users *users, struct kld_error *err) {
    *users = (struct kld_users){.gateway.holders = 1};
    STAILQ_INIT(&users->gateway.tasks_waiting);
    TAILQ_INIT(&users->list);
    if (uv_mutex_init(&users->mutex) != 0)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    return KLD_OK;
}

void kld_users_done(struct kld_users *users) { uv_mutex_destroy(&users->mutex); }

static struct kld_user *find(struct kld_users *users, uid_t uid) {
    struct kld_user *user;
    TAILQ_FOREACH(user, &users->list, entry)
    if (user->uid == uid)
        return user;
    return NULL;
}

struct kld_user *kld_user_acquire(struct kld_users *users, uid_t uid) {
    uv_mutex_lock(&users->mutex);
    struct kld_user *user = find(users, uid);
    if (!user && (user = calloc(1, sizeof *user))) {
        user->uid = uid;
        STAILQ_INIT(&user->tasks_waiting);
        TAILQ_INSERT_TAIL(&users->list, user, entry);
    }
    if (user)
        user->holders++;
    uv_mutex_unlock(&users->mutex);
    return user;
}

void kld_user_hold(struct kld_users *users, struct kld_user *user) {
    uv_mutex_lock(&users->mutex);
    user->holders++;
    uv_mutex_unlock(&users->mutex);
}

void kld_user_release(struct kld_users *users, struct kld_user *user) {
    uv_mutex_lock(&users->mutex);
    bool last = --user->holders == 0;
    if (last)
        TAILQ_REMOVE(&users->list, user, entry);
    uv_mutex_unlock(&users->mutex);
    if (last)
        free(user);
}

uint64_t kld_share_max(uint64_t percent, uint64_t all, uint64_t others) {
    uint64_t left = all > others ? all - others : 0;
    uint64_t most = left / 100 * percent + left % 100 * percent / 100;
    return most || !left ? most : 1;
}
