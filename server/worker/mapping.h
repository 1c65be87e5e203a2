/* mapping.h - shared memory that several connections registered is mapped, and pinned, once.
 *
 * The gateway registers its staging memory on each of its connections: to map it for each would
 * cost as much again, and the driver pins every mapping on its own. Two descriptors are the same
 * memory where the kernel says that they are one open file (kcmp), or, where it does not say, one
 * inode (fstat): who has that could read and write it before. For it a descriptor is kept as long
 * as the mapping, of at most KLD_MAPPINGS_MAX of at least KLD_MAPPING_BYTES_MIN bytes, some of
 * which are kept for the gateway; what is beyond that is mapped each time.
 *
 * uv's pool, where mapping may take its time; init and done on the loop thread. */
#ifndef KLD_SERVER_WORKER_MAPPING_H
#define KLD_SERVER_WORKER_MAPPING_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>
#include <uv.h>

#include "kernels/backend.h"
#include "server/worker/users.h"

#define KLD_MAPPINGS_MAX 64
#define KLD_MAPPINGS_GATEWAY 4 /* of them: its staging, and what one before it had */
#define KLD_MAPPING_BYTES_MIN ((uint64_t)1 << 20)

struct kld_mapping;
struct kld_stats;

/* For what is mapped for clients. It counts once, for the user who came with it first. */
struct kld_mapping_limit {
    uint64_t bytes_max;  /* of all that was mapped with a limit */
    uint64_t user_share; /* percent, see users.h */
    struct kld_user *user;
};

struct kld_mappings {
    const struct kld_backend *backend; /* constant, as device */
    struct kld_device *device;
    struct kld_users *users; /* of the limits */
    struct kld_stats *stats; /* where the bytes are told, by any thread; NULL: nowhere */
    uv_mutex_t mutex;        /* of all below */
    uv_cond_t mapped;        /* one of them, or not */
    TAILQ_HEAD(kld_mapping_list, kld_mapping) list;
    uint32_t count;        /* on the list */
    uint32_t clients;      /* of them: that were made with a limit */
    uint64_t shared_bytes; /* mapped for who has a limit */
    bool told;             /* that there is no kcmp */
    bool told_slow;        /* that memory could not be pinned */
};

enum kld_status kld_mappings_init(struct kld_mappings *mappings, const struct kld_backend *backend,
                                  struct kld_device *device, struct kld_users *users,
                                  struct kld_error *err);
void kld_mappings_done(struct kld_mappings *mappings); /* none is held any more */

/* Bytes [0, bytes) of a memfd that is sealed against shrinking. Takes over fd. limit: NULL: none,
 * and it does not count; its user is held as long as the mapping counts for him. *ret_limited: it
 * was refused for that, and nothing failed. */
enum kld_status kld_mapping_acquire(struct kld_mappings *mappings, int fd, uint64_t bytes,
                                    const struct kld_mapping_limit *limit,
                                    struct kld_mapping **ret_mapping,
                                    struct kld_memory **ret_memory, bool *ret_limited,
                                    struct kld_error *err);
/* KLD_DEVICE_LOST: as memory_free() of the back end. */
enum kld_status kld_mapping_release(struct kld_mappings *mappings, struct kld_mapping *mapping);

#endif
