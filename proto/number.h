/* number.h - whole numbers as people write them in settings and command lines: digits, and for
 * bytes a unit that may follow. Pure; any thread. */
#ifndef KLD_PROTO_NUMBER_H
#define KLD_PROTO_NUMBER_H

#include <stdbool.h>
#include <stdint.h>

/* With no sign and nothing before or behind it, of base 8 or 10. units: K, M, G or T (2^10, 2^20,
 * ...) may follow, in either case. False: it is none, or too large; nothing is written then. */
bool kld_number_parse(const char *text, int base, bool units, uint64_t *ret_number);

#endif
