/* ceiling.c - what this machine's memory can do: the read ceiling and the read-and-write ceiling
 * that kernels are compared with. Runs in the caller's thread and on the team; jobs wait meanwhile.
 */
#include <stdlib.h>

#include "kernels/cpu/device.h"

#define CEILING_CHUNK_BYTES (256u << 10)
#define CEILING_RUNS 5

struct ceiling {
    const struct kld_cpu_kernels *kernels;
    const unsigned char *a, *b;
    unsigned char *to;
    uint64_t bytes;
    atomic_uint_fast64_t seen; /* keeps the reads alive */
};

static void task_stream(void *context, uint64_t chunk) {
    struct ceiling *ceiling = context;
    uint64_t start = chunk * CEILING_CHUNK_BYTES, left = ceiling->bytes - start;
    uint64_t bytes = left < CEILING_CHUNK_BYTES ? left : CEILING_CHUNK_BYTES;
    uint64_t seen = ceiling->kernels->stream(ceiling->a + start, ceiling->b + start,
                                             ceiling->to ? ceiling->to + start : NULL, bytes);
    atomic_fetch_xor_explicit(&ceiling->seen, seen, memory_order_relaxed);
}

/* Bytes per second of the best of a few runs. */
static double best_of(struct cpu_device *device, struct ceiling *ceiling, unsigned arrays) {
    uint64_t chunks = (ceiling->bytes + CEILING_CHUNK_BYTES - 1) / CEILING_CHUNK_BYTES;
    uint64_t best_ns = UINT64_MAX;
    for (int i = 0; i < CEILING_RUNS; i++) {
        pthread_mutex_lock(&device->team_lock);
        uint64_t start_ns = kld_cpu_now_ns();
        kld_cpu_team_run(&device->team, chunks, task_stream, ceiling);
        uint64_t spent_ns = kld_cpu_now_ns() - start_ns;
        pthread_mutex_unlock(&device->team_lock);
        if (spent_ns < best_ns)
            best_ns = spent_ns;
    }
    return (double)(arrays * ceiling->bytes) * 1e9 / (double)(best_ns ? best_ns : 1);
}

enum kld_status kld_cpu_measure_ceiling(struct kld_device *head, uint64_t bytes,
                                        double *ret_read_per_s, double *ret_read_write_per_s,
                                        struct kld_error *err) {
    struct cpu_device *device = (struct cpu_device *)head;
    struct kld_memory *memory[3] = {NULL, NULL, NULL};
    enum kld_status status = KLD_OK;
    bytes = (bytes + 4095) / 4096 * 4096;
    for (int i = 0; i < 3 && !status; i++)
        status = kld_cpu_memory_alloc(head, bytes, &memory[i], err);
    if (!status) {
        struct ceiling ceiling = {.kernels = device->run.kernels,
                                  .a = memory[0]->host,
                                  .b = memory[1]->host,
                                  .bytes = bytes};
        /* Untouched pages are all one page of zeros: write before reading. */
        for (int i = 0; i < 3; i++)
            for (uint64_t at = 0; at < bytes; at += 4096)
                ((unsigned char *)memory[i]->host)[at] = (unsigned char)(at >> 12);
        *ret_read_per_s = best_of(device, &ceiling, 2);
        ceiling.to = memory[2]->host;
        *ret_read_write_per_s = best_of(device, &ceiling, 3);
    }
    for (int i = 0; i < 3; i++)
        kld_cpu_memory_free(memory[i]);
    return status;
}
