/* copy.h - a copy that goes past the caches. Any thread. */
#ifndef KLD_PROTO_COPY_H
#define KLD_PROTO_COPY_H

#include <stddef.h>

/* As memcpy(), for memory that is not looked at again before it has left the caches anyway: what is
 * written there is not read first, and drives out nothing that others have in them. Ordered with
 * all that the thread writes after it. Where a processor has no such stores it is memcpy(). */
void kld_copy_past_caches(void *to, const void *from, size_t bytes);

#endif
