/* count.c - what is counted of an infer request: once when its outcome is known, once at its end
 * (infer.h). It changes nothing of the request but what says so. Loop thread. */
#include <time.h>

#include "server/gateway/infer.h"
#include "server/gateway/recent.h"

void kld_infer_count(struct kld_infer *infer, enum kld_status status) {
    struct kld_gateway *gateway = infer->gateway;
    struct kld_stats_model *counts = &gateway->page->model;
    uint64_t ns = uv_hrtime() - infer->exchange->started_ns;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    counts->last_ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
    if (infer->parsed)
        infer->exchange->asked = (enum kld_asked)infer->request.op.divergence;
    kld_stats_request(gateway->stats, KLD_FRONT_HTTP, infer->exchange->asked, status);
    infer->succeeded = !status;
    kld_recent_request(gateway->common->recent, infer->exchange->started_ns + ns);
    if (status) {
        counts->fail++;
        counts->fail_ns += ns;
    } else {
        counts->success++;
        counts->success_ns += ns;
        counts->queue_ns += infer->result.queue_ns;
        counts->input_ns += infer->result.copy_ns + (infer->submitted_ns - infer->gather_ns);
        counts->kernel_ns += infer->result.kernel_ns;
        counts->output_ns += infer->exchange->started_ns + ns - infer->computed_ns;
    }
    kld_infer_log(infer, status, ns);
}

/* They add up to the whole: what is nobody else's is the gateway's. */
static void count_stages(const struct kld_infer *infer, uint64_t now) {
    struct kld_stats *stats = infer->gateway->stats;
    uint64_t started = infer->exchange->started_ns, rest = now - started;
    const uint64_t stages[KLD_STAGE_COUNT] = {
        [KLD_STAGE_receive] = infer->body_end_ns - started,
        [KLD_STAGE_queue] = infer->result.queue_ns,
        [KLD_STAGE_copy] = infer->result.copy_ns,
        [KLD_STAGE_kernel] = infer->result.kernel_ns,
        [KLD_STAGE_reply] = now - infer->computed_ns,
    };
    for (int i = 0; i < KLD_STAGE_COUNT; i++)
        rest -= rest < stages[i] ? rest : stages[i];
    for (int i = 0; i < KLD_STAGE_COUNT; i++)
        kld_stats_stage(stats, (enum kld_stage)i, i == KLD_STAGE_gateway ? rest : stages[i]);
}

void kld_infer_count_end(const struct kld_exchange *exchange) {
    const struct kld_infer *infer = exchange->state;
    uint64_t now = uv_hrtime();
    kld_stats_duration(exchange->gateway->stats, KLD_FRONT_HTTP, exchange->asked,
                       now - exchange->started_ns);
    if (infer && infer->succeeded)
        count_stages(infer, now);
}
