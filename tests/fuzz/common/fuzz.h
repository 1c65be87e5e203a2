/* fuzz.h - what the fuzz targets share: promises that end the process when they are broken, and
 * reading an input from its front. Of a target's one thread. */
#ifndef KLD_TESTS_FUZZ_H
#define KLD_TESTS_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerInitialize(int *argc, char ***argv);

/* A promise; where it is broken its text and place are printed, and the process aborts. */
#define require(truth) ((truth) ? (void)0 : fuzz_broken(#truth, __FILE__, __LINE__))
_Noreturn void fuzz_broken(const char *promise, const char *file, int line);
/* An error has a status, and a text that ends. */
void require_error(enum kld_status status, const struct kld_error *err);

/* What is left of an input. Behind its end everything is 0. */
struct fuzz_input {
    const uint8_t *at, *end;
};
uint8_t fuzz_byte(struct fuzz_input *input);
uint16_t fuzz_short(struct fuzz_input *input);
uint64_t fuzz_long(struct fuzz_input *input);
/* Up to `bytes` of it, and how many there were; the rest of *to stays as it is. */
size_t fuzz_bytes(struct fuzz_input *input, void *to, size_t bytes);
/* A NUL-terminated text up to the next NUL or newline of the input; to be freed. */
char *fuzz_text(struct fuzz_input *input);

/* Descriptors of this process that are open, pipes not among them. */
unsigned fuzz_open_fds(void);
/* So many, once those that are being closed are; where that is not so they are listed. */
void fuzz_require_fds(unsigned expected);
/* Lines are made, and what they say is nobody's concern. */
void fuzz_log_to_nowhere(const char *level);
uint64_t fuzz_now_ns(void); /* CLOCK_MONOTONIC */
void fuzz_nap_us(unsigned us);
/* Every so many calls looks for memory that nobody points to any more; where there is some, that is
 * printed and the process aborts. Nothing where ASAN_OPTIONS has detect_leaks=0. */
void fuzz_require_no_leaks(void);

#endif
