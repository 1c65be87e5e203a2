/* host_memory.c - see host_memory.h. */
#include "server/host_memory.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PATH_MAX_BYTES 4096

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

/* A group and all around it. A container may see its own group as the root, under whatever name. */
static uint64_t least_limit(const char *root, const char *folder, const char *group,
                            const char *name) {
    char within[PATH_MAX_BYTES], path[2 * PATH_MAX_BYTES];
    uint64_t least = UINT64_MAX;
    snprintf(within, sizeof within, "%s", group);
    for (;;) {
        snprintf(path, sizeof path, "%s%s%s/%s", root, folder, within, name);
        uint64_t limit = read_limit(path);
        least = limit < least ? limit : least;
        char *end = strrchr(within, '/');
        if (!end)
            return least;
        *end = '\0';
    }
}

static bool names_memory(const char *controllers, size_t bytes) {
    for (const char *at = controllers; at < controllers + bytes; at += strcspn(at, ",:") + 1)
        if (strncmp(at, "memory", 6) == 0 && strcspn(at, ",:") == 6)
            return true;
    return false;
}

uint64_t kld_cgroup_memory_bytes(const char *groups, const char *root) {
    char line[PATH_MAX_BYTES];
    uint64_t least = UINT64_MAX;
    FILE *file = fopen(groups, "re");
    while (file && fgets(line, sizeof line, file)) { /* number:controllers:group */
        char *controllers = strchr(line, ':'),
             *group = controllers ? strchr(controllers + 1, ':') : NULL;
        uint64_t limit = UINT64_MAX;
        if (!group)
            continue;
        controllers++;
        line[strcspn(line, "\n")] = '\0';
        if (group == controllers)
            limit = least_limit(root, "", group + 1, "memory.max");
        else if (names_memory(controllers, (size_t)(group - controllers)))
            limit = least_limit(root, "/memory", group + 1, "memory.limit_in_bytes");
        least = limit < least ? limit : least;
    }
    if (file)
        fclose(file);
    return least;
}

uint64_t kld_host_memory_bytes(void) {
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    uint64_t all = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0;
    uint64_t limit = kld_cgroup_memory_bytes("/proc/self/cgroup", "/sys/fs/cgroup");
    return limit < all || all == 0 ? (limit == UINT64_MAX ? 0 : limit) : all;
}

uint64_t kld_host_mappings(void) {
    uint64_t most = read_limit("/proc/sys/vm/max_map_count");
    return most == UINT64_MAX ? 0 : most;
}
