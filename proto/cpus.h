/* cpus.h - how many CPUs a process may use: what it is as many threads as there are CPUs by, and
 * polls by, unless it is told how many. A container, or a service, may have less than the
 * processors that it sees. Any thread. */
#ifndef KLD_PROTO_CPUS_H
#define KLD_PROTO_CPUS_H

#include <stdint.h>

/* The least of the processors that this thread may run on and of the quotas around the process;
 * at least 1. Reads files: not where it is asked often, nor in the gateway's sandbox. */
uint32_t kld_cpus_usable(void);

/* The least quota of the control groups, of either version, that `groups` names (a file like
 * /proc/self/cgroup) and of those around them, where `mounts` (one like /proc/self/mountinfo)
 * tells; rounded up. UINT32_MAX: none. */
uint32_t kld_cpus_quota(const char *groups, const char *mounts);

#endif
