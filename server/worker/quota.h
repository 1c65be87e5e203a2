/* quota.h - how much a client, its user and all of them may have: requests in flight, regions and
 * their bytes, and what of those may lie in the device's pool or in memory of the host. The gateway
 * is no such client: its own limits bound what it takes, and only how many regions is bounded here
 * too. Loop thread. */
#ifndef KLD_SERVER_WORKER_QUOTA_H
#define KLD_SERVER_WORKER_QUOTA_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"
#include "server/worker/mapping.h"

/* Regions of the gateway's beyond what tensors_max, http_regions_max and http_requests_max let it
 * have: staging, buffers that it keeps for later, and those that are on their way out. */
#define KLD_GATEWAY_REGIONS_BESIDE 1024
/* One in so many of the mappings that the kernel gives a process is for no client's region. */
#define KLD_MAPPINGS_KEPT_PART 4
/* What a kernel gives one that nobody has told otherwise (vm.max_map_count), where the process may
 * not read that: the unit hides /proc/sys. */
#define KLD_MAPPINGS_USUAL 65530

struct kld_config;
struct kld_session;
struct kld_worker;

/* It is the gateway: what it has of requests, the pool and mappings is no client's from here on.
 * Memory that it shared before counts as its uid's until it is let go of. */
void kld_quota_recognise(struct kld_session *session);
/* Requests that are kept for the gateway beside requests_max; what it has above them it takes of
 * the clients'. */
uint32_t kld_quota_gateway_requests(const struct kld_config *config);
/* One more request, of this client's user? The gateway has all that there are. */
enum kld_status kld_quota_check_request(const struct kld_session *session, struct kld_error *err);

/* One more region, of no bytes of its own? */
enum kld_status kld_quota_check_count(const struct kld_session *session, struct kld_error *err);
/* One more of this enum kld_region_kind and size? */
enum kld_status kld_quota_check(const struct kld_session *session, uint32_t kind, uint64_t bytes,
                                struct kld_error *err);
/* A region of this kind is a mapping of this process. */
bool kld_quota_is_mapped(const struct kld_worker *worker, uint32_t kind);
/* Most of them, of all clients; host_mappings: of kld_host_mappings(); 0: the usual. */
uint64_t kld_quota_mappings_max(const struct kld_config *config, uint64_t host_mappings);
/* What this connection may have, as WELCOME says it. */
uint32_t kld_quota_requests_max(const struct kld_session *session);
uint32_t kld_quota_regions_max(const struct kld_session *session);
uint64_t kld_quota_region_bytes_max(const struct kld_session *session);
/* Of the host's memory, for all clients of this worker together. Who touches a page of a memfd
 * first has to pay for it, and of what a client never touched that is the worker. */
uint64_t kld_quota_shared_bytes_max(const struct kld_worker *worker);
struct kld_mapping_limit kld_quota_mapping_limit(const struct kld_session *session);

#endif
