/* metrics.h - the counters as Prometheus text, the model's statistics as Triton names them, and the
 * status page. They read the shared page of server/stats.h and write text; any thread. */
#ifndef KLD_SERVER_GATEWAY_METRICS_H
#define KLD_SERVER_GATEWAY_METRICS_H

#include "proto/oip.h"
#include "server/gateway/gateway.h"

/* Room that is enough for kld_metrics_append(), whatever the counters hold. */
#define KLD_METRICS_BYTES_MAX (512 << 10)

void kld_metrics_append(const struct kld_stats_page *page, struct kld_oip_text *text);
/* {"model_stats":[...]} */
void kld_metrics_append_model(const struct kld_gateway_counts *counts, struct kld_oip_text *text);
/* HTML for a person's browser; it shows no name of a client and no path. */
void kld_page_append(const struct kld_gateway *gateway, struct kld_oip_text *text);

#endif
