/* tensors.c - the list of tensors that callers keep on the device, their lifetimes and quotas
 * (tensors.h). Moves no bytes (upload.c). Any thread: the list is under a mutex. */
#include "server/gateway/tensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define LOOK_MS 500 /* how exactly lifetimes are kept */
/* Of one tensor in the list; every byte of a name may be escaped, which makes it six. */
#define LISTED_BYTES_MAX (6 * KLD_OIP_NAME_MAX + 512)

struct kld_tensors {
    const struct kld_config *config;
    struct kld_stats *stats;
    uv_timer_t timer;
    uv_mutex_t mutex; /* of all below, and of what tensors.c has in the tensors themselves */
    struct kld_stored *first; /* the newest */
    uint32_t count;
    uint64_t bytes; /* with those being uploaded, without the lost ones */
};

static void count(struct kld_tensors *tensors, int count, int64_t bytes) {
    tensors->count += (uint32_t)count;
    tensors->bytes += (uint64_t)bytes;
    kld_stats_set(tensors->stats, KLD_STAT_http_tensors, tensors->count);
    kld_stats_set(tensors->stats, KLD_STAT_http_tensor_bytes, tensors->bytes);
}

static void take_out(struct kld_tensors *tensors, struct kld_stored **at) {
    struct kld_stored *stored = *at;
    *at = stored->next;
    count(tensors, -1, stored->lost ? 0 : -(int64_t)stored->bytes);
    kld_pool_drop(stored->buffer);
    free(stored);
}

/* The device has no memory for it any more, so it is not to keep another one out. */
static void note_loss(struct kld_tensors *tensors, struct kld_stored *stored) {
    if (stored->lost || !stored->buffer || !atomic_load(&stored->buffer->lost))
        return;
    stored->lost = true;
    count(tensors, 0, -(int64_t)stored->bytes);
}

/* Nobody can acquire a condemned one: who counts as its only user stays so. */
static void sweep(struct kld_tensors *tensors) {
    for (struct kld_stored **at = &tensors->first; *at;) {
        note_loss(tensors, *at);
        if ((*at)->condemned && ((*at)->lost || atomic_load(&(*at)->buffer->users) == 1))
            take_out(tensors, at);
        else
            at = &(*at)->next;
    }
}

/* Of the lost ones, of this owner or of all (NULL), the one that was not used for longest. */
static void forget_a_lost_one(struct kld_tensors *tensors, const struct kld_caller *owner) {
    struct kld_stored **found = NULL;
    for (struct kld_stored **at = &tensors->first; *at; at = &(*at)->next)
        if ((*at)->lost && (!owner || (*at)->owner == owner) &&
            (!found || (*at)->used_ns < (*found)->used_ns))
            found = at;
    if (found)
        take_out(tensors, found);
}

static void look(uv_timer_t *timer) {
    struct kld_tensors *tensors = timer->data;
    uv_mutex_lock(&tensors->mutex);
    uint64_t now = uv_hrtime();
    for (struct kld_stored *stored = tensors->first; stored; stored = stored->next)
        if (stored->buffer &&
            (now - stored->used_ns > stored->lifetime_ns || kld_caller_left(stored->owner)))
            stored->condemned = true;
    sweep(tensors);
    uv_mutex_unlock(&tensors->mutex);
}

enum kld_status kld_tensors_open(uv_loop_t *loop, const struct kld_config *config,
                                 struct kld_stats *stats, struct kld_tensors **ret_tensors,
                                 struct kld_error *err) {
    struct kld_tensors *tensors = calloc(1, sizeof *tensors);
    if (!tensors || uv_mutex_init(&tensors->mutex) != 0) {
        free(tensors);
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    }
    tensors->config = config;
    tensors->stats = stats;
    uv_timer_init(loop, &tensors->timer);
    tensors->timer.data = tensors;
    uv_timer_start(&tensors->timer, look, LOOK_MS, LOOK_MS);
    *ret_tensors = tensors;
    return KLD_OK;
}

void kld_tensors_stop(struct kld_tensors *tensors) {
    uv_close((uv_handle_t *)&tensors->timer, NULL);
}

void kld_tensors_close(struct kld_tensors *tensors) {
    while (tensors->first)
        take_out(tensors, &tensors->first);
    uv_mutex_destroy(&tensors->mutex);
    free(tensors);
}

static struct kld_stored **find(struct kld_tensors *tensors, const struct kld_caller *owner,
                                const char *name) {
    struct kld_stored **at = &tensors->first;
    while (*at && !((*at)->buffer && !(*at)->condemned && (*at)->owner == owner &&
                    strcmp((*at)->name, name) == 0))
        at = &(*at)->next;
    return at;
}

/* One that is on its way takes the place of the one that it replaces, which is there until then; of
 * several of one name the first to come alone does. */
static bool replaces(struct kld_tensors *tensors, const struct kld_stored *stored) {
    const struct kld_stored *oldest = NULL; /* the list begins with the newest */
    if (stored->buffer || !*find(tensors, stored->owner, stored->name))
        return false;
    for (const struct kld_stored *other = tensors->first; other; other = other->next)
        if (!other->buffer && other->owner == stored->owner &&
            strcmp(other->name, stored->name) == 0)
            oldest = other;
    return !oldest || oldest == stored;
}

struct held {
    uint64_t places, bytes;
};

/* By this owner, or by all (NULL). */
static struct held held_by(struct kld_tensors *tensors, const struct kld_caller *owner) {
    struct held held = {.places = 0};
    for (const struct kld_stored *stored = tensors->first; stored; stored = stored->next)
        if (!owner || stored->owner == owner) {
            held.bytes += stored->lost ? 0 : stored->bytes;
            held.places += !replaces(tensors, stored);
        }
    return held;
}

/* A place for one more, where a lost one has it; a lost one that is uploaded again leaves its own
 * when that has come. */
static void make_room(struct kld_tensors *tensors, const struct kld_stored *wanted) {
    const struct kld_config *config = tensors->config;
    sweep(tensors);
    if (replaces(tensors, wanted))
        return;
    if (wanted->owner->name[0] &&
        held_by(tensors, wanted->owner).places >= config->token_tensors_max)
        forget_a_lost_one(tensors, wanted->owner);
    if (held_by(tensors, NULL).places >= config->tensors_max)
        forget_a_lost_one(tensors, NULL);
}

/* What no wait and no deletion would help. */
static enum kld_status check_alone(const struct kld_config *config, const struct kld_stored *wanted,
                                   struct kld_error *err) {
    if (wanted->bytes > config->tensor_bytes_max)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the tensor has %" PRIu64 " bytes; all stored ones at most %" PRIu64
                             " (tensor_bytes_max)",
                             wanted->bytes, config->tensor_bytes_max);
    if (wanted->owner->name[0] && wanted->bytes > config->token_tensor_bytes_max)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the tensor has %" PRIu64 " bytes; those of one token at most %" PRIu64
                             " (token_tensor_bytes_max)",
                             wanted->bytes, config->token_tensor_bytes_max);
    return KLD_OK;
}

/* KLD_THROTTLED: what is in the way is the token's own; KLD_BUSY: it is others' as well. The bytes
 * of one that is to be replaced count until then: both are on the device meanwhile. */
static enum kld_status check(struct kld_tensors *tensors, const struct kld_stored *wanted,
                             struct kld_error *err) {
    const struct kld_config *config = tensors->config;
    uint64_t most = config->tensor_bytes_max, mine = config->token_tensor_bytes_max;
    struct held owned = held_by(tensors, wanted->owner), all = held_by(tensors, NULL);
    const struct kld_stored *there = *find(tensors, wanted->owner, wanted->name);
    const char *cure =
        there && !there->lost ? "delete the one that it replaces first" : "delete one";
    bool named = wanted->owner->name[0], more = !replaces(tensors, wanted);
    enum kld_status status = check_alone(config, wanted, err);
    if (status)
        return status;
    if (named && owned.places + more > config->token_tensors_max)
        return kld_error_set(err, KLD_THROTTLED,
                             "this token stores %" PRIu64
                             " tensors, the most allowed (token_tensors_max); delete one",
                             owned.places);
    if (named && owned.bytes > mine - wanted->bytes)
        return kld_error_set(err, KLD_THROTTLED,
                             "the tensor has %" PRIu64 " bytes and this token stores %" PRIu64
                             "; at most %" PRIu64 " (token_tensor_bytes_max); %s",
                             wanted->bytes, owned.bytes, mine, cure);
    if (all.places + more > config->tensors_max)
        return kld_error_set(err, named && owned.places == all.places ? KLD_THROTTLED : KLD_BUSY,
                             "there are %" PRIu64
                             " stored tensors, the most allowed (tensors_max); delete one",
                             all.places);
    if (all.bytes > most - wanted->bytes)
        return kld_error_set(err, named && owned.bytes == all.bytes ? KLD_THROTTLED : KLD_BUSY,
                             "the tensor has %" PRIu64 " bytes and %" PRIu64
                             " are stored; at most %" PRIu64 " (tensor_bytes_max); %s",
                             wanted->bytes, all.bytes, most, cure);
    return KLD_OK;
}

enum kld_status kld_tensors_reserve(struct kld_tensors *tensors, const struct kld_stored *wanted,
                                    struct kld_stored **ret_stored, struct kld_error *err) {
    struct kld_stored *stored = malloc(sizeof *stored);
    if (!stored)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    *stored = *wanted;
    stored->buffer = NULL;
    stored->condemned = stored->lost = false;
    uv_mutex_lock(&tensors->mutex);
    make_room(tensors, stored);
    enum kld_status status = check(tensors, stored, err);
    if (status == KLD_OK) {
        stored->next = tensors->first;
        tensors->first = stored;
        count(tensors, 1, (int64_t)stored->bytes);
    }
    uv_mutex_unlock(&tensors->mutex);
    if (status == KLD_BUSY)
        kld_stats_rejected(tensors->stats, KLD_REJECT_http_tensors_full);
    if (status)
        free(stored);
    else
        *ret_stored = stored;
    return status;
}

static bool condemn(struct kld_tensors *tensors, const struct kld_caller *owner, const char *name) {
    struct kld_stored *stored = *find(tensors, owner, name);
    if (stored)
        stored->condemned = true;
    sweep(tensors);
    return stored != NULL;
}

void kld_tensors_publish(struct kld_tensors *tensors, struct kld_stored *stored,
                         struct kld_pool_buffer *buffer) {
    uv_mutex_lock(&tensors->mutex);
    condemn(tensors, stored->owner, stored->name);
    stored->buffer = buffer;
    stored->used_ns = uv_hrtime();
    uv_mutex_unlock(&tensors->mutex);
}

void kld_tensors_give_up(struct kld_tensors *tensors, struct kld_stored *stored) {
    uv_mutex_lock(&tensors->mutex);
    struct kld_stored **at = &tensors->first;
    while (*at != stored)
        at = &(*at)->next;
    take_out(tensors, at);
    uv_mutex_unlock(&tensors->mutex);
}

bool kld_tensors_remove(struct kld_tensors *tensors, const struct kld_caller *owner,
                        const char *name) {
    uv_mutex_lock(&tensors->mutex);
    bool found = condemn(tensors, owner, name);
    uv_mutex_unlock(&tensors->mutex);
    return found;
}

static enum kld_status acquire(struct kld_tensors *tensors, const struct kld_caller *owner,
                               const struct kld_oip_tensor *input,
                               struct kld_pool_buffer **ret_buffer, struct kld_error *err) {
    struct kld_stored *stored = *find(tensors, owner, input->region);
    if (!stored)
        return kld_error_set(err, KLD_NOT_FOUND, "no tensor '%.60s' is stored", input->region);
    if (atomic_load(&stored->buffer->lost))
        return kld_error_set(err, KLD_GONE,
                             "the stored tensor '%.60s' was lost with its worker; upload it again",
                             input->region);
    if (stored->dtype != input->dtype || stored->rank != input->rank ||
        memcmp(stored->shape, input->shape, stored->rank * sizeof stored->shape[0]) != 0)
        return kld_error_set(err, KLD_INVALID,
                             "%s: the stored tensor '%.60s' has another shape or datatype (it is "
                             "%s of %" PRIu64 " bytes)",
                             kld_slot_name(input->slot), input->region,
                             kld_dtype_name(stored->dtype), stored->bytes);
    stored->used_ns = uv_hrtime();
    kld_pool_hold(stored->buffer);
    *ret_buffer = stored->buffer;
    return KLD_OK;
}

enum kld_status kld_tensors_acquire(struct kld_tensors *tensors, const struct kld_caller *owner,
                                    const struct kld_oip_tensor *input,
                                    struct kld_pool_buffer **ret_buffer, struct kld_error *err) {
    uv_mutex_lock(&tensors->mutex);
    enum kld_status status = acquire(tensors, owner, input, ret_buffer, err);
    uv_mutex_unlock(&tensors->mutex);
    return status;
}

static void append(const struct kld_stored *stored, uint64_t now, struct kld_oip_text *text) {
    kld_oip_append(text, "%s{\"name\":", text->length > 1 ? "," : "");
    kld_oip_append_string(text, stored->name);
    kld_oip_append(text, ",\"datatype\":\"%s\",\"shape\":", kld_dtype_name(stored->dtype));
    kld_oip_append_shape(text, stored->shape, stored->rank);
    kld_oip_append(text,
                   ",\"byte_size\":%" PRIu64 ",\"device\":%" PRIu32 ",\"lifetime_ms\":%" PRIu64
                   ",\"idle_ms\":%" PRIu64 ",\"state\":\"%s\"}",
                   stored->bytes, kld_pool_index(stored->buffer->pool),
                   stored->lifetime_ns / 1000000, (now - stored->used_ns) / 1000000,
                   atomic_load(&stored->buffer->lost) ? "LOST" : "READY");
}

/* Under the mutex from its size to its last byte: nothing comes in between. */
enum kld_status kld_tensors_list(struct kld_tensors *tensors, const struct kld_caller *owner,
                                 const char *name, struct kld_oip_text *ret_text,
                                 struct kld_error *err) {
    uint32_t found = 0;
    uv_mutex_lock(&tensors->mutex);
    size_t most = 3 + (size_t)tensors->count * LISTED_BYTES_MAX;
    struct kld_oip_text text = {.data = malloc(most), .capacity = most};
    uint64_t now = uv_hrtime();
    if (text.data)
        kld_oip_append(&text, "[");
    for (const struct kld_stored *stored = tensors->first; stored && text.data;
         stored = stored->next)
        if (stored->buffer && !stored->condemned && stored->owner == owner &&
            (!name || strcmp(stored->name, name) == 0)) {
            append(stored, now, &text);
            found++;
        }
    uv_mutex_unlock(&tensors->mutex);
    if (!text.data)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    kld_oip_append(&text, "]");
    if (name && !found) {
        free(text.data);
        return kld_error_set(err, KLD_NOT_FOUND, "no tensor of this name is stored");
    }
    *ret_text = text;
    return KLD_OK;
}
