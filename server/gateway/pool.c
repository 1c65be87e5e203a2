/* pool.c - the thread that fills, reads and computes with buffers on the device (pool.h).
 * Everything but the calls of the header runs on that thread, which may wait for the worker: only
 * jobs of its own wait with it. Does not know HTTP. */
#include "server/gateway/pool.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/gateway/gateway.h"
#include "server/gateway/pool_state.h"
#include "server/uv_loop.h"

#define UNREACHABLE_NS 100000000u /* so long nothing is tried again: a try may take long */
#define TICK_MS 10

static struct kld_pool_job *job_of(struct kld_letter *letter) {
    return (struct kld_pool_job *)(void *)((char *)letter - offsetof(struct kld_pool_job, letter));
}

/* On the sender's loop. */
static void read_done(struct kld_letter *letter) {
    struct kld_pool_job *job = job_of(letter);
    job->done(job);
}

static void finish(struct kld_pool_job *job, enum kld_status status,
                   const struct kld_error *error) {
    job->status = status;
    if (status && error && error->status)
        job->error = *error;
    else
        job->error = (struct kld_error){.status = status};
    job->letter.read = read_done;
    kld_mail_post(job->sender, &job->letter);
}

/* ---- The connection ---------------------------------------------------------------------------*/

/* The connection may end while its worker stays. */
static void look_at_losses(struct kld_pool *pool) {
    struct kld_server_info info;
    if (kld_info(pool->connection, &info, NULL) == KLD_OK && info.epoch != pool->epoch) {
        pool->epoch = info.epoch;
        pool->streams = info.streams_max ? info.streams_max : 1;
    }
    uint64_t losses = kld_losses(pool->connection);
    if (losses == pool->losses)
        return;
    pool->losses = losses;
    for (struct kld_pool_buffer *buffer = pool->buffers; buffer; buffer = buffer->after)
        if (buffer->losses != losses && !buffer->imported)
            atomic_store(&buffer->lost, true);
}

static void process(struct kld_pool *pool);
static void ticked(uv_timer_t *timer);

static void readable(uv_poll_t *poll, int status, int events) { process(poll->data); }

/* To a client of ours libkld's server is a part of the one that it asks. */
static enum kld_status of_worker(enum kld_status status, struct kld_error *err) {
    return status == KLD_UNAVAILABLE
               ? kld_error_set(err, status, "the worker is not ready; try again")
               : status;
}

static enum kld_status connect_once(struct kld_pool *pool, struct kld_error *err) {
    struct kld_connect_options options = {.client_name = "gateway-pool",
                                          .connect_timeout_ns =
                                              pool->config->worker_wait_ms * UINT64_C(1000000)};
    char url[KLD_CONFIG_TEXT_MAX + 24];
    if (pool->connection)
        return KLD_OK;
    snprintf(url, sizeof url, pool->index ? "unix:%s.%u" : "unix:%s", pool->config->unix,
             pool->index);
    enum kld_status status = kld_connect(url, &options, &pool->connection, err);
    if (status == KLD_OK)
        status = kld_region_import_memfd(pool->connection, kld_staging_fd(pool->staging),
                                         kld_staging_bytes(pool->staging), &pool->region, err);
    if (status == KLD_OK && uv_poll_init(&pool->loop, &pool->poll, kld_fd(pool->connection)) != 0)
        status = kld_error_set(err, KLD_NO_MEMORY, "the worker's answers cannot be watched");
    if (status) {
        kld_close(pool->connection);
        pool->connection = NULL;
        return of_worker(status, err);
    }
    pool->poll.data = pool;
    uv_poll_start(&pool->poll, UV_READABLE, readable);
    look_at_losses(pool);
    return KLD_OK;
}

/* ---- Jobs -------------------------------------------------------------------------------------*/

static void call_done(void *user, enum kld_status status, const struct kld_result *result,
                      const struct kld_error *error) {
    struct kld_pool_job *job = user;
    struct kld_error lost;
    kld_pool_list_remove(&job->pool->running, job);
    if (status == KLD_UNAVAILABLE) {
        kld_error_set(&lost, status, KLD_WORKER_LOST_TEXT);
        error = &lost;
    }
    if (result)
        job->result = *result;
    look_at_losses(job->pool); /* first: who is told that a buffer is lost sees that it is */
    finish(job, status, error);
}

/* ---- Buffers
 * -----------------------------------------------------------------------------------*/

static enum kld_status make_buffer(struct kld_pool *pool, const struct kld_pool_job *job,
                                   struct kld_pool_buffer **ret_buffer, struct kld_error *err) {
    struct kld_pool_buffer *buffer = calloc(1, sizeof *buffer);
    if (!buffer)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    bool import = job->kind == KLD_POOL_IMPORT;
    kld_pool_offer_kept(pool, false);
    enum kld_status status =
        import ? kld_region_import_cuda_ipc(pool->connection, job->handle, job->uuid, job->bytes, 0,
                                            job->bytes, &buffer->region, err)
               : kld_region_create_pool(pool->connection, job->bytes, &buffer->region, err);
    kld_pool_offer_kept(pool, true);
    if (status) {
        free(buffer);
        return of_worker(status, err);
    }
    look_at_losses(pool);
    buffer->pool = pool;
    buffer->bytes = buffer->room_bytes = job->bytes;
    buffer->imported = import;
    buffer->owner = job->owner;
    buffer->users = 1;
    buffer->losses = pool->losses;
    buffer->after = pool->buffers;
    pool->buffers = buffer;
    *ret_buffer = buffer;
    return KLD_OK;
}

/* There will never be room for it. */
static bool is_too_large(const struct kld_pool *pool, uint64_t bytes) {
    uint64_t most = kld_pool_bytes_max(pool);
    return most && bytes > most;
}

static enum kld_status open_buffer(struct kld_pool *pool, struct kld_pool_job *job,
                                   struct kld_error *err) {
    look_at_losses(pool);
    job->buffer = job->kind == KLD_POOL_OPEN ? kld_pool_take_kept(pool, job->bytes) : NULL;
    if (job->buffer) {
        job->buffer->owner = job->owner;
        return KLD_OK;
    }
    enum kld_status status = make_buffer(pool, job, &job->buffer, err);
    if (status == KLD_TOO_LARGE && job->kind == KLD_POOL_OPEN && kld_pool_gives_way(pool))
        return KLD_NO_MEMORY; /* it waits for what goes */
    if (status != KLD_NO_MEMORY)
        return status;
    if (job->kind == KLD_POOL_OPEN && is_too_large(pool, job->bytes))
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the request needs %" PRIu64 " bytes of the device's pool; there are "
                             "%" PRIu64 " (pool_bytes_max)",
                             job->bytes, kld_pool_bytes_max(pool));
    kld_pool_forget_kept(pool, 0); /* the worker frees them on a thread of its own */
    return status;
}

/* KLD_BUSY: the worker has as many of ours as it takes. */
static enum kld_status send_job(struct kld_pool *pool, struct kld_pool_job *job,
                                struct kld_error *err) {
    uint64_t id;
    uint32_t stream = pool->next_stream++ % pool->streams;
    if (job->kind == KLD_POOL_FILL)
        return kld_submit_copy(pool->connection, job->buffer->region, job->buffer_offset,
                               pool->region, job->staging_offset, job->bytes, stream, 0, call_done,
                               job, &id, err);
    if (job->kind == KLD_POOL_READ)
        return kld_submit_copy(pool->connection, pool->region, job->staging_offset,
                               job->buffer->region, job->buffer_offset, job->bytes, stream, 0,
                               call_done, job, &id, err);
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        if (job->request.op.tensor[slot].dtype)
            job->request.bytes[slot].region =
                job->slot[slot] ? job->slot[slot]->region : pool->region;
    job->request.stream = stream;
    job->request.timeout_ns = 0; /* as in link.c */
    return kld_submit(pool->connection, &job->request, call_done, job, &id, err);
}

static void remember(struct kld_pool *pool, enum kld_status status, const struct kld_error *error) {
    uint64_t now = uv_hrtime();
    if (now < pool->again_ns)
        return;
    pool->unreachable = *error;
    pool->unreachable.status = status;
    pool->again_ns = now + UNREACHABLE_NS;
}

/* Each try that finds no worker holds up the thread. Those who have queued up meanwhile are not
 * made to wait for one more each: they end as the one before them did. */
static enum kld_status reach(struct kld_pool *pool, bool opens, struct kld_error *err) {
    if ((pool->connection && !opens) || uv_hrtime() >= pool->again_ns)
        return connect_once(pool, err);
    *err = pool->unreachable;
    return err->status;
}

/* Pieces are not given up one by one: who sends them stops by himself. */
static bool is_unwanted(const struct kld_pool_job *job) {
    return job->kind != KLD_POOL_FILL && job->kind != KLD_POOL_READ && atomic_load(&job->unwanted);
}

static void give_up(struct kld_pool *pool, struct kld_pool_job *job) {
    kld_pool_list_remove(&pool->waiting, job);
    finish(job, KLD_CANCELLED, NULL);
}

static void send_waiting(struct kld_pool *pool) {
    while (pool->waiting.first) {
        struct kld_pool_job *job = pool->waiting.first;
        struct kld_error error = {.status = KLD_OK};
        if (is_unwanted(job)) {
            give_up(pool, job);
            continue;
        }
        bool opens = job->kind == KLD_POOL_OPEN || job->kind == KLD_POOL_IMPORT;
        enum kld_status status = reach(pool, opens, &error);
        bool tried = status == KLD_OK;
        bool turn = job->kind != KLD_POOL_OPEN || !pool->starved.first ||
                    is_too_large(pool, job->bytes); /* which it is told, and waits for nobody */
        if (status == KLD_OK)
            status = !turn   ? KLD_NO_MEMORY
                     : opens ? open_buffer(pool, job, &error)
                             : send_job(pool, job, &error);
        if (status == KLD_BUSY && !opens && pool->running.first)
            return;
        if ((status == KLD_UNAVAILABLE || status == KLD_DEADLINE) && (opens || !tried))
            remember(pool, status, &error);
        kld_pool_list_remove(&pool->waiting, job);
        if (status == KLD_NO_MEMORY && job->kind == KLD_POOL_OPEN && tried) {
            atomic_store(&job->starved, true);
            atomic_store(&pool->starved_ns, uv_hrtime());
            kld_pool_list_add(&pool->starved, job);
        } else if (status || opens) {
            finish(job, status, &error);
        } else
            kld_pool_list_add(&pool->running, job);
    }
}

/* Is there room by now, with what is kept given back, or will there never be? Else the worker is
 * not asked again: it would count each refusal as a failure of its own. */
static bool may_fit(const struct kld_pool *pool, uint64_t bytes) {
    uint64_t most = kld_pool_bytes_max(pool), end;
    uint64_t used = atomic_load(&pool->shown->pool_bytes);
    used = used > pool->kept_bytes ? used - pool->kept_bytes : 0;
    return !most || is_too_large(pool, bytes) ||
           (!__builtin_add_overflow(used, bytes, &end) && end <= most);
}

static bool is_over_share(const struct kld_pool *pool, const struct kld_pool_job *job) {
    uint64_t most = kld_pool_bytes_max(pool) / KLD_POOL_SHARE_PART, has = 0;
    if (!job->owner || !most)
        return false;
    for (const struct kld_pool_buffer *buffer = pool->buffers; buffer; buffer = buffer->after)
        if (buffer->owner == job->owner && !buffer->kept_ns && !buffer->imported)
            has += buffer->room_bytes;
    return job->bytes > most || has > most - job->bytes;
}

/* Others free memory as well: so at each tick, and when a buffer of ours has been dropped. */
static void feed_starved(struct kld_pool *pool) {
    for (struct kld_pool_job *job = pool->starved.first, *after; job; job = after) {
        after = job->after;
        if (!is_unwanted(job))
            continue;
        kld_pool_list_remove(&pool->starved, job);
        finish(job, KLD_CANCELLED, NULL);
    }
    bool passes = false;
    for (struct kld_pool_job *job = pool->starved.first, *after; job; job = after) {
        struct kld_error error = {.status = KLD_OK};
        bool over = is_over_share(pool, job), fits = may_fit(pool, job->bytes);
        after = job->after;
        if (passes && over)
            continue;
        enum kld_status status = fits ? reach(pool, true, &error) : KLD_NO_MEMORY;
        if (status == KLD_OK)
            status = open_buffer(pool, job, &error);
        if (status == KLD_NO_MEMORY && !over)
            return;
        if (status == KLD_NO_MEMORY) {
            passes = true;
            continue;
        }
        if (status == KLD_UNAVAILABLE || status == KLD_DEADLINE)
            remember(pool, status, &error);
        kld_pool_list_remove(&pool->starved, job);
        finish(job, status, &error);
    }
}

static void process(struct kld_pool *pool) {
    struct kld_error error = {.status = KLD_OK};
    if (pool->connection) {
        kld_process(pool->connection, 0, &error);
        look_at_losses(pool);
    }
    send_waiting(pool);
}

/* What waits has not been seen by the worker and ends at once (pool.h). */
static void look_at_waiting(struct kld_pool *pool) {
    uint64_t now = uv_hrtime();
    struct kld_error error;
    kld_error_set(&error, KLD_DEADLINE, "the deadline passed before the request was started");
    for (struct kld_pool_job *job = pool->waiting.first, *after; job; job = after) {
        after = job->after;
        if (is_unwanted(job)) {
            give_up(pool, job);
            continue;
        }
        if (job->kind != KLD_POOL_RUN || job->deadline_ns > now)
            continue;
        kld_pool_list_remove(&pool->waiting, job);
        finish(job, KLD_DEADLINE, &error);
    }
}

static void ticked(uv_timer_t *timer) {
    struct kld_pool *pool = timer->data;
    process(pool);
    look_at_waiting(pool);
    feed_starved(pool);
    kld_pool_look_at_wanted(pool);
    kld_pool_forget_kept(pool, pool->config->keep_buffer_ms * UINT64_C(1000000));
    if (pool->starved.first)
        atomic_store(&pool->starved_ns, uv_hrtime());
    if (!pool->running.first && !pool->waiting.first && !pool->starved.first && !pool->kept_bytes)
        uv_timer_stop(timer);
}

static void read_job(struct kld_letter *letter) {
    struct kld_pool_job *job = job_of(letter);
    struct kld_pool *pool = job->pool;
    if (pool->stopping) {
        finish(job, KLD_UNAVAILABLE, NULL);
        return;
    }
    kld_pool_list_add(&pool->waiting, job);
    send_waiting(pool);
    if ((pool->running.first || pool->waiting.first || pool->starved.first) &&
        !uv_is_active((uv_handle_t *)&pool->tick))
        uv_timer_start(&pool->tick, ticked, TICK_MS, TICK_MS);
}

void kld_pool_submit(struct kld_pool *pool, struct kld_mail *sender, struct kld_pool_job *job) {
    job->pool = pool;
    job->sender = sender;
    job->status = KLD_OK;
    atomic_store(&job->unwanted, false);
    atomic_store(&job->starved, false);
    memset(&job->result, 0, sizeof job->result);
    job->letter.read = read_job;
    kld_mail_post(&pool->mail, &job->letter);
}

void kld_pool_unwant(struct kld_pool_job *job) { atomic_store(&job->unwanted, true); }

/* ---- Buffers ----------------------------------------------------------------------------------*/

static void read_drop(struct kld_letter *letter) {
    struct kld_pool_buffer *buffer =
        (struct kld_pool_buffer *)(void *)((char *)letter -
                                           offsetof(struct kld_pool_buffer, letter));
    struct kld_pool *pool = buffer->pool;
    if (kld_pool_keep(buffer)) {
        if (!uv_is_active((uv_handle_t *)&pool->tick))
            uv_timer_start(&pool->tick, ticked, TICK_MS, TICK_MS);
        return;
    }
    struct kld_pool_buffer **at = &pool->buffers;
    while (*at != buffer)
        at = &(*at)->after;
    kld_pool_forget(pool, at);
}

void kld_pool_hold(struct kld_pool_buffer *buffer) { atomic_fetch_add(&buffer->users, 1); }

void kld_pool_drop(struct kld_pool_buffer *buffer) {
    if (!buffer || atomic_fetch_sub(&buffer->users, 1) != 1)
        return;
    struct kld_pool *pool = buffer->pool;
    buffer->letter.read = read_drop;
    uv_mutex_lock(&pool->gate);
    if (!pool->ended) /* else kld_pool_close() frees it */
        kld_mail_post(&pool->mail, &buffer->letter);
    uv_mutex_unlock(&pool->gate);
}

/* ---- Begin and end ----------------------------------------------------------------------------*/

static void mail_closed(struct kld_mail *mail) {}

static void read_stop(struct kld_letter *letter) {
    struct kld_pool *pool =
        (struct kld_pool *)(void *)((char *)letter - offsetof(struct kld_pool, stop));
    struct kld_error error;
    kld_error_set(&error, KLD_UNAVAILABLE, "the server is shutting down; try again");
    pool->stopping = true;
    uv_mutex_lock(&pool->gate);
    pool->ended = true; /* what was posted until now is read by kld_mail_close() */
    uv_mutex_unlock(&pool->gate);
    if (pool->connection)
        uv_close((uv_handle_t *)&pool->poll, NULL);
    kld_close(pool->connection);
    pool->connection = NULL;
    kld_pool_offer_kept(pool, false);
    struct kld_pool_list *const lists[] = {&pool->running, &pool->waiting, &pool->starved};
    for (int i = 0; i < 3; i++)
        while (lists[i]->first) {
            struct kld_pool_job *job = lists[i]->first;
            kld_pool_list_remove(lists[i], job);
            finish(job, KLD_UNAVAILABLE, &error);
        }
    uv_close((uv_handle_t *)&pool->tick, NULL);
    kld_mail_close(&pool->mail, mail_closed);
}

static void run_thread(void *user) {
    struct kld_pool *pool = user;
    uv_run(&pool->loop, UV_RUN_DEFAULT);
}

uint32_t kld_pool_index(const struct kld_pool *pool) { return pool->index; }

enum kld_status kld_pool_open(const struct kld_config *config, uint32_t index,
                              struct kld_staging *staging, struct kld_stats *stats,
                              const struct kld_stats_device *shown, struct kld_pool **ret_pool,
                              struct kld_error *err) {
    struct kld_pool *pool = calloc(1, sizeof *pool);
    if (!pool || uv_mutex_init(&pool->gate) != 0 || kld_uv_loop_open(&pool->loop) != 0) {
        free(pool);
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    }
    pool->config = config;
    pool->index = index;
    pool->staging = staging;
    pool->stats = stats;
    pool->shown = shown;
    pool->wanted_seen = atomic_load(&shown->pool_wanted);
    kld_pool_offer_kept(pool, true); /* none; a gateway before this one may have said otherwise */
    pool->streams = 1;
    uv_timer_init(&pool->loop, &pool->tick);
    pool->tick.data = pool;
    enum kld_status status = kld_mail_open(&pool->mail, &pool->loop, err);
    if (status == KLD_OK && uv_thread_create(&pool->thread, run_thread, pool) != 0)
        status = kld_error_set(err, KLD_NO_MEMORY, "a thread cannot be started");
    if (status) /* the process ends; what was opened ends with it */
        return status;
    *ret_pool = pool;
    return KLD_OK;
}

void kld_pool_stop(struct kld_pool *pool) {
    pool->stop.read = read_stop;
    kld_mail_post(&pool->mail, &pool->stop);
    uv_thread_join(&pool->thread);
}

void kld_pool_close(struct kld_pool *pool) {
    while (pool->buffers) {
        struct kld_pool_buffer *buffer = pool->buffers;
        pool->buffers = buffer->after;
        free(buffer);
    }
    uv_loop_close(&pool->loop);
    uv_mutex_destroy(&pool->gate);
    free(pool);
}
