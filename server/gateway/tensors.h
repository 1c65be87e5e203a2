/* tensors.h - tensors that HTTP callers keep on the device: uploaded once, named by later requests.
 *
 * A tensor belongs to the caller (auth.h) who uploaded it; nobody else sees it, and two callers may
 * use the same name. It goes when its lifetime has passed since it was last used, when it is
 * deleted or replaced, half a second after its owner left (auth.h), and with its worker: then it is
 * listed as lost, counts in no limit of bytes, gives way where there are too many, and who names it
 * is told KLD_GONE. Requests that already use it finish with what
 * it held, and it counts for the limits until the last of them has. Any thread. */
#ifndef KLD_SERVER_GATEWAY_TENSORS_H
#define KLD_SERVER_GATEWAY_TENSORS_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "proto/oip.h"
#include "server/gateway/auth.h"
#include "server/gateway/pool.h"
#include "server/stats.h"

struct kld_tensors;

struct kld_stored {
    /* The uploader's, before kld_tensors_reserve(). */
    const struct kld_caller *owner;
    char name[KLD_OIP_NAME_MAX];
    uint32_t dtype, rank;
    uint64_t shape[KLD_RANK_MAX];
    uint64_t bytes, lifetime_ns;

    /* tensors.c's. */
    struct kld_stored *next;
    struct kld_pool_buffer *buffer; /* NULL: still being uploaded */
    uint64_t used_ns;
    bool condemned; /* named by nobody; counted until its last request has let go of the buffer */
    bool lost;      /* with its worker; its bytes are not counted any more */
};

/* loop: the calling thread's, which keeps the lifetimes. */
enum kld_status kld_tensors_open(uv_loop_t *loop, const struct kld_config *config,
                                 struct kld_stats *stats, struct kld_tensors **ret_tensors,
                                 struct kld_error *err);
/* For that loop, which ends: lifetimes are not kept any more. */
void kld_tensors_stop(struct kld_tensors *tensors);
/* After the loop has ended, before the pools are closed. */
void kld_tensors_close(struct kld_tensors *tensors);

/* Room for a tensor. KLD_TOO_LARGE: it alone has more than tensor_bytes_max or
 * token_tensor_bytes_max; KLD_THROTTLED: with what its owner stores it would be more than these,
 * token_tensors_max or tensors_max; KLD_BUSY: with what others store. Where it replaces one the
 * limits of numbers do not count it.
 * The copy in *ret_stored is the list's; it is seen by nobody until kld_tensors_publish(). */
enum kld_status kld_tensors_reserve(struct kld_tensors *tensors, const struct kld_stored *wanted,
                                    struct kld_stored **ret_stored, struct kld_error *err);
/* Takes over one use of the buffer. An earlier one of this name goes. */
void kld_tensors_publish(struct kld_tensors *tensors, struct kld_stored *stored,
                         struct kld_pool_buffer *buffer);
void kld_tensors_give_up(struct kld_tensors *tensors, struct kld_stored *stored);

/* False: no such name. */
bool kld_tensors_remove(struct kld_tensors *tensors, const struct kld_caller *owner,
                        const char *name);
/* The buffer of the stored tensor that an input names, held until kld_pool_drop(). KLD_NOT_FOUND;
 * KLD_GONE: lost; KLD_INVALID: of another shape or datatype. */
enum kld_status kld_tensors_acquire(struct kld_tensors *tensors, const struct kld_caller *owner,
                                    const struct kld_oip_tensor *input,
                                    struct kld_pool_buffer **ret_buffer, struct kld_error *err);

/* A list in JSON, of one name or of all (NULL), into memory for the caller to free().
 * KLD_NOT_FOUND: no such name. */
enum kld_status kld_tensors_list(struct kld_tensors *tensors, const struct kld_caller *owner,
                                 const char *name, struct kld_oip_text *ret_text,
                                 struct kld_error *err);

#endif
