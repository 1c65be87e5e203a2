/* runtime.c - the CUDA runtime of the emulated kernels: the unit tests' double, of a card with few
 * multiprocessors, so that blocks have more than one turn. Kernels run when they are launched, on
 * machine.h's threads; what a stream is told is done at once. KLD_EMULATE_SM=80: a card with as
 * much shared memory as sm_80's, which has no clusters; else one as sm_90's. */
#include <stdlib.h>
#include <string.h>

static int shared_bytes(void) {
    const char *sm = getenv("KLD_EMULATE_SM");
    return sm && strcmp(sm, "80") == 0 ? 163 << 10 : 227 << 10;
}

#define FAKE_MAPPED_AT 0
#define FAKE_MULTIPROCESSORS 2
#define FAKE_SHARED_BYTES shared_bytes()
#include "tests/unit/kernels/cuda/fake_runtime.h"
