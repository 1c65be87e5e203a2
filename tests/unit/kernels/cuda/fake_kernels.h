/* fake_kernels.h - a double of our kernels over that of the runtime: they take fake_us and compute
 * nothing but a loss of 0.25, whoever adds it up. */
#ifndef KLD_TESTS_FAKE_KERNELS_H
#define KLD_TESTS_FAKE_KERNELS_H

#include "kernels/cuda/launch.h"
#include "tests/unit/kernels/cuda/fake_runtime.h"

#define FAKE_LOSS 0.25

static atomic_int fake_us;              /* of a kernel */
static _Atomic(const char *) fake_p_at; /* of the last launch over rows */
static _Atomic(uint32_t *) fake_masked; /* of the last launch over rows */
static atomic_int fake_launch_error;
static atomic_int
    fake_launched_at;            /* the priority of the stream of the last launch over rows ... */
static atomic_int fake_launches; /* ... of so many */
static atomic_int fake_finishes; /* launches of the kernel that adds up */
static atomic_int fake_finish_error; /* of the next one */
static _Atomic(const char *)
    fake_loss_at; /* where the last of them wrote the loss; NULL: nowhere */

static atomic_bool fake_loading; /* the next launch over rows loads its kernel, when no stream that
                                  * had one before is at work */
static atomic_ullong fake_busy_until_ns; /* any of those */
static atomic_int fake_cluster;          /* blocks that share a row */

bool kld_cuda_can_be_flat(const struct kld_cuda_args *args) { return false; }
bool kld_cuda_begins_early(void) { return false; }
void kld_cuda_layout(struct kld_cuda_args *args, uint64_t job_rows, uint32_t shared_bytes_max) {
    args->team = 32;
    args->group_rows = 4;
    args->cluster = (uint32_t)atomic_load(&fake_cluster);
}
cudaError_t kld_cuda_launch_divisor(const struct kld_cuda_args *args, bool first,
                                    cudaStream_t stream) {
    return fake_work(stream, 1);
}
cudaError_t kld_cuda_launch_rows(const struct kld_cuda_args *args, cudaStream_t stream) {
    int error = atomic_exchange(&fake_launch_error, 0);
    int us = atomic_load(&fake_us); /* who sees the launch counted may change it */
    atomic_store(&fake_p_at, args->p.at);
    atomic_fetch_add(&fake_launches, 1);
    atomic_store(&fake_launched_at, ((struct fake_stream *)stream)->priority);
    uint64_t groups = (args->rows + args->group_rows - 1) / args->group_rows;
    atomic_store(&fake_masked, args->masked);
    if (args->masked)
        memset(args->masked, 0xff, sizeof args->scratch->masked);
    for (uint64_t i = 0; i < groups && !error; i++)
        args->scratch->partial[args->first_group + i] =
            args->first_group + i == 0 ? FAKE_LOSS * args->divisor : 0;
    while (atomic_load(&fake_loading) && fake_now_ns() < atomic_load(&fake_busy_until_ns))
        usleep(100);
    atomic_store(&fake_loading, false);
    if (error)
        return (cudaError_t)error;
    fake_work(stream, us);
    atomic_store(&fake_busy_until_ns, ((struct fake_stream *)stream)->ready_ns);
    return cudaSuccess;
}
/* The host's address of what the device may know by another. */
static char *fake_from_mapped(char *at) {
    pthread_mutex_lock(&fake_lock);
    for (int i = 0; i < FAKE_PINNED_MAX; i++)
        if (at - FAKE_MAPPED_AT >= fake_pinned_range[i].at &&
            at - FAKE_MAPPED_AT < fake_pinned_range[i].at + fake_pinned_range[i].bytes) {
            at -= FAKE_MAPPED_AT;
            break;
        }
    pthread_mutex_unlock(&fake_lock);
    return at;
}
cudaError_t kld_cuda_launch_finish(const struct kld_cuda_args *args, uint32_t groups, bool first,
                                   bool last, uint32_t loss_dtype, double *result,
                                   cudaStream_t stream) {
    int error = atomic_exchange(&fake_finish_error, 0);
    if (error)
        return (cudaError_t)error;
    atomic_fetch_add(&fake_finishes, 1);
    atomic_store(&fake_loss_at, args->loss.at);
    if (last && args->loss.at) {
        float loss = FAKE_LOSS;
        memcpy(fake_from_mapped(args->loss.at), &loss, sizeof loss);
    }
    if (last)
        *result = FAKE_LOSS;
    return fake_work(stream, 1);
}
cudaError_t kld_cuda_launch_ceiling(const void *a, const void *b, void *out, uint64_t bytes,
                                    bool write, uint32_t blocks, cudaStream_t stream) {
    return fake_work(stream, 5);
}

#endif
