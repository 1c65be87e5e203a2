/* staging.c - a sealed memfd, an allocator over it, and whose turn it is (staging.h). Each area's
 * list of ranges covers all of it, in order, with no two free neighbours. Thousands of requests may
 * have some, so nothing looks for one along that list: free ones are found by their size, those in
 * use by where they begin. Any thread: lists and queues are under a mutex. */
#include "server/gateway/staging.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <uv.h>

#define SIZES 48 /* lists of free ranges, each of those up to twice as large as the last list's */
#define JSON_PART 2       /* one in so many bytes may be JSON, ... */
#define JSON_SHARE_PART 2 /* ... and of those one in so many the JSON of one caller */
#define PLACES 1024       /* lists of used ranges; a power of two */

struct range {
    struct range *before, *after;
    struct range *newer, *older; /* in its list of free ones */
    struct range *next;          /* in its list of used ones */
    uint64_t offset, bytes;
    bool used, json;
    struct kld_staging_turn *owner; /* NULL: none, or it never waits */
};

/* A part of the memory, with a queue of its own. */
struct area {
    uint64_t offset, bytes;               /* constant once open; 0 bytes: there is no such */
    struct range *first;                  /* all of it */
    struct range *vacant[SIZES];          /* the newest of each list of free ones */
    struct range **taken;                 /* PLACES lists of used ones */
    struct kld_staging_turn *head, *tail; /* of those who hold none */
    uint32_t holders;                     /* that wait; they stand in no order */
    uint64_t used_bytes, json_bytes;      /* json_bytes: of those, what JSON has */
};

struct kld_staging {
    int fd; /* constant once open, as the next four */
    uint64_t bytes, small_bytes_max;
    char *memory;
    struct kld_stats *stats; /* NULL: none */
    _Atomic uint64_t changes;
    uv_mutex_t mutex; /* of all below */
    struct area large, small;
};

static enum kld_status make_memory(struct kld_staging *staging, struct kld_error *err) {
    staging->fd = memfd_create("kld-staging", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (staging->fd < 0 || ftruncate(staging->fd, (off_t)staging->bytes) != 0 ||
        fcntl(staging->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return kld_error_set(err, KLD_NO_MEMORY, "no shared memory for staging: %s",
                             strerror(errno));
    void *memory = mmap(NULL, staging->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, staging->fd, 0);
    if (memory == MAP_FAILED)
        return kld_error_set(err, KLD_NO_MEMORY, "staging memory cannot be mapped: %s",
                             strerror(errno));
    staging->memory = memory;
    return KLD_OK;
}

/* Which list of free ones has ranges of that size: the 0th those of KLD_STAGING_ALIGN bytes. */
static uint32_t size_of(uint64_t bytes) {
    uint32_t size = 63 - (uint32_t)__builtin_clzll(bytes / KLD_STAGING_ALIGN);
    return size < SIZES ? size : SIZES - 1;
}

static void vacate(struct area *area, struct range *range) {
    struct range **newest = &area->vacant[size_of(range->bytes)];
    range->newer = NULL;
    range->older = *newest;
    if (range->older)
        range->older->newer = range;
    *newest = range;
}

static void occupy(struct area *area, struct range *range) {
    if (range->newer)
        range->newer->older = range->older;
    else
        area->vacant[size_of(range->bytes)] = range->older;
    if (range->older)
        range->older->newer = range->newer;
}

static struct range **place_of(const struct area *area, uint64_t offset) {
    uint64_t mixed = offset / KLD_STAGING_ALIGN * 0x9e3779b97f4a7c15;
    return &area->taken[(mixed >> 32) & (PLACES - 1)];
}

/* A free range of so much at least, from the lists of the smallest that may have one. */
static struct range *find_vacant(const struct area *area, uint64_t bytes) {
    for (uint32_t size = size_of(bytes); size < SIZES; size++)
        for (struct range *range = area->vacant[size]; range; range = range->older)
            if (range->bytes >= bytes)
                return range;
    return NULL;
}

static enum kld_status open_area(struct area *area, uint64_t offset, uint64_t bytes,
                                 struct kld_error *err) {
    area->offset = offset;
    area->bytes = bytes;
    area->first = calloc(1, sizeof *area->first);
    area->taken = calloc(PLACES, sizeof(struct range *));
    if (!area->first || !area->taken)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    area->first->offset = offset;
    area->first->bytes = bytes;
    vacate(area, area->first);
    return KLD_OK;
}

static enum kld_status open_areas(struct kld_staging *staging, struct kld_error *err) {
    uint64_t bytes = staging->bytes, small = (bytes / 16) & ~(uint64_t)4095;
    staging->small_bytes_max = small / KLD_STAGING_SMALL_PARTS;
    if (staging->small_bytes_max > KLD_STAGING_SMALL_BYTES)
        staging->small_bytes_max = KLD_STAGING_SMALL_BYTES;
    enum kld_status status = open_area(&staging->large, 0, bytes - small, err);
    return status || !small ? status : open_area(&staging->small, bytes - small, small, err);
}

enum kld_status kld_staging_open(uint64_t bytes, struct kld_stats *stats,
                                 struct kld_staging **ret_staging, struct kld_error *err) {
    struct kld_staging *staging = calloc(1, sizeof *staging);
    enum kld_status status;
    if (!staging || uv_mutex_init(&staging->mutex) != 0) {
        free(staging);
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    }
    staging->fd = -1;
    staging->stats = stats;
    staging->bytes = (bytes ? bytes + 4095 : 4096) & ~(uint64_t)4095;
    if (bytes > (uint64_t)1 << 50)
        status = kld_error_set(err, KLD_INVALID, "staging_bytes_max is over 2^50 bytes");
    else if ((status = open_areas(staging, err)) == KLD_OK)
        status = make_memory(staging, err);
    if (status) {
        kld_staging_close(staging);
        return status;
    }
    *ret_staging = staging;
    return KLD_OK;
}

static void close_area(struct area *area) {
    for (struct range *range = area->first, *after; range; range = after) {
        after = range->after;
        free(range);
    }
    free(area->taken);
}

void kld_staging_close(struct kld_staging *staging) {
    if (!staging)
        return;
    close_area(&staging->large);
    close_area(&staging->small);
    if (staging->memory)
        munmap(staging->memory, staging->bytes);
    if (staging->fd >= 0)
        close(staging->fd);
    uv_mutex_destroy(&staging->mutex);
    free(staging);
}

int kld_staging_fd(const struct kld_staging *staging) { return staging->fd; }
uint64_t kld_staging_bytes(const struct kld_staging *staging) { return staging->bytes; }
uint64_t kld_staging_range_bytes_max(const struct kld_staging *staging) {
    return staging->large.bytes;
}
void *kld_staging_at(const struct kld_staging *staging, uint64_t offset) {
    return staging->memory + offset;
}

uint64_t kld_staging_used_bytes(struct kld_staging *staging) {
    uv_mutex_lock(&staging->mutex);
    uint64_t used = staging->large.used_bytes + staging->small.used_bytes;
    uv_mutex_unlock(&staging->mutex);
    return used;
}

/* Under the mutex, so that the gauge ends with the last value. */
static void count(struct kld_staging *staging, struct area *area, int64_t more) {
    area->used_bytes += (uint64_t)more;
    if (staging->stats)
        kld_stats_set(staging->stats, KLD_STAT_staging_bytes,
                      staging->large.used_bytes + staging->small.used_bytes);
}

/* Of the range that begins here. */
static struct area *area_at(struct kld_staging *staging, uint64_t offset) {
    return staging->small.bytes && offset >= staging->small.offset ? &staging->small
                                                                   : &staging->large;
}

/* What range has over `bytes` is rest's, and free. */
static void split(struct area *area, struct range *range, uint64_t bytes, struct range *rest) {
    *rest = (struct range){.before = range,
                           .after = range->after,
                           .offset = range->offset + bytes,
                           .bytes = range->bytes - bytes};
    if (rest->after)
        rest->after->before = rest;
    range->after = rest;
    range->bytes = bytes;
    vacate(area, rest);
}

static enum kld_status alloc(struct kld_staging *staging, struct area *area, uint64_t bytes,
                             struct range **ret_range, struct kld_error *err) {
    if (bytes > area->bytes)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the request needs %" PRIu64 " bytes of staging memory; there are "
                             "%" PRIu64 " (staging_bytes_max)",
                             bytes, area->bytes);
    uint64_t rounded = (bytes + KLD_STAGING_ALIGN - 1) & ~(uint64_t)(KLD_STAGING_ALIGN - 1);
    if (rounded == 0)
        rounded = KLD_STAGING_ALIGN;
    struct range *range = find_vacant(area, rounded), *rest = NULL;
    if (!range)
        return kld_error_set(err, KLD_BUSY, "the staging memory is in use; try again");
    if (range->bytes > rounded && !(rest = malloc(sizeof *rest))) /* split() fills it */
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    occupy(area, range);
    if (rest)
        split(area, range, rounded, rest);
    struct range **place = place_of(area, range->offset);
    range->next = *place;
    *place = range;
    range->used = true;
    range->json = false;
    range->owner = NULL;
    count(staging, area, (int64_t)range->bytes);
    *ret_range = range;
    return KLD_OK;
}

static struct area *area_for(struct kld_staging *staging, uint64_t bytes) {
    return bytes <= staging->small_bytes_max && staging->small.bytes ? &staging->small
                                                                     : &staging->large;
}

enum kld_status kld_staging_alloc(struct kld_staging *staging, uint64_t bytes, uint64_t *ret_offset,
                                  struct kld_error *err) {
    struct range *range;
    uv_mutex_lock(&staging->mutex);
    enum kld_status status = alloc(staging, area_for(staging, bytes), bytes, &range, err);
    if (status == KLD_OK)
        *ret_offset = range->offset;
    uv_mutex_unlock(&staging->mutex);
    return status;
}

/* ---- Turns ------------------------------------------------------------------------------------*/

static void leave(struct kld_staging *staging, struct kld_staging_turn *turn) {
    struct area *area = turn->small ? &staging->small : &staging->large;
    if (!turn->queued)
        return;
    turn->queued = false;
    atomic_fetch_add(&staging->changes, 1); /* the one behind it */
    if (turn->has[turn->small]) {
        area->holders--;
        return;
    }
    if (turn->before)
        turn->before->after = turn->after;
    else
        area->head = turn->after;
    if (turn->after)
        turn->after->before = turn->before;
    else
        area->tail = turn->before;
}

static void queue(struct area *area, struct kld_staging_turn *turn, bool small) {
    turn->queued = true;
    turn->small = small;
    if (turn->has[small]) {
        area->holders++;
        return;
    }
    turn->after = NULL;
    turn->before = area->tail;
    if (area->tail)
        area->tail->after = turn;
    else
        area->head = turn;
    area->tail = turn;
}

/* Would everybody who has some of the area wait for more of it, if this turn waited too? Who
 * waits, but could have what he wants by now, is about to ask again. */
static bool all_wait(const struct area *area, const struct kld_staging_turn *turn, bool small,
                     uint64_t *ret_mine_bytes) {
    uint64_t room = 0, mine = 0;
    for (const struct range *range = area->first; range; range = range->after)
        if (!range->used)
            room = range->bytes > room ? range->bytes : room;
        else if (range->owner == turn)
            mine += range->bytes;
        else if (!range->owner || !range->owner->queued || range->owner->small != small)
            return false;
    for (const struct range *range = area->first; range; range = range->after)
        if (range->used && range->owner != turn && range->owner->wanted_bytes <= room)
            return false;
    *ret_mine_bytes = mine;
    return mine > 0;
}

/* For who found no room: he waits, unless that would never end. */
static enum kld_status wait_or_refuse(const struct area *area, const struct kld_staging_turn *turn,
                                      bool small, uint64_t bytes, struct kld_error *err) {
    uint64_t mine;
    if (!all_wait(area, turn, small, &mine))
        return KLD_BUSY;
    if (mine < area->used_bytes)
        return kld_error_set(err, KLD_UNAVAILABLE,
                             "other requests have the staging memory that this one needs, and wait "
                             "for what it has; try again");
    return kld_error_set(err, KLD_TOO_LARGE,
                         "the request has %" PRIu64 " bytes of staging memory and outgrows it with "
                         "%" PRIu64 " more; there are %" PRIu64 " (staging_bytes_max); send the "
                         "length of its JSON, or tensors as binary data",
                         mine, bytes, area->bytes);
}

static bool json_is_full(const struct area *area, uint64_t more) {
    return area->json_bytes && area->json_bytes + more > area->bytes / JSON_PART;
}

/* With what others' JSON of the same caller has; a turn alone may have what it needs. */
static enum kld_status check_share(const struct area *area, const struct kld_staging_turn *turn,
                                   bool small, uint64_t more, struct kld_error *err) {
    uint64_t most = area->bytes / JSON_PART / JSON_SHARE_PART;
    if (!turn->share || !turn->capped ||
        turn->share->json_bytes[small] == turn->json_bytes[small] ||
        turn->share->json_bytes[small] + more <= most)
        return KLD_OK;
    return kld_error_set(
        err, KLD_THROTTLED,
        "the JSON of this token's requests in flight has %" PRIu64
        " bytes of staging memory and this one needs %" PRIu64 "; at most %" PRIu64
        " (about a quarter of staging_bytes_max); try again, or send tensors as binary data",
        turn->share->json_bytes[small], more, most);
}

static void count_json(struct area *area, const struct range *range, bool small, bool taken) {
    uint64_t more = taken ? range->bytes : -range->bytes;
    area->json_bytes += more;
    range->owner->json_bytes[small] += more;
    if (range->owner->share)
        range->owner->share->json_bytes[small] += more;
}

/* Behind somebody who came earlier? JSON that waits for other JSON holds up JSON alone. */
static bool is_behind(const struct area *area, const struct kld_staging_turn *turn) {
    bool full = false; /* and so for all JSON behind that one */
    for (const struct kld_staging_turn *one = area->head; one && one != turn; one = one->after) {
        full = full || json_is_full(area, one->wanted_bytes);
        if (turn->json || !one->json || !full)
            return true;
    }
    return false;
}

static enum kld_status take(struct kld_staging *staging, struct kld_staging_turn *turn,
                            uint64_t bytes, bool json, uint64_t *ret_offset,
                            struct kld_error *err) {
    struct area *area = area_for(staging, bytes);
    struct range *range = NULL;
    bool small = area == &staging->small;
    turn->wanted_bytes = bytes;
    turn->json = json;
    bool waits = !turn->has[small] &&
                 (area->holders || (json && json_is_full(area, bytes)) || is_behind(area, turn));
    enum kld_status status = json ? check_share(area, turn, small, bytes, err) : KLD_OK;
    if (status == KLD_OK)
        status = waits && bytes <= area->bytes
                     ? kld_error_set(err, KLD_BUSY, "others wait for staging memory; try again")
                     : alloc(staging, area, bytes, &range, err);
    if (status == KLD_BUSY)
        status = wait_or_refuse(area, turn, small, bytes, err);
    if (status != KLD_BUSY)
        leave(staging, turn);
    else if (!turn->queued)
        queue(area, turn, small);
    if (status)
        return status;
    turn->has[small] = true;
    range->owner = turn;
    range->json = json;
    if (json)
        count_json(area, range, small, true);
    *ret_offset = range->offset;
    return KLD_OK;
}

enum kld_status kld_staging_take(struct kld_staging *staging, struct kld_staging_turn *turn,
                                 uint64_t bytes, bool json, uint64_t *ret_offset,
                                 struct kld_error *err) {
    uv_mutex_lock(&staging->mutex);
    enum kld_status status = take(staging, turn, bytes, json, ret_offset, err);
    uv_mutex_unlock(&staging->mutex);
    return status;
}

void kld_staging_leave(struct kld_staging *staging, struct kld_staging_turn *turn) {
    uv_mutex_lock(&staging->mutex);
    leave(staging, turn);
    uv_mutex_unlock(&staging->mutex);
}

uint64_t kld_staging_changes(const struct kld_staging *staging) {
    return atomic_load(&staging->changes);
}

/* ---- Giving back ------------------------------------------------------------------------------*/

/* Joins range with the one behind it; both are in no list of free ones. */
static void join(struct range *range) {
    struct range *gone = range->after;
    range->bytes += gone->bytes;
    range->after = gone->after;
    if (range->after)
        range->after->before = range;
    free(gone);
}

static void give_back(struct kld_staging *staging, struct area *area, struct range *range) {
    range->used = false;
    if (range->json)
        count_json(area, range, area == &staging->small, false);
    range->owner = NULL;
    count(staging, area, -(int64_t)range->bytes);
    atomic_fetch_add(&staging->changes, 1);
    if (range->after && !range->after->used) {
        occupy(area, range->after);
        join(range);
    }
    if (range->before && !range->before->used) {
        range = range->before;
        occupy(area, range);
        join(range);
    }
    vacate(area, range);
}

/* The used one that begins there, out of its list; NULL: none does. */
static struct range *take_at(const struct area *area, uint64_t offset) {
    struct range **place = place_of(area, offset);
    while (*place && (*place)->offset != offset)
        place = &(*place)->next;
    struct range *range = *place;
    if (range)
        *place = range->next;
    return range;
}

void kld_staging_free(struct kld_staging *staging, uint64_t offset) {
    uv_mutex_lock(&staging->mutex);
    struct area *area = area_at(staging, offset);
    struct range *range = take_at(area, offset);
    if (range)
        give_back(staging, area, range);
    uv_mutex_unlock(&staging->mutex);
}
