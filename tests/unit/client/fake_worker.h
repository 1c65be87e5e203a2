/* fake_worker.h - a worker for tests of libkld: speaks the frames over a real socket, in a thread
 * of the test's process, and misbehaves on demand. It computes a made-up operator on FP32 tensors:
 * loss = sum of predictions - sum of targets, grad_predictions = 2 * predictions. */
#ifndef KLD_TESTS_FAKE_WORKER_H
#define KLD_TESTS_FAKE_WORKER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "proto/wire.h"

#define FAKE_CLIENTS_MAX 8
#define FAKE_REGIONS_MAX 256

/* What a test sets is read at the next frame; what the worker counts may be read at any time. */
struct fake_worker {
    char path[108];
    uint32_t requests_max, regions_max; /* set before open */
    uint64_t region_bytes_max;
    uint32_t device, devices;   /* set before open; devices 0: one. Card i has a UUID of i + 1 */
    uint32_t flags;             /* of WELCOME; set before open */
    uint64_t epoch;             /* the same; 0: another one with each connection */
    atomic_int hold;            /* SUBMITs are not answered while set, but kept */
    atomic_int linger;          /* what was cancelled is answered and computed all the same */
    atomic_int mute;            /* what is computed is not answered, until a SUBMIT makes it die */
    atomic_int die_at_submit;   /* countdown: at 1 the connection is closed without an answer */
    atomic_int lost_at_submit;  /* countdown: at 1 the device is lost: every SUBMIT so answered */
    atomic_int poison_rows;     /* not 0: SUBMITs of so many rows lose the device, each time */
    atomic_int busy_at_submit;  /* countdown: at 1 the SUBMIT is answered BUSY */
    atomic_int leave_at_submit; /* countdown: from 1 on nothing new is taken: UNAVAILABLE */
    atomic_int leave_at_copy;   /* the same, of COPYs */
    atomic_int refuse_hello;    /* enum kld_status */
    atomic_int cut_type;        /* enum kld_frame_type: lacks 8 bytes, as in an older release */
    atomic_int refuse_regions;  /* enum kld_status */
    atomic_int refuse_regions_once; /* enum kld_status: of the next one */
    atomic_int refuse_grow;         /* enum kld_status: of pieces */
    atomic_ullong shared_bytes_max; /* larger regions are KLD_TOO_LARGE; 0: none is */
    atomic_int slow_regions;        /* what is registered is not answered while set, but kept */
    atomic_int one_region;          /* while there is one, others are KLD_TOO_LARGE */
    atomic_int garbage;             /* answers the next frame with nonsense */
    atomic_int hang_up;             /* 1: every connection is closed, once */
    atomic_int wordless;            /* its errors have a status and no text */
    atomic_int behind_not_found;    /* enum kld_status: of an ERROR in one packet with ATTACH's */
    atomic_int attached_rank;       /* not 0: ATTACHED says this, whatever was published */
    atomic_int all_die;             /* with one connection that ends all others do */
    atomic_int refuse_fences;       /* enum kld_status */
    atomic_int stuck;               /* numbers of fences are answered and not written */
    atomic_int published, attached, detached, events_added, events_dropped, early, streams_set;
    atomic_int events_now, last_priority;
    atomic_int traces, traced; /* TRACE frames; SUBMITs that came right behind one of theirs */
    struct kld_frame_trace last_trace;
    atomic_int packets; /* with one frame or several */
    atomic_int accepted, submits, regions_added, regions_dropped, cancels, copies;
    atomic_int regions_now, pieces; /* pieces: that came so far */

    pthread_t thread;
    int listener;
    atomic_int stop;
};

/* The socket is made in a temporary folder; close removes it. */
void fake_worker_open(struct fake_worker *worker);
/* Another device of the same server: its socket beside the first one's. Closed before it. */
void fake_worker_open_beside(struct fake_worker *worker, const struct fake_worker *first);
void fake_worker_close(struct fake_worker *worker);
/* Only the path, nobody listening; start() begins to listen. */
void fake_worker_path(struct fake_worker *worker);
void fake_worker_start(struct fake_worker *worker);

#endif
