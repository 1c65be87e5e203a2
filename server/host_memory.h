/* host_memory.h - how much memory of the host this process may use: all there is, or what the
 * control groups that it is in, of either version, allow; and in how many pieces. Knows no option.
 * Any thread. */
#ifndef KLD_SERVER_HOST_MEMORY_H
#define KLD_SERVER_HOST_MEMORY_H

#include <stdint.h>

/* 0: not known. */
uint64_t kld_host_memory_bytes(void);
/* Mappings that a process may have (vm.max_map_count); 0: not known. */
uint64_t kld_host_mappings(void);
/* The least limit of the groups that `groups` names (a file like /proc/self/cgroup) and of those
 * around them, where `mounts` (one like /proc/self/mountinfo) tells; UINT64_MAX: none. */
uint64_t kld_cgroup_memory_bytes(const char *groups, const char *mounts);

#endif
