/* digits.h - eight characters of a text at a time: how many of them are digits, and their value.
 * Pure; any thread. */
#ifndef KLD_PROTO_DIGITS_H
#define KLD_PROTO_DIGITS_H

#include <endian.h>
#include <stdint.h>
#include <string.h>

/* Of all eight; the first is in the lowest byte. */
#define KLD_DIGITS_OF(c) (UINT64_C(0x0101010101010101) * (c))

/* A digit becomes its value, every other character something above 9. */
static inline uint64_t kld_digits_load(const char *text) {
    uint64_t eight;
    memcpy(&eight, text, sizeof eight);
    return le64toh(eight) ^ KLD_DIGITS_OF('0');
}

/* How many of them come before the first that is none. No byte carries into the next one. */
static inline unsigned kld_digits_count(uint64_t eight) {
    uint64_t others =
        (((eight & KLD_DIGITS_OF(0x7f)) + KLD_DIGITS_OF(0x80 - 10)) | eight) & KLD_DIGITS_OF(0x80);
    return others ? (unsigned)__builtin_ctzll(others) / 8 : 8;
}

/* The value of the first `count` of them, 1 to 8, which are digits: pairs, fours, all. */
static inline uint32_t kld_digits_value(uint64_t eight, unsigned count) {
    eight <<= 64 - 8 * count; /* zeros in front */
    eight = eight * 10 + (eight >> 8);
    eight = ((eight & UINT64_C(0x000000ff000000ff)) * UINT64_C(0x000f424000000064) +
             (eight >> 16 & UINT64_C(0x000000ff000000ff)) * UINT64_C(0x0000271000000001)) >>
            32;
    return (uint32_t)eight;
}

#endif
