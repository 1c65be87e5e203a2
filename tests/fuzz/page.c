/* page.c - libFuzzer over the page that the processes of a server share: whatever is in it, what
 * they ask it leads nowhere else, and what the gateway tells of it fits its buffers and can be read
 * by the command line tool. Counters any process may write; the other part is filled as well.
 *
 * Input: 1 byte, how many workers there are, 8 for what the page says; the page; shorter than it,
 * again and again. */
#include <stdlib.h>
#include <string.h>

#include "client/cli/metrics.h"
#include "server/gateway/links.h"
#include "server/gateway/metrics.h"
#include "server/gateway/recent.h"
#include "tests/fuzz/common/fuzz.h"

static struct kld_stats_page page;
static struct kld_gateway_common common;
static struct kld_gateway gateway = {.common = &common, .page = &page, .stats = &page.common};

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    struct kld_error err;
    common.recent = kld_recent_open();
    require(common.recent != NULL);
    /* Of no worker: the page says none yet. */
    require(kld_links_open(NULL, NULL, &page, NULL, &gateway.links, &err) == KLD_OK);
    return 0;
}

static void fill(const uint8_t *data, size_t bytes) {
    unsigned char *at = (unsigned char *)&page;
    for (size_t filled = 0; filled < sizeof page; filled += bytes)
        memcpy(at + filled, data, bytes < sizeof page - filled ? bytes : sizeof page - filled);
}

static void require_read(char *text, size_t bytes) {
    static struct kld_report report;
    struct kld_error err;
    require(memchr(text, 0, bytes) == NULL);
    text[bytes] = '\0';
    enum kld_status status = kld_report_read(text, &report, &err);
    if (status)
        require_error(status, &err);
    else
        require(report.workers == kld_stats_workers(&page));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static char buffer[KLD_METRICS_BYTES_MAX + 1];
    struct kld_oip_text text = {.data = buffer, .capacity = KLD_METRICS_BYTES_MAX};
    if (bytes < 2)
        return 0;
    fill(data + 1, bytes - 1);
    if (data[0] % 9 < 8)
        atomic_store(&page.workers, data[0] % 9);
    require(kld_stats_workers(&page) <= KLD_WIRE_DEVICES_MAX);
    (void)kld_stats_described(&page);
    (void)kld_stats_ready(&page);
    kld_metrics_append(&page, &text);
    require(!text.overflow);
    require_read(buffer, text.length);
    /* Of the sizes that routes.c gives them. */
    text = (struct kld_oip_text){.data = buffer, .capacity = 16384};
    kld_page_append(&gateway, NULL, &text);
    require(!text.overflow);
    text = (struct kld_oip_text){.data = buffer, .capacity = 4096};
    kld_metrics_append_model(&page.model, &text);
    require(!text.overflow);
    text = (struct kld_oip_text){.data = buffer, .capacity = 512};
    kld_metrics_append_device(&page, &text);
    require(!text.overflow);
    return 0;
}
