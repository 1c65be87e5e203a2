/* fake_device.h - a back end that computes nothing but keeps every rule of kernels/backend.h, with
 * knobs: jobs that take long or wait, that fail, a device that is lost, memory calls that fail.
 * For the worker's unit tests. */
#ifndef KLD_TESTS_FAKE_DEVICE_H
#define KLD_TESTS_FAKE_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>

#include "kernels/backend.h"

#define FAKE_LOSS 0.25 /* of every scalar op; a copy moves no byte */

struct fake_device {
    struct kld_device head;

    /* Knobs, and what was seen. Any thread. */
    atomic_bool hold;        /* jobs wait until it is false again */
    atomic_bool hold_memory; /* so do memory_*, event_* and stream_open calls */
    atomic_int job_us;       /* each job takes at least this long, ... */
    atomic_int memory_us;    /* ... and each of those calls */
    atomic_int fail_job;     /* enum kld_status of jobs from now on */
    atomic_int
        fail_call; /* the N-th memory_*, event_* or stream_open call from now fails; 0: none */
    atomic_bool fail_all;          /* and so does every one */
    atomic_int fail_status;        /* with this */
    atomic_bool fail_launch;       /* jobs that are to fail do so before launched() */
    atomic_bool cannot_pin;        /* what memory_map() maps from now on */
    atomic_bool stays_pinned;      /* memory_free() says that the device is lost by it */
    atomic_bool launches_directly; /* inside submit() */
    atomic_bool when_polled;       /* poll() runs the jobs, as a CPU's does with small ones */
    atomic_bool peers;             /* memory of a card whose UUID begins with 9 is reached */
    atomic_int checks;             /* calls of check() */
    atomic_bool dead;              /* what is_dead() says */
    atomic_int dead_told;          /* the rig: how often the worker told that */
    atomic_int polls;
    atomic_bool handles_unread; /* an IPC handle came that says nothing */
    atomic_int stage;           /* enum kld_job_stage of jobs with an event ... */
    atomic_int stage_plain;     /* ... and of those without */
    /* Or this says; NULL: the two above. Set before the worker starts. */
    enum kld_job_stage (*stage_of)(const struct kld_job *job);
    atomic_int asked;         /* calls of stage() */
    atomic_int last_priority; /* of the stream opened last */
    atomic_uint_fast64_t last_owner;
    atomic_int events; /* open now */
    atomic_int jobs_submitted, jobs_started, jobs_done;
    atomic_int jobs_told;         /* done() has been called, or is left to who polls */
    atomic_int memories, streams; /* open now */
    atomic_int calls;             /* memory_*, event_* and stream_open calls so far */
    atomic_int pieces;            /* mapped now */
    /* A memory was freed, or a stream closed, under a job, or a job came that names a byte of a
     * space that has no memory. */
    atomic_int order_broken;

    /* Its thread. */
    pthread_t thread;
    pthread_mutex_t telling; /* before `lock`: jobs are told of in the order in which they ended */
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct kld_job *first, **last;       /* lock */
    bool ending;                         /* lock */
    atomic_bool watched;                 /* set under lock: somebody polls */
    struct kld_job *ended, **ended_last; /* lock: for the next poll */
};

extern const struct kld_backend fake_backend;

/* Opens it; device_close() of the backend releases what it stands on, but *fake stays the caller's,
 * so that the counts can be read afterwards. */
void fake_device_init(struct fake_device *fake);

#endif
