/* thread.c - the device thread: takes submitted jobs, launches them in the order of their streams,
 * polls their events, completes them. Polls while work is in flight and for spin_us after the last
 * activity; then naps while work is in flight and sleeps when nothing is. What a caller's thread
 * launches and completes by itself, in cuda_submit() and cuda_poll(), is in place: enqueueing it
 * and looking at it takes no time. */
#include "kernels/cuda/device.h"

#include <errno.h>
#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

/* While work is in flight the thread goes on polling, and yields: most jobs end within this, and a
 * nap, with its wake-up, would add a tenth of a millisecond to each of them. */
#define FLIGHT_POLL_NS 5000000u
#define NAP_NS 20000         /* between polls of longer work */
#define LOCK_SOON_NS 50000   /* that a caller spends on the lock at most */
#define LOAD_PAUSE_NS 500000 /* without work, before another kernel is loaded */
#define TIMER_SLACK_NS 1000  /* a nap is not to become three */

uint64_t cuda_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static struct cuda_stream *stream_of(const struct kld_job *job) {
    return (struct cuda_stream *)(uintptr_t)job->backend_private[0];
}

static bool take_incoming(struct cuda_device *device) {
    if (atomic_load(&device->incoming_count) == 0)
        return false;
    pthread_mutex_lock(&device->mutex);
    struct kld_job *head = device->incoming_head, *tail = device->incoming_tail;
    device->incoming_head = device->incoming_tail = NULL;
    atomic_store(&device->incoming_count, 0);
    pthread_mutex_unlock(&device->mutex);
    if (device->pending_tail)
        device->pending_tail->next = head;
    else
        device->pending_head = head;
    device->pending_tail = tail;
    return true;
}

static struct cuda_flight *free_flight(struct cuda_device *device) {
    for (int i = 0; i < CUDA_FLIGHTS_MAX; i++)
        if (!device->flights[i].job)
            return &device->flights[i];
    return NULL;
}

static void enter_order(struct cuda_device *device, struct cuda_flight *flight) {
    device->order[device->order_count++] = flight;
    flight->stream->newest = flight;
}

/* May the launch have to wait, for what another job waits for, until its kernel is loaded? See
 * preload.c. Under work. */
static bool may_wait_to_load(const struct cuda_device *device) {
    return device->loads_when_idle && device->order_count > 0;
}

/* Launches in the caller's thread, if nothing else waits and the device thread is not at work. */
static bool launch_directly(struct cuda_device *device, struct kld_job *job, bool *ret_failed) {
    struct cuda_stream *stream = stream_of(job);
    if (!cuda_job_in_place(job) || pthread_mutex_trylock(&device->work) != 0)
        return false;
    struct cuda_flight *flight = NULL;
    struct cuda_visit visit CUDA_LEAVES = {0};
    if (atomic_load(&device->incoming_count) == 0 && !device->pending_head &&
        !atomic_load(&device->lost) && !stream->holder && !may_wait_to_load(device) &&
        cuda_visit(device, &visit) == cudaSuccess)
        flight = free_flight(device);
    if (flight) {
        flight->job = job;
        flight->stream = stream;
        cuda_job_start(device, flight); /* in place: cannot ask to be tried again */
        *ret_failed = flight->status != KLD_OK;
        enter_order(device, flight);
    }
    pthread_mutex_unlock(&device->work);
    return flight != NULL;
}

bool cuda_submit(struct kld_stream *stream, struct kld_job *job) {
    struct cuda_device *device = (struct cuda_device *)stream->device;
    job->next = NULL;
    job->backend_private[0] = (uint64_t)(uintptr_t)stream;
    bool failed = false, launched = launch_directly(device, job, &failed);
    if (launched && atomic_load(&device->watched))
        return !failed;
    pthread_mutex_lock(&device->mutex);
    if (launched) {
        device->launched = true;
    } else {
        if (device->incoming_tail)
            device->incoming_tail->next = job;
        else
            device->incoming_head = job;
        device->incoming_tail = job;
        atomic_fetch_add(&device->incoming_count, 1);
    }
    if (device->sleeping)
        pthread_cond_signal(&device->wake);
    pthread_mutex_unlock(&device->mutex);
    return launched && !failed;
}

void cuda_fail_next(struct kld_device *base) {
    atomic_store(&((struct cuda_device *)base)->fail_next, true);
}

static void end_lost(struct kld_job *job) {
    job->status =
        kld_error_set(&job->error, KLD_DEVICE_LOST, "%s", kld_status_text(KLD_DEVICE_LOST));
    job->done(job);
}

/* Launches what can be launched; a stream held by a job in chunks keeps its later ones waiting, and
 * so does one whose next job finds no room for what it has in host memory. Others like that wait
 * behind it, whatever they want: there would never be room for a large one. */
static bool launch_pending(struct cuda_device *device) {
    bool any = false, no_room = false;
    device->round++;
    struct kld_job **link = &device->pending_head, *previous = NULL;
    while (*link) {
        struct kld_job *job = *link;
        struct cuda_stream *stream = stream_of(job);
        bool behind = stream->holder || stream->round == device->round ||
                      (no_room && job->kind == KLD_JOB_OP && !cuda_job_in_place(job));
        if (!atomic_load(&device->lost) && behind) {
            stream->round = device->round;
            previous = job;
            link = &job->next;
            continue;
        }
        struct cuda_flight *flight = NULL;
        if (!atomic_load(&device->lost)) {
            flight = free_flight(device);
            if (!flight)
                break;
            flight->job = job;
            flight->stream = stream;
            if (!cuda_job_start(device, flight)) {
                flight->job = NULL;
                no_room = true;
                stream->round = device->round;
                previous = job;
                link = &job->next;
                continue;
            }
        }
        *link = job->next;
        if (device->pending_tail == job)
            device->pending_tail = previous;
        any = true;
        if (!flight) {
            end_lost(job);
            continue;
        }
        enter_order(device, flight);
        if (job->launched && !flight->status && cuda_job_in_place(job))
            job->launched(job);
    }
    return any;
}

/* Has all that was enqueued of it by now ended? cudaErrorNotReady: no, or nobody can tell just now.
 */
static cudaError_t look_at(struct cuda_device *device, struct cuda_flight *flight) {
    if (flight->until == MARK_COUNT)
        return cudaSuccess;
    if (flight->unmarked)
        cuda_job_mark(device, flight, MARK_END);
    if (flight->unmarked)
        return cudaErrorNotReady;
    cudaError_t error = cudaEventQuery(flight->mark[flight->until]);
    if (!cuda_is_of_capture(error))
        return error;
    cudaGetLastError();
    if (error != cudaErrorCapturedEvent)
        return cudaErrorNotReady;
    /* Captured itself, it does not run now, and is nothing to wait for. */
    if (!flight->status)
        flight->status =
            cuda_fail(device, error, "running in a captured stream", &flight->job->error);
    return cudaSuccess;
}

/* One look at everything in flight. Jobs of one stream end in order: a stream whose earlier job has
 * not ended is passed over. briefly: and one whose job is staged, since what comes next of that may
 * take its time. */
static bool poll_flights(struct cuda_device *device, bool briefly) {
    bool any = false;
    uint32_t kept = 0;
    device->sweep++;
    for (uint32_t i = 0; i < device->order_count; i++) {
        struct cuda_flight *flight = device->order[i];
        bool ended = false;
        if (atomic_load(&device->lost)) {
            cuda_job_lose(device, flight);
            ended = true;
        } else if (briefly && flight->staged) {
            flight->stream->sweep = device->sweep;
        } else if (flight->stream->sweep != device->sweep) {
            cudaError_t error = look_at(device, flight);
            if (error == cudaSuccess) {
                any = true;
                ended = cuda_job_advance(device, flight);
            } else if (error != cudaErrorNotReady) {
                atomic_store(&device->lost, true);
                cuda_job_lose(device, flight);
                ended = true;
            }
            if (!ended)
                flight->stream->sweep = device->sweep;
        }
        if (!ended) {
            device->order[kept++] = flight;
            continue;
        }
        any = true;
        struct kld_job *job = flight->job;
        if (flight->stream->holder == flight)
            flight->stream->holder = NULL;
        if (flight->stream->newest == flight)
            flight->stream->newest = NULL;
        flight->job = NULL;
        job->done(job);
    }
    device->order_count = kept;
    return any;
}

/* False: it was not woken meanwhile. With the mutex. */
static bool woken_within(struct cuda_device *device, uint64_t wait_ns) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t at_ns = (uint64_t)until.tv_nsec + wait_ns;
    until.tv_sec += (time_t)(at_ns / 1000000000u);
    until.tv_nsec = (long)(at_ns % 1000000000u);
    return pthread_cond_timedwait(&device->wake, &device->mutex, &until) != ETIMEDOUT;
}

/* One more kernel, where the device has nothing at all to do, whoever looks after it. */
static void load_another(struct cuda_device *device) {
    if (pthread_mutex_trylock(&device->work) != 0)
        return;
    if (device->order_count == 0 && !device->pending_head)
        device->loads_when_idle = cuda_preload(device, 1);
    pthread_mutex_unlock(&device->work);
}

/* Nothing is in flight. Kernels that are not loaded yet are, between jobs. Where staging went back
 * to the pool, what is free of that goes to the card a while later: a burst of jobs is not to cost
 * the card's other users what it took, nor the next job what was freed a moment ago. */
static void wait_for_wake(struct cuda_device *device) {
    bool loads = device->loads_when_idle, surplus = atomic_load(&device->surplus);
    if (!loads && !surplus) {
        pthread_cond_wait(&device->wake, &device->mutex);
        return;
    }
    if (woken_within(device, loads ? LOAD_PAUSE_NS : CUDA_SURPLUS_NS))
        return;
    pthread_mutex_unlock(&device->mutex);
    if (loads)
        load_another(device);
    else
        cuda_pool_trim_surplus(device);
    pthread_mutex_lock(&device->mutex);
}

/* Nothing in flight: until a job comes. False: the device closes. */
static bool sleep_until_work(struct cuda_device *device) {
    pthread_mutex_lock(&device->mutex);
    device->sleeping = true;
    while (!device->incoming_head && !device->launched && !device->stop)
        wait_for_wake(device);
    device->sleeping = false;
    bool work = device->incoming_head != NULL || device->launched;
    device->launched = false;
    pthread_mutex_unlock(&device->mutex);
    return work;
}

/* Is there anything in flight that nobody else looks after? */
static bool has_flights(const struct cuda_device *device) {
    bool any = !atomic_load(&device->watched) && device->order_count;
    for (uint32_t i = 0; i < device->order_count && !any; i++)
        any = device->order[i]->staged;
    return any;
}

/* One round: takes, launches, polls. True: something came or ended. */
static bool work_once(struct cuda_device *device, bool *ret_in_flight) {
    pthread_mutex_lock(&device->work);
    bool any = take_incoming(device);
    if (device->pending_head)
        any |= launch_pending(device);
    if (has_flights(device))
        any |= poll_flights(device, false);
    *ret_in_flight = device->pending_head || has_flights(device);
    pthread_mutex_unlock(&device->work);
    return any;
}

void cuda_poll(struct kld_device *base, bool more) {
    struct cuda_device *device = (struct cuda_device *)base;
    bool left = true; /* for all we know */
    atomic_store(&device->watched, more);
    if (pthread_mutex_trylock(&device->work) == 0) {
        if (device->order_count) {
            struct cuda_visit visit CUDA_LEAVES = {0};
            cuda_visit(device, &visit);
            poll_flights(device, true);
        }
        left = device->order_count != 0;
        pthread_mutex_unlock(&device->work);
    }
    if (more || !left)
        return;
    pthread_mutex_lock(&device->mutex);
    device->launched = true;
    if (device->sleeping)
        pthread_cond_signal(&device->wake);
    pthread_mutex_unlock(&device->mutex);
}

/* Its thread has the lock nearly all the time while staged jobs are in flight, and is asleep or at
 * its next round for a moment in between: who looks only now and then has to wait for that moment.
 */
static bool lock_work_soon(struct cuda_device *device) {
    uint64_t until_ns = cuda_now_ns() + LOCK_SOON_NS;
    while (pthread_mutex_trylock(&device->work) != 0)
        if (cuda_now_ns() >= until_ns)
            return false;
    return true;
}

/* The event alone does not say: once the wait has passed, the client may record in it anew. Nor
 * does the work: it may be behind that of others. What was not launched yet is behind others too.
 */
enum kld_job_stage cuda_stage(struct kld_device *base, const struct kld_job *job) {
    struct cuda_device *device = (struct cuda_device *)base;
    const struct cuda_event *event = (const struct cuda_event *)job->wait;
    if (atomic_load(&device->lost) || !lock_work_soon(device))
        return KLD_JOB_UNKNOWN;
    struct cuda_visit visit CUDA_LEAVES = {0};
    cuda_visit(device, &visit);
    enum kld_job_stage stage = KLD_JOB_BEHIND;
    for (uint32_t i = 0; i < device->order_count; i++) {
        const struct cuda_flight *flight = device->order[i];
        if (flight->job != job)
            continue;
        cudaError_t start = cudaEventQuery(flight->mark[MARK_START]);
        if (start == cudaSuccess)
            stage = KLD_JOB_BEGUN;
        else if (start != cudaErrorNotReady)
            stage = KLD_JOB_UNKNOWN;
        else if (event && cudaEventQuery(event->event) == cudaErrorNotReady)
            stage = KLD_JOB_WAITS;
    }
    cudaGetLastError(); /* what else a query says, poll_flights() hears as well */
    pthread_mutex_unlock(&device->work);
    return stage;
}

void *cuda_thread_main(void *argument) {
    struct cuda_device *device = argument;
    if (cuda_settle(device) != cudaSuccess)
        atomic_store(&device->lost, true);
    prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0);
    uint64_t active_ns = cuda_now_ns(), spin_ns = (uint64_t)device->spin_us * 1000u;
    for (;;) {
        bool in_flight, any = work_once(device, &in_flight);
        uint64_t now_ns = cuda_now_ns();
        if (any)
            active_ns = now_ns;
        uint64_t idle_ns = now_ns - active_ns;
        if (in_flight && idle_ns >= FLIGHT_POLL_NS) {
            struct timespec nap = {0, NAP_NS};
            nanosleep(&nap, NULL);
        } else if (in_flight || (idle_ns < spin_ns && !atomic_load(&device->watched))) {
            sched_yield();
        } else if (!sleep_until_work(device)) {
            return NULL;
        } else {
            active_ns = cuda_now_ns();
        }
    }
}
