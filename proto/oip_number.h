/* oip_number.h - decimal numbers of JSON tensors, read and written fast.
 *
 * Reading gives the nearest FP32 or FP64 value, as strtof() and strtod() do; writing gives text
 * that reads back to the same bits: 9 significant digits for FP32, 17 for FP64. The usual cases
 * need a few operations on integers; the rest goes to the C library. Internal to proto/oip*.c; any
 * thread. */
#ifndef KLD_PROTO_OIP_NUMBER_H
#define KLD_PROTO_OIP_NUMBER_H

#include <stddef.h>

#define KLD_NUMBER_TEXT_MAX 32

/* *at: at a number whose grammar was checked, moved behind it. end: up to there the text may be
 * read, and before it comes something that is no part of the number. Out of range: infinity. */
float kld_number_read_float(const char **at, const char *end);
double kld_number_read_double(const char **at, const char *end);

/* Finite values only. to: KLD_NUMBER_TEXT_MAX bytes; returns the length, without a NUL. */
size_t kld_number_write_float(char *to, float value);
size_t kld_number_write_double(char *to, double value);

#endif
