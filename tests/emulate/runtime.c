/* runtime.c - the CUDA runtime of the emulated kernels: the unit tests' double, of a card with few
 * multiprocessors, so that blocks have more than one turn. Kernels run when they are launched, on
 * machine.h's threads; what a stream is told is done at once. */
#define FAKE_MAPPED_AT 0
#define FAKE_MULTIPROCESSORS 2
#include "tests/unit/kernels/cuda/fake_runtime.h"
