/* descriptors.h - room for the descriptors that peers bring: connections, memory sent along. For
 * the roles that hold such; the supervisor holds none. Logs. At the start of a process, one thread.
 */
#ifndef KLD_SERVER_DESCRIPTORS_H
#define KLD_SERVER_DESCRIPTORS_H

#include <stdint.h>

/* The most that a role has open besides what its limits name: files, eventfds, epolls, and those of
 * the driver. */
#define KLD_DESCRIPTORS_OWN 256

/* Raises the soft limit to the hard one; says so in the log if that is less than `wanted`, which is
 * what the configured limits allow peers to fill, and KLD_DESCRIPTORS_OWN. */
void kld_descriptors_raise(uint64_t wanted);

/* As many as this process may come to hold: of `wanted` above what the limit lets it have, or
 * KLD_DESCRIPTORS_OWN where that was not called. */
uint64_t kld_descriptors_max(void);

#endif
