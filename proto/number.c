/* number.c - reads a whole number, shows any (number.h). */
#include "proto/number.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool kld_number_parse(const char *text, int base, bool units, uint64_t *ret_number) {
    static const char names[] = "KMGT";
    if (!isdigit((unsigned char)text[0]))
        return false;
    char *end = NULL;
    errno = 0;
    unsigned long long number = strtoull(text, &end, base);
    if (errno)
        return false;
    unsigned shift = 0;
    if (units && *end) {
        const char *unit = strchr(names, toupper((unsigned char)*end));
        if (!unit)
            return false;
        shift = 10 * (unsigned)(unit - names + 1);
        end++;
    }
    if (*end || (shift && number >> (64 - shift)))
        return false;
    *ret_number = (uint64_t)number << shift;
    return true;
}

const char *kld_number_show(double number, char to[KLD_NUMBER_SHOWN_MAX]) {
    int digits = 6;
    do
        snprintf(to, KLD_NUMBER_SHOWN_MAX, "%.*g", digits, number);
    while (digits++ < 17 && strtod(to, NULL) != number); /* of a NaN none does */
    return to;
}
