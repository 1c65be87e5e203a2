/* cpus.c - see cpus.h. */
#include "proto/cpus.h"

#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "proto/cgroup.h"

#define QUOTA_V1 "cpu.cfs_quota_us"
#define PERIOD_V1 "cpu.cfs_period_us"
#define PATH_MAX_BYTES 8192 /* longer ones are not looked at */

static uint32_t cpus_of(long long quota, long long period) {
    if (quota <= 0 || period <= 0) /* -1: of version 1, no limit */
        return UINT32_MAX;
    long long cpus = quota / period + (quota % period != 0);
    return cpus < UINT32_MAX ? (uint32_t)cpus : UINT32_MAX;
}

/* Up to two numbers -> how many there were. "max", and what cannot be read, is none. */
static int read_numbers(const char *path, long long *ret_first, long long *ret_second) {
    char line[64];
    int count = 0;
    FILE *file = fopen(path, "re");
    if (file && fgets(line, sizeof line, file))
        count = sscanf(line, "%lld %lld", ret_first, ret_second);
    if (file)
        fclose(file);
    return count;
}

/* Of version 1 quota and period are a file each. */
static bool read_quota(const char *path, long long *ret_quota, long long *ret_period) {
    size_t length = strlen(path), name = strlen(QUOTA_V1);
    char beside[PATH_MAX_BYTES];
    long long none;
    if (length < name || strcmp(path + length - name, QUOTA_V1) != 0)
        return read_numbers(path, ret_quota, ret_period) == 2;
    int bytes = snprintf(beside, sizeof beside, "%.*s%s", (int)(length - name), path, PERIOD_V1);
    return bytes < (int)sizeof beside && read_numbers(path, ret_quota, &none) == 1 &&
           read_numbers(beside, ret_period, &none) == 1;
}

static void take_least(const char *path, void *least) {
    long long quota, period;
    uint32_t cpus = read_quota(path, &quota, &period) ? cpus_of(quota, period) : UINT32_MAX;
    uint32_t *to = least;
    *to = cpus < *to ? cpus : *to;
}

uint32_t kld_cpus_quota(const char *groups, const char *mounts) {
    static const struct kld_cgroup_limit limit = {"cpu", {QUOTA_V1, "cpu.max"}};
    uint32_t least = UINT32_MAX;
    kld_cgroup_walk(groups, mounts, &limit, take_least, &least);
    return least;
}

uint32_t kld_cpus_usable(void) {
    cpu_set_t set;
    CPU_ZERO(&set);
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t cpus = online > 0 ? (uint32_t)online : 1;
    uint32_t quota = kld_cpus_quota(KLD_CGROUP_GROUPS, KLD_CGROUP_MOUNTS);
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        cpus = (uint32_t)CPU_COUNT(&set);
    return cpus < quota ? cpus : quota;
}
