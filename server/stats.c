/* stats.c - the shared page: made once by the supervisor, mapped by every role (stats.h).
 * It counts; it does not render (the gateway does) and does not log. Any thread, any process. */
#include "server/stats.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
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

#define COUNTERS_BYTES (sizeof(struct kld_stats_page) - KLD_STATS_STATE_BYTES)

/* One behind the other, in a place that is reserved for both. */
static enum kld_status map(int counters_fd, int state_fd, int state_access,
                           struct kld_stats_page **ret_page, struct kld_error *err) {
    const int access = PROT_READ | PROT_WRITE;
    struct kld_stats_page *page =
        mmap(NULL, sizeof *page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return kld_error_set(err, KLD_NO_MEMORY, "mapping the page of counters: %s",
                             strerror(errno));
    if (mmap(page->state, KLD_STATS_STATE_BYTES, state_access, MAP_SHARED | MAP_FIXED, state_fd,
             0) == MAP_FAILED ||
        mmap(&page->model, COUNTERS_BYTES, access, MAP_SHARED | MAP_FIXED, counters_fd, 0) ==
            MAP_FAILED) {
        kld_error_set(err, KLD_NO_MEMORY, "mapping the page of counters: %s", strerror(errno));
        kld_stats_detach(page);
        return KLD_NO_MEMORY;
    }
    *ret_page = page;
    return KLD_OK;
}

static int make(const char *name, size_t bytes) {
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

/* The same file once more, and its user may open it for writing no more: who has that descriptor
 * has no way to another one. */
static int reopen(int fd) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return fd >= 0 && fchmod(fd, S_IRUSR) == 0 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
}

enum kld_status kld_stats_create(struct kld_stats_page **ret_page, struct kld_stats_fds *ret_fds,
                                 struct kld_error *err) {
    struct kld_stats_fds fds = {.counters = make("kld-stats", COUNTERS_BYTES),
                                .state = make("kld-state", KLD_STATS_STATE_BYTES),
                                .state_read = -1};
    struct kld_stats_page *page = NULL;
    enum kld_status status = KLD_OK;
    if (fds.counters >= 0)
        fds.state_read = reopen(fds.state);
    if (fds.state_read < 0)
        status =
            kld_error_set(err, KLD_NO_MEMORY, "making the page of counters: %s", strerror(errno));
    if (status == KLD_OK)
        status = map(fds.counters, fds.state, PROT_READ | PROT_WRITE, &page, err);
    if (status != KLD_OK) {
        kld_stats_close(&fds);
        return status;
    }
    page->magic = MAGIC; /* the rest is 0 as the kernel gave it */
    *ret_page = page;
    *ret_fds = fds;
    return KLD_OK;
}

void kld_stats_close(struct kld_stats_fds *fds) {
    const int all[] = {fds->counters, fds->state, fds->state_read};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (all[i] >= 0)
            close(all[i]);
    *fds = KLD_STATS_NO_FDS;
}

static bool has_size(int fd, size_t bytes) {
    struct stat info;
    return fstat(fd, &info) == 0 && info.st_size == (off_t)bytes;
}

enum kld_status kld_stats_attach(int counters_fd, int state_fd, struct kld_stats_page **ret_page,
                                 struct kld_error *err) {
    struct kld_stats_page *page = NULL;
    if (!has_size(counters_fd, COUNTERS_BYTES) || !has_size(state_fd, KLD_STATS_STATE_BYTES))
        return kld_error_set(err, KLD_INVALID, "the page of counters has the wrong size");
    bool writes = (fcntl(state_fd, F_GETFL) & O_ACCMODE) == O_RDWR;
    enum kld_status status =
        map(counters_fd, state_fd, writes ? PROT_READ | PROT_WRITE : PROT_READ, &page, err);
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

uint32_t kld_stats_workers(const struct kld_stats_page *page) {
    uint32_t workers = atomic_load(&page->workers);
    return workers < KLD_WIRE_DEVICES_MAX ? workers : KLD_WIRE_DEVICES_MAX;
}

bool kld_stats_described(const struct kld_stats_page *page) {
    uint32_t workers = kld_stats_workers(page);
    for (uint32_t i = 0; i < workers; i++)
        if (!atomic_load(&page->device[i].described))
            return false;
    return workers > 0;
}

bool kld_stats_ready(const struct kld_stats_page *page) {
    for (uint32_t i = 0; i < KLD_WIRE_DEVICES_MAX; i++)
        if (atomic_load(&page->device[i].ready))
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
    uint64_t sum = 0; /* not a difference, which another loop could make negative meanwhile */
    for (int asked = 0; asked < KLD_ASKED_COUNT; asked++)
        if (asked != KLD_ASKED_PUT)
            sum += atomic_load_explicit(&stats->requests[KLD_FRONT_HTTP][asked][status],
                                        memory_order_relaxed);
    return sum;
}

void kld_stats_reset_role(struct kld_stats *stats, const char *role) {
#define X(name, type, owner, help)                                                                 \
    if (strcmp(#type, "gauge") == 0 && strcmp(#owner, role) == 0)                                  \
        kld_stats_set(stats, KLD_STAT_##name, 0);
    KLD_STAT_MAP(X)
#undef X
}
