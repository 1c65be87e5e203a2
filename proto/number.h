/* number.h - whole numbers as people write them in settings and command lines: digits, and for
 * bytes a unit that may follow; and numbers as messages show them. Pure; any thread. */
#ifndef KLD_PROTO_NUMBER_H
#define KLD_PROTO_NUMBER_H

#include <stdbool.h>
#include <stdint.h>

/* With no sign and nothing before or behind it, of base 8 or 10. units: K, M, G or T (2^10, 2^20,
 * ...) may follow, in either case. False: it is none, or too large; nothing is written then. */
bool kld_number_parse(const char *text, int base, bool units, uint64_t *ret_number);

#define KLD_NUMBER_SHOWN_MAX 32

/* With as few digits as read back to the same number, 6 at least: none that a message calls wrong
 * looks right there, as 1.0000001 would as 1. Returns `to`. */
const char *kld_number_show(double number, char to[KLD_NUMBER_SHOWN_MAX]);

#endif
