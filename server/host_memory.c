/* host_memory.c - see host_memory.h. */
#include "server/host_memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "proto/cgroup.h"

/* "max", and what cannot be read, is no limit. */
static uint64_t read_limit(const char *path) {
    uint64_t limit = UINT64_MAX;
    FILE *file = fopen(path, "re");
    if (file && fscanf(file, "%" SCNu64, &limit) != 1)
        limit = UINT64_MAX;
    if (file)
        fclose(file);
    return limit;
}

static void take_least(const char *path, void *least) {
    uint64_t limit = read_limit(path), *to = least;
    *to = limit < *to ? limit : *to;
}

uint64_t kld_cgroup_memory_bytes(const char *groups, const char *mounts) {
    static const struct kld_cgroup_limit memory = {"memory",
                                                   {"memory.limit_in_bytes", "memory.max"}};
    uint64_t least = UINT64_MAX;
    kld_cgroup_walk(groups, mounts, &memory, take_least, &least);
    return least;
}

uint64_t kld_host_memory_bytes(void) {
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    uint64_t all = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0;
    uint64_t limit = kld_cgroup_memory_bytes(KLD_CGROUP_GROUPS, KLD_CGROUP_MOUNTS);
    return limit < all || all == 0 ? (limit == UINT64_MAX ? 0 : limit) : all;
}

uint64_t kld_host_mappings(void) {
    uint64_t most = read_limit("/proc/sys/vm/max_map_count");
    return most == UINT64_MAX ? 0 : most;
}
