/* cuda_file.h - which CUDA allocations of a client, sent as descriptors, are the same one.
 *
 * An allocation that comes as a descriptor has no name. But a client that registers several tensors
 * of one allocation sends one open file several times, and the kernel says whether two descriptors
 * are that (kcmp), and which one is first in an order of its own, by which they are found. For it a
 * descriptor of each such file is kept as long as a region shows it, by itself or as a piece of a
 * space (space.h), at most cuda_files_max in all and half of them for one client. What is not told
 * apart so, an allocation exported twice, one above that limit or a kernel without kcmp, counts as
 * another memory. Loop thread. */
#ifndef KLD_SERVER_WORKER_CUDA_FILE_H
#define KLD_SERVER_WORKER_CUDA_FILE_H

#include "server/worker/session.h"

/* Not what is surely something else. */
enum kld_status kld_cuda_file_check(int fd, struct kld_error *err);
/* The number of the file behind fd, the same for all regions of this client that show it; 0: not
 * known. The descriptor stays the caller's. */
uint64_t kld_cuda_file_acquire(struct kld_session *session, int fd);
/* Do several regions show it? A region that is going counts until it is gone. */
bool kld_cuda_file_is_shared(const struct kld_session *session, uint64_t number);
void kld_cuda_file_release(struct kld_session *session, uint64_t number);

#endif
