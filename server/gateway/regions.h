/* regions.h - the list of what HTTP callers registered by name: POSIX shared memory (shm.h) and
 * CUDA memory (cuda_shm.h) alike, under one set of names and of limits.
 *
 * A region belongs to the caller (auth.h) who registered it: nobody else sees, uses or unregisters
 * it, and two callers may use the same name. Its name and its bytes are taken by
 * kld_regions_reserve(), before anything is opened, and count from then on; it is seen by nobody
 * until kld_regions_publish(). The list holds one use of the memory; requests that use it keep it
 * when it is unregistered.
 *
 * Any thread: the list is under a mutex. */
#ifndef KLD_SERVER_GATEWAY_REGIONS_H
#define KLD_SERVER_GATEWAY_REGIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "proto/oip.h"
#include "server/config.h"
#include "server/stats.h"

struct kld_caller;
struct kld_pool_buffer;
struct kld_regions;
struct kld_shm_object;

enum kld_registered_kind { KLD_REGISTERED_SYSTEM, KLD_REGISTERED_CUDA };

/* Memory behind a name, held: an object, which is read and written here, until kld_shm_release(),
 * or a buffer, which its device reads and writes, until kld_pool_drop(). */
struct kld_region_use {
    struct kld_shm_object *object;  /* NULL: a buffer */
    struct kld_pool_buffer *buffer; /* NULL: an object */
};

struct kld_registered {
    /* Before kld_regions_reserve(), which copies it; constant then. */
    enum kld_registered_kind kind;
    const struct kld_caller *owner; /* whose name is "" where there are no tokens */
    uint64_t bytes;
    uint64_t offset_bytes;     /* KLD_REGISTERED_SYSTEM: in its object */
    uint32_t device_id;        /* KLD_REGISTERED_CUDA */
    char key[KLD_OIP_KEY_MAX]; /* KLD_REGISTERED_SYSTEM */
    char name[KLD_OIP_NAME_MAX];

    /* The list's, under its mutex. */
    struct kld_registered *next;
    struct kld_region_use use; /* both NULL: not published yet */
};

enum kld_status kld_regions_open(const struct kld_config *config, struct kld_stats *stats,
                                 struct kld_regions **ret_regions, struct kld_error *err);
/* NULL is allowed. After the loops, before the pools are closed; none is reserved any more. */
void kld_regions_close(struct kld_regions *regions);

/* KLD_INVALID: too long, or none. */
enum kld_status kld_regions_name(struct kld_registered *wanted, const char *name,
                                 struct kld_error *err);
/* KLD_EXISTS: the caller has one of this name, of either kind;
 * KLD_TOO_LARGE: it alone has more bytes than http_region_bytes_max or token_region_bytes_max;
 * KLD_THROTTLED: with what its owner has it would be over these, token_regions_max or
 * http_regions_max; KLD_BUSY: with what others have. Ends with publish or give_up. */
enum kld_status kld_regions_reserve(struct kld_regions *regions,
                                    const struct kld_registered *wanted,
                                    struct kld_registered **ret_registered, struct kld_error *err);
/* Takes over one use of the memory. */
void kld_regions_publish(struct kld_regions *regions, struct kld_registered *registered,
                         struct kld_region_use use);
void kld_regions_give_up(struct kld_regions *regions, struct kld_registered *registered);

/* name NULL: all of this kind that the owner has; unknown: nothing. loop: the calling thread's,
 * whose pool closes objects. */
void kld_regions_unregister(struct kld_regions *regions, enum kld_registered_kind kind,
                            const struct kld_caller *owner, const char *name, uv_loop_t *loop);

/* Those of callers who left (auth.h). True: callers whose tokens are gone have more, so this is to
 * be called again. loop: as above. */
bool kld_regions_drop_left(struct kld_regions *regions, uv_loop_t *loop);

/* The memory behind a name of either kind. KLD_NOT_FOUND; KLD_INVALID: so many bytes at this offset
 * are not in it. */
enum kld_status kld_regions_acquire(struct kld_regions *regions, const struct kld_caller *owner,
                                    const char *name, uint64_t offset_bytes, uint64_t bytes,
                                    struct kld_region_use *ret_use, struct kld_error *err);

/* A list in JSON, of one name or of all (NULL) of this kind, into memory for the caller to free().
 * KLD_NOT_FOUND: no such name. */
enum kld_status kld_regions_list(struct kld_regions *regions, enum kld_registered_kind kind,
                                 const struct kld_caller *owner, const char *name,
                                 struct kld_oip_text *ret_text, struct kld_error *err);

#endif
