/* team.c - the parallel-for of a CPU device: a counter of tasks, helpers that poll for a while and
 * then sleep. It does not decide how work is cut (run.c does) and never allocates during a run.
 * The caller is the device thread; the helpers are threads of this file. */
#include "kernels/cpu/team.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/thread.h"

uint64_t kld_cpu_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void kld_cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/* The yield costs some 0.3 us where nobody else wants the core, and gives it away where somebody
 * does: with as many threads as cores, the loop that is to answer a client waits for one of these.
 */
bool kld_cpu_poll_on(uint64_t until_ns) {
    sched_yield();
    return kld_cpu_now_ns() < until_ns;
}

static void take_tasks(struct kld_cpu_team *team) {
    uint64_t index;
    while ((index = atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed)) < team->count)
        team->task(team->context, index);
}

/* Waits until the generation differs from `seen`: polls, then sleeps. */
static uint32_t wait_generation(struct kld_cpu_team *team, uint32_t seen) {
    uint64_t until = kld_cpu_now_ns() + (uint64_t)team->spin_us * 1000;
    uint32_t now;
    do {
        for (int i = 0; i < 32; i++) {
            now = (uint32_t)atomic_load_explicit(&team->generation, memory_order_acquire);
            if (now != seen)
                return now;
            kld_cpu_relax();
        }
    } while (kld_cpu_poll_on(until));
    pthread_mutex_lock(&team->lock);
    while ((now = (uint32_t)atomic_load(&team->generation)) == seen)
        pthread_cond_wait(&team->wake_helpers, &team->lock);
    pthread_mutex_unlock(&team->lock);
    return now;
}

static void *helper_main(void *argument) {
    struct kld_cpu_team *team = argument;
    uint32_t seen = 0;
    for (;;) {
        seen = wait_generation(team, seen);
        if (atomic_load(&team->stop))
            return NULL;
        take_tasks(team);
        if (atomic_fetch_sub_explicit(&team->running, 1, memory_order_acq_rel) == 1) {
            pthread_mutex_lock(&team->lock);
            pthread_cond_signal(&team->wake_caller);
            pthread_mutex_unlock(&team->lock);
        }
    }
}

static void next_generation(struct kld_cpu_team *team) {
    pthread_mutex_lock(&team->lock);
    atomic_fetch_add_explicit(&team->generation, 1, memory_order_release);
    pthread_cond_broadcast(&team->wake_helpers);
    pthread_mutex_unlock(&team->lock);
}

void kld_cpu_team_run(struct kld_cpu_team *team, uint64_t count,
                      void (*task)(void *context, uint64_t index), void *context) {
    if (team->helpers == 0 || count <= 1) {
        for (uint64_t i = 0; i < count; i++)
            task(context, i);
        return;
    }
    team->task = task;
    team->context = context;
    team->count = count;
    atomic_store_explicit(&team->next, 0, memory_order_relaxed);
    atomic_store_explicit(&team->running, team->helpers, memory_order_relaxed);
    next_generation(team);
    take_tasks(team);
    uint64_t until = kld_cpu_now_ns() + (uint64_t)team->spin_us * 1000;
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(&team->running, memory_order_acquire) == 0)
                return;
            kld_cpu_relax();
        }
    } while (kld_cpu_poll_on(until));
    pthread_mutex_lock(&team->lock);
    while (atomic_load_explicit(&team->running, memory_order_acquire) != 0)
        pthread_cond_wait(&team->wake_caller, &team->lock);
    pthread_mutex_unlock(&team->lock);
}

enum kld_status kld_cpu_team_open(struct kld_cpu_team *team, uint32_t threads, uint32_t spin_us,
                                  struct kld_error *err) {
    memset(team, 0, sizeof *team);
    team->spin_us = spin_us;
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->wake_helpers, NULL);
    pthread_cond_init(&team->wake_caller, NULL);
    team->thread = calloc(threads, sizeof *team->thread);
    bool started = team->thread != NULL;
    while (started && team->helpers + 1 < threads) {
        started = kld_thread_start(&team->thread[team->helpers], helper_main, team) == 0;
        team->helpers += started;
    }
    if (started)
        return KLD_OK;
    kld_cpu_team_close(team);
    return kld_error_set(err, KLD_NO_MEMORY, "cannot start %u compute threads", threads);
}

void kld_cpu_team_close(struct kld_cpu_team *team) {
    atomic_store(&team->stop, true);
    next_generation(team);
    for (uint32_t i = 0; i < team->helpers; i++)
        pthread_join(team->thread[i], NULL);
    free(team->thread);
    pthread_mutex_destroy(&team->lock);
    pthread_cond_destroy(&team->wake_helpers);
    pthread_cond_destroy(&team->wake_caller);
}
