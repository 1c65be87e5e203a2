/* stats.c - the shared page of counters: made once by the supervisor, mapped by every role.
 * It counts; it does not render (the gateway does) and does not log. Any thread, any process. */
#include "server/stats.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* The sizes are part of it: a page of another build is refused. */
#define MAGIC (UINT64_C(0x6b6c642d73740000) ^ (uint64_t)sizeof(struct kld_stats_page))

#define US UINT64_C(1000)
#define MS UINT64_C(1000000)
#define S UINT64_C(1000000000)

const uint64_t kld_bucket_limit_ns[KLD_BUCKETS] = {
    10 * US, 25 * US, 50 * US, 100 * US, 250 * US, 500 * US,  1 * MS,    5 * MS / 2, 5 * MS,
    10 * MS, 25 * MS, 50 * MS, 100 * MS, 250 * MS, 1000 * MS, 5 * S / 2, 10 * S,     UINT64_MAX,
};

const unsigned kld_http_codes[KLD_HTTP_CODES_COUNT] = KLD_HTTP_CODES;

static enum kld_status map(int fd, struct kld_stats_page **ret_page, struct kld_error *err) {
    void *mapped =
        mmap(NULL, sizeof(struct kld_stats_page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        return kld_error_set(err, KLD_NO_MEMORY, "mapping the page of counters: %s",
                             strerror(errno));
    *ret_page = mapped;
    return KLD_OK;
}

enum kld_status kld_stats_create(struct kld_stats_page **ret_page, int *ret_fd,
                                 struct kld_error *err) {
    int fd = memfd_create("kld-stats", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return kld_error_set(err, KLD_NO_MEMORY, "making the page of counters: %s",
                             strerror(errno));
    struct kld_stats_page *page = NULL;
    enum kld_status status = KLD_OK;
    if (ftruncate(fd, sizeof(struct kld_stats_page)) < 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        status =
            kld_error_set(err, KLD_NO_MEMORY, "sizing the page of counters: %s", strerror(errno));
    if (status == KLD_OK)
        status = map(fd, &page, err);
    if (status != KLD_OK) {
        close(fd);
        return status;
    }
    page->magic = MAGIC; /* the rest is 0 as the kernel gave it */
    *ret_page = page;
    *ret_fd = fd;
    return KLD_OK;
}

enum kld_status kld_stats_attach(int fd, struct kld_stats_page **ret_page, struct kld_error *err) {
    struct stat info;
    if (fstat(fd, &info) < 0 || info.st_size != (off_t)sizeof(struct kld_stats_page))
        return kld_error_set(err, KLD_INVALID, "the page of counters has the wrong size");
    struct kld_stats_page *page = NULL;
    enum kld_status status = map(fd, &page, err);
    if (status != KLD_OK)
        return status;
    if (page->magic != MAGIC) {
        kld_stats_detach(page);
        return kld_error_set(err, KLD_INVALID, "the page of counters is of another version");
    }
    *ret_page = page;
    return KLD_OK;
}

void kld_stats_detach(struct kld_stats_page *page) {
    if (page)
        munmap(page, sizeof *page);
}

bool kld_stats_described(const struct kld_stats_page *page) {
    uint32_t workers = atomic_load(&page->workers);
    for (uint32_t i = 0; i < workers; i++)
        if (!atomic_load(&page->worker[i].described))
            return false;
    return workers > 0;
}

bool kld_stats_ready(const struct kld_stats_page *page) {
    for (uint32_t i = 0; i < KLD_WIRE_DEVICES_MAX; i++)
        if (atomic_load(&page->worker[i].worker_ready))
            return true;
    return false;
}

void kld_stats_add(struct kld_stats *stats, enum kld_stat stat, int64_t amount) {
    atomic_fetch_add_explicit(&stats->value[stat], (uint64_t)amount, memory_order_relaxed);
}

void kld_stats_set(struct kld_stats *stats, enum kld_stat stat, uint64_t value) {
    atomic_store_explicit(&stats->value[stat], value, memory_order_relaxed);
}

static void add(_Atomic uint64_t *value, uint64_t amount) {
    atomic_fetch_add_explicit(value, amount, memory_order_relaxed);
}

static void observe(struct kld_stats_histogram *histogram, uint64_t ns) {
    size_t bucket = 0;
    while (ns > kld_bucket_limit_ns[bucket]) /* the last limit is UINT64_MAX */
        bucket++;
    add(&histogram->bucket[bucket], 1);
    add(&histogram->sum_ns, ns);
}

void kld_stats_observe(struct kld_stats *stats, enum kld_histogram histogram, uint64_t ns) {
    observe(&stats->histogram[histogram], ns);
}

void kld_stats_request(struct kld_stats *stats, enum kld_front front, enum kld_asked asked,
                       enum kld_status status) {
    size_t slot = (unsigned)status < KLD_STATUS_SLOTS ? (size_t)status : (size_t)KLD_INTERNAL;
    add(&stats->requests[front][asked][slot], 1);
}

void kld_stats_duration(struct kld_stats *stats, enum kld_front front, enum kld_asked asked,
                        uint64_t ns) {
    observe(&stats->duration[front][asked], ns);
}

void kld_stats_stage(struct kld_stats *stats, enum kld_stage stage, uint64_t ns) {
    observe(&stats->stage[stage], ns);
}

void kld_stats_rejected(struct kld_stats *stats, enum kld_reject reject) {
    add(&stats->rejected[reject], 1);
}

void kld_stats_fault(struct kld_stats *stats, enum kld_status status) {
    if (status)
        add(&stats->faults[status == KLD_GONE          ? KLD_FAULT_peer
                           : status == KLD_NO_MEMORY   ? KLD_FAULT_memory
                           : status == KLD_DEVICE_LOST ? KLD_FAULT_device
                                                       : KLD_FAULT_request],
            1);
}

void kld_stats_http_reply(struct kld_stats *stats, unsigned http_status) {
    size_t i = 0;
    while (i < KLD_HTTP_CODES_COUNT - 1 && kld_http_codes[i] != http_status)
        i++;
    add(&stats->http_replies[i], 1);
}

void kld_stats_work(struct kld_stats *stats, enum kld_asked asked, enum kld_access access,
                    uint64_t bytes, uint64_t kernel_ns) {
    if (asked >= KLD_ASKED_COPY)
        return;
    add(&stats->work[asked][access].bytes, bytes);
    add(&stats->work[asked][access].kernel_ns, kernel_ns);
}

const char *kld_asked_name(enum kld_asked asked) {
    return asked == KLD_ASKED_COPY  ? "copy"
           : asked == KLD_ASKED_PUT ? "put_tensor"
           : asked < KLD_ASKED_COPY ? kld_divergence_name(asked)
                                    : "unknown";
}

uint64_t kld_stats_requests_of(const struct kld_stats *stats, enum kld_front front,
                               unsigned status) {
    uint64_t sum = 0;
    for (int asked = 0; asked < KLD_ASKED_COUNT; asked++)
        sum += atomic_load_explicit(&stats->requests[front][asked][status], memory_order_relaxed);
    return sum;
}

uint64_t kld_stats_inferences_of(const struct kld_stats *stats, unsigned status) {
    return kld_stats_requests_of(stats, KLD_FRONT_HTTP, status) -
           atomic_load_explicit(&stats->requests[KLD_FRONT_HTTP][KLD_ASKED_PUT][status],
                                memory_order_relaxed);
}

void kld_stats_reset_role(struct kld_stats *stats, const char *role) {
#define X(name, type, owner, help)                                                                 \
    if (strcmp(#type, "gauge") == 0 && strcmp(#owner, role) == 0)                                  \
        kld_stats_set(stats, KLD_STAT_##name, 0);
    KLD_STAT_MAP(X)
#undef X
}
