/* uv_loop.h - an event loop of libuv whose table of descriptors is made at the start, and how it
 * stays awake for a while. Knows no role. On the thread that opens the loop.
 *
 * libuv has an entry for each descriptor up to the highest that it watches, makes the table larger
 * when a higher one comes, and ends the process (abort()) if it gets no memory for that. At the
 * start that ends nobody's requests; later it would, for a shortage that passes. */
#ifndef KLD_SERVER_UV_LOOP_H
#define KLD_SERVER_UV_LOOP_H

#include <stdint.h>
#include <uv.h>

/* uv_loop_init(), and room in the table for all descriptors that this process may come to hold
 * (kld_descriptors_max()), 8 bytes each. A role that has its limit raised does so first. Returns 0
 * or libuv's error. Without a descriptor to spare the table is made as it is needed. */
int kld_uv_loop_open(uv_loop_t *loop);
/* Before the loop looks at its descriptors: until one of them has something for it, so long, or
 * until a timer may be due. To wake a thread takes longer than what it is to do then may take. */
void kld_uv_loop_stay_awake(const uv_loop_t *loop, uint64_t ns);

#endif
