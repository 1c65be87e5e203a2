/* copy.c - cuts a copy into tasks for the team (copy.h). Whether it goes past the caches is the
 * caller's to say. Runs on the device thread; tasks on all threads of the team. */
#include "kernels/cpu/copy.h"

#include <string.h>

#include "proto/copy.h"

#define CHUNK_BYTES (4u << 20) /* less is one thread's: to wake the others costs more */

struct copy {
    const struct kld_job *job;
    bool streaming;
};

static void task_copy(void *context, uint64_t chunk) {
    const struct copy *copy = context;
    const struct kld_job *job = copy->job;
    uint64_t start = chunk * CHUNK_BYTES, left = job->copy_bytes - start;
    unsigned char *to = (unsigned char *)job->copy_to.memory->host + job->copy_to.offset_bytes;
    const unsigned char *from =
        (const unsigned char *)job->copy_from.memory->host + job->copy_from.offset_bytes;
    uint64_t bytes = left < CHUNK_BYTES ? left : CHUNK_BYTES;
    if (copy->streaming)
        kld_copy_past_caches(to + start, from + start, bytes);
    else
        memcpy(to + start, from + start, bytes);
}

void kld_cpu_run_copy(struct kld_cpu_team *team, struct kld_job *job, bool streaming) {
    struct copy copy = {job, streaming};
    kld_cpu_team_run(team, (job->copy_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES, task_copy, &copy);
    job->bytes = job->copy_bytes;
}
