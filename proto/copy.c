/* copy.c - copies past the caches (copy.h). Knows no memory but what it is given. Any thread. */
#include "proto/copy.h"

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#define LINE_BYTES 64

#ifdef __SSE2__
void kld_copy_past_caches(void *to, const void *from, size_t bytes) {
    unsigned char *out = to;
    const unsigned char *in = from;
    size_t head = -(uintptr_t)to % LINE_BYTES;
    head = head < bytes ? head : bytes;
    memcpy(out, in, head);
    for (; head + LINE_BYTES <= bytes; head += LINE_BYTES) {
        __m128i part[4];
        for (int i = 0; i < 4; i++)
            part[i] = _mm_loadu_si128((const __m128i *)(const void *)(in + head) + i);
        for (int i = 0; i < 4; i++)
            _mm_stream_si128((__m128i *)(void *)(out + head) + i, part[i]);
    }
    _mm_sfence();
    memcpy(out + head, in + head, bytes - head);
}
#else
void kld_copy_past_caches(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
#endif
