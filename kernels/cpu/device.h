/* device.h - the inside of a CPU device: its structs, who owns each field and which thread may
 * touch it. Private to kernels/cpu. */
#ifndef KLD_KERNELS_CPU_DEVICE_H
#define KLD_KERNELS_CPU_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

#include "kernels/backend.h"
#include "kernels/cpu/run.h"
#include "kernels/cpu/team.h"

struct cpu_memory {
    struct kld_memory head;
    void *mapped;                            /* what munmap() takes; NULL for wrapped memory */
    uint64_t mapped_bytes, pool_bytes;       /* pool_bytes: what it counts in the pool */
    struct cpu_memory *previous, *following; /* list of the device, under its lock */
};

struct cpu_stream {
    struct kld_stream head;
    /* All under the device's lock. */
    struct kld_job *first, **last;     /* jobs waiting, FIFO */
    struct cpu_owner *owner;           /* constant */
    LIST_ENTRY(cpu_stream) of_owner;   /* each */
    STAILQ_ENTRY(cpu_stream) in_ready; /* that has jobs */
};

/* Whose streams take turns among themselves. There while it has streams. */
struct cpu_owner {
    uint64_t number; /* constant */
    /* All under the device's lock. */
    LIST_HEAD(cpu_stream_list, cpu_stream) streams;
    STAILQ_HEAD(cpu_stream_ring, cpu_stream) ready; /* round robin */
    LIST_ENTRY(cpu_owner) of_device;                /* each */
    STAILQ_ENTRY(cpu_owner) in_ready;               /* one of whose streams has jobs */
};

struct cpu_device {
    struct kld_device head;
    uint32_t spin_us;          /* constant */
    struct kld_cpu_team team;  /* used by the device thread, or by whoever holds team_lock */
    struct kld_cpu_run run;    /* scratch of a launch; same owner */
    pthread_mutex_t team_lock; /* a job, or measure_ceiling() in a caller's thread */
    pthread_t thread;

    pthread_mutex_t lock; /* the rest */
    pthread_cond_t wake;
    STAILQ_HEAD(cpu_owner_ring, cpu_owner) ready; /* round robin */
    LIST_HEAD(cpu_owner_list, cpu_owner) owners;
    struct cpu_memory *memories;
    bool sleeping, stop;
    bool polled; /* the caller runs small jobs itself, in poll(): the thread sleeps on */
    bool helped; /* one is at work in poll(): the thread waits with what comes behind it */
    atomic_uint_fast64_t submitted; /* grows at each submit(); polled without the lock */
    atomic_uint_fast64_t pool_bytes;
    atomic_uint_fast64_t pool_allocations; /* so far */
    atomic_bool fail_next;                 /* any thread sets it, the device thread takes it */
};

/* queue.c */
bool kld_cpu_submit(struct kld_stream *stream, struct kld_job *job);
void kld_cpu_poll(struct kld_device *device, bool more);
void *kld_cpu_device_main(void *device);
void kld_cpu_fail_next(struct kld_device *device);
enum kld_status kld_cpu_stream_open(struct kld_device *device,
                                    const struct kld_stream_options *options,
                                    struct kld_stream **ret_stream, struct kld_error *err);
void kld_cpu_stream_close(struct kld_stream *stream);
enum kld_status kld_cpu_event_import(struct kld_device *device, const uint8_t handle[64],
                                     struct kld_gpu_event **ret_event, struct kld_error *err);
enum kld_status kld_cpu_event_create(struct kld_device *device, struct kld_gpu_event **ret_event,
                                     uint8_t ret_handle[64], struct kld_error *err);
void kld_cpu_event_free(struct kld_gpu_event *event);

/* memory.c */
enum kld_status kld_cpu_memory_map(struct kld_device *device, int fd, uint64_t bytes,
                                   struct kld_memory **ret_memory, struct kld_error *err);
enum kld_status kld_cpu_memory_wrap(struct kld_device *device, void *address, uint64_t bytes,
                                    struct kld_memory **ret_memory, struct kld_error *err);
enum kld_status kld_cpu_memory_import_ipc(struct kld_device *device, const uint8_t handle[64],
                                          uint64_t base_bytes, uint64_t offset_bytes,
                                          uint64_t bytes, struct kld_memory **ret_memory,
                                          struct kld_error *err);
enum kld_status kld_cpu_memory_reserve(struct kld_device *device, uint64_t bytes,
                                       struct kld_memory **ret_memory, struct kld_error *err);
enum kld_status kld_cpu_memory_grow_fd(struct kld_memory *memory, int fd, uint64_t offset_bytes,
                                       uint64_t bytes, struct kld_error *err);
enum kld_status kld_cpu_memory_import_fd(struct kld_device *device, int fd, uint64_t base_bytes,
                                         uint64_t offset_bytes, uint64_t bytes,
                                         struct kld_memory **ret_memory, struct kld_error *err);
enum kld_status kld_cpu_memory_alloc(struct kld_device *device, uint64_t bytes,
                                     struct kld_memory **ret_memory, struct kld_error *err);
enum kld_status kld_cpu_memory_free(struct kld_memory *memory);
uint64_t kld_cpu_pool_bytes(struct kld_device *device);
uint64_t kld_cpu_pool_allocations(struct kld_device *device);

/* ceiling.c */
enum kld_status kld_cpu_measure_ceiling(struct kld_device *device, uint64_t bytes,
                                        double *ret_read_per_s, double *ret_read_write_per_s,
                                        struct kld_error *err);

#endif
