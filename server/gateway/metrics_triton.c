/* metrics_triton.c - the server as NVIDIA Triton would describe itself, for dashboards and tools
 * that know its names: metrics, and the model's statistics. Of requests over HTTP, because there
 * the model has its name. Counts nothing itself. Any thread. */
#include <inttypes.h>
#include <string.h>

#include "server/gateway/metrics.h"

#define MODEL_LABELS "{model=\"" KLD_OIP_MODEL "\",version=\"" KLD_OIP_MODEL_VERSION "\"}"

static uint64_t successes(const struct kld_stats_page *page) {
    return kld_stats_inferences_of(&page->common, KLD_OK);
}

static void append_number(const struct kld_metric *metric, uint64_t number,
                          struct kld_oip_text *text) {
    kld_oip_append(text, "%s" MODEL_LABELS " %" PRIu64 "\n", metric->name, number);
}

void kld_metric_triton_success(const struct kld_metric *metric, const struct kld_stats_page *page,
                               struct kld_oip_text *text) {
    append_number(metric, successes(page), text);
}

void kld_metric_triton_failure(const struct kld_metric *metric, const struct kld_stats_page *page,
                               struct kld_oip_text *text) {
    uint64_t sum = 0;
    for (unsigned status = KLD_OK + 1; status < KLD_STATUS_SLOTS; status++)
        sum += kld_stats_inferences_of(&page->common, status);
    append_number(metric, sum, text);
}

/* index: of the stage; KLD_STAGE_COUNT: all of them together. */
void kld_metric_triton_us(const struct kld_metric *metric, const struct kld_stats_page *page,
                          struct kld_oip_text *text) {
    uint64_t sum_ns = 0;
    for (unsigned i = 0; i < KLD_STAGE_COUNT; i++)
        if (i == metric->index || metric->index == KLD_STAGE_COUNT)
            sum_ns += atomic_load_explicit(&page->common.stage[i].sum_ns, memory_order_relaxed);
    append_number(metric, sum_ns / 1000, text);
}

void kld_metric_triton_input(const struct kld_metric *metric, const struct kld_stats_page *page,
                             struct kld_oip_text *text) {
    append_number(metric, page->model.input_ns / 1000, text);
}

void kld_metric_triton_output(const struct kld_metric *metric, const struct kld_stats_page *page,
                              struct kld_oip_text *text) {
    append_number(metric, page->model.output_ns / 1000, text);
}

/* The first worker of its device: a GPU that is named several times has several. */
static bool is_first(const struct kld_stats_page *page, uint32_t worker) {
    for (uint32_t i = 0; i < worker; i++)
        if (memcmp(page->device[i].uuid, page->device[worker].uuid, KLD_WIRE_UUID_BYTES) == 0)
            return false;
    return true;
}

void kld_metric_gpu_memory(const struct kld_metric *metric, const struct kld_stats_page *page,
                           struct kld_oip_text *text) {
    for (uint32_t i = 0; i < kld_stats_workers(page); i++) {
        const struct kld_stats *stats = &page->worker[i];
        const uint8_t *uuid = page->device[i].uuid;
        if (!kld_metric_has_uuid(uuid) || !is_first(page, i))
            continue;
        kld_oip_append(text, "%s{gpu_uuid=\"", metric->name);
        kld_metric_append_uuid(uuid, text);
        kld_oip_append(text, "\"} %" PRIu64 "\n",
                       atomic_load_explicit(&stats->value[KLD_STAT_device_memory_bytes],
                                            memory_order_relaxed));
    }
}

static void append_duration(struct kld_oip_text *text, const char *name, uint64_t count,
                            uint64_t ns, const char *behind) {
    kld_oip_append(text, "\"%s\":{\"count\":%" PRIu64 ",\"ns\":%" PRIu64 "}%s", name, count, ns,
                   behind);
}

void kld_metrics_append_model(const struct kld_stats_model *counts, struct kld_oip_text *text) {
    uint64_t done = counts->success;
    kld_oip_append(text,
                   "{\"model_stats\":[{\"name\":\"" KLD_OIP_MODEL
                   "\",\"version\":\"" KLD_OIP_MODEL_VERSION "\",\"last_inference\":%" PRIu64
                   ",\"inference_count\":%" PRIu64 ",\"execution_count\":%" PRIu64
                   ",\"inference_stats\":{",
                   counts->last_ms, done, done);
    append_duration(text, "success", done, counts->success_ns, ",");
    append_duration(text, "fail", counts->fail, counts->fail_ns, ",");
    append_duration(text, "queue", done, counts->queue_ns, ",");
    append_duration(text, "compute_input", done, counts->input_ns, ",");
    append_duration(text, "compute_infer", done, counts->kernel_ns, ",");
    append_duration(text, "compute_output", done, counts->output_ns, ",");
    append_duration(text, "cache_hit", 0, 0, ",");
    append_duration(text, "cache_miss", 0, 0, "},\"response_stats\":{},\"batch_stats\":[");
    if (done) {
        kld_oip_append(text, "{\"batch_size\":1,");
        append_duration(text, "compute_input", done, counts->input_ns, ",");
        append_duration(text, "compute_infer", done, counts->kernel_ns, ",");
        append_duration(text, "compute_output", done, counts->output_ns, "}");
    }
    kld_oip_append(text, "],\"memory_usage\":[]}]}");
}
