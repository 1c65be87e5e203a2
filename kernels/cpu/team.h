/* team.h - the compute threads of a CPU device: one parallel-for, run by the device thread and its
 * helpers together.
 *
 * Which thread takes which task is left to chance; callers make the result independent of it. One
 * run at a time: only the device thread calls kld_cpu_team_run(). */
#ifndef KLD_KERNELS_CPU_TEAM_H
#define KLD_KERNELS_CPU_TEAM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

#define KLD_CPU_THREADS_MAX 1024

struct kld_cpu_team {
    /* Constant after open. */
    uint32_t helpers; /* threads besides the caller of run() */
    uint32_t spin_us;
    pthread_t *thread; /* [helpers], owned */

    /* Written by run() before the generation moves on, read by helpers after they saw it. */
    void (*task)(void *context, uint64_t index);
    void *context;
    uint64_t count;

    /* Shared. */
    atomic_uint_fast64_t next;       /* the next task to take */
    atomic_uint_fast32_t generation; /* moves on at each run() and at close; under lock */
    atomic_uint_fast32_t running;    /* helpers that have not finished this run */
    atomic_bool stop;
    pthread_mutex_t lock; /* for sleeping only */
    pthread_cond_t wake_helpers, wake_caller;
};

/* threads counts the caller: 1 starts no helper. */
enum kld_status kld_cpu_team_open(struct kld_cpu_team *team, uint32_t threads, uint32_t spin_us,
                                  struct kld_error *err);
void kld_cpu_team_close(struct kld_cpu_team *team);

/* Calls task(context, i) once for each i below count and returns when all are done. */
void kld_cpu_team_run(struct kld_cpu_team *team, uint64_t count,
                      void (*task)(void *context, uint64_t index), void *context);

/* CLOCK_MONOTONIC. */
uint64_t kld_cpu_now_ns(void);
/* One turn of a polling loop. */
void kld_cpu_relax(void);
/* Between two rounds of a poll: lets others run; false once until_ns has passed. */
bool kld_cpu_poll_on(uint64_t until_ns);

#endif
