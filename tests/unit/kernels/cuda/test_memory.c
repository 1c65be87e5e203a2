/* test_memory.c - memory of the host that the CUDA back end maps: who is to blame where that does
 * not work; over a double of the runtime. A build without CUDA has none of it. */
#include "kernels/backend.h"
#include "tests/unit/unit.h"

#ifdef KLD_WITH_CUDA
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>

#include "tests/unit/kernels/cuda/fixture.h"

#define BYTES ((uint64_t)1 << 20)

/* No room is the server's affair; memory that may not be written is its client's. */
START_TEST(what_cannot_be_mapped) {
    setup();
    struct kld_memory *memory = NULL;
    char path[64];
    int fd = memfd_create("test", 0);
    ck_assert_int_eq(ftruncate(fd, BYTES), 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int unwritable = open(path, O_RDONLY);
    ck_assert_int_ge(unwritable, 0);
    ck_assert_int_eq(cuda->memory_map(device, fd, (uint64_t)1 << 62, &memory, &err), KLD_NO_MEMORY);
    ck_assert_ptr_nonnull(strstr(err.text, "cannot map 4611686018427387904 bytes"));
    ck_assert_int_eq(cuda->memory_map(device, unwritable, BYTES, &memory, &err), KLD_INVALID);
    ck_assert_int_eq(cuda->memory_map(device, fd, UINT64_MAX, &memory, &err), KLD_INVALID);
    ck_assert_int_eq(cuda->memory_map(device, fd, 0, &memory, &err), KLD_INVALID);
    ck_assert_ptr_null(memory);
    ck_assert_int_eq(cuda->memory_map(device, fd, BYTES, &memory, &err), KLD_OK);
    ck_assert(memory->pinned);
    prepare(&records[0], memory, false);
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert_int_eq(records[0].job.status, KLD_OK);
    cuda->memory_free(memory);
    close(unwritable);
    close(fd);
    teardown();
}
END_TEST

/* Other memory at its addresses would be taken for what is still pinned there. */
START_TEST(what_cannot_be_unpinned_stays_and_ends_the_device) {
    setup();
    struct kld_memory *memory = NULL;
    int fd = memfd_create("test", 0);
    ck_assert_int_eq(ftruncate(fd, BYTES), 0);
    ck_assert_int_eq(cuda->memory_map(device, fd, BYTES, &memory, &err), KLD_OK);
    void *at = memory->host;
    atomic_store(&fake_no_unpinning, true);
    cuda->memory_free(memory);
    atomic_store(&fake_no_unpinning, false);
    ck_assert_int_eq(msync(at, BYTES, MS_ASYNC), 0); /* ENOMEM where nothing is mapped */
    prepare(&records[0], far, false);
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert_int_eq(records[0].job.status, KLD_DEVICE_LOST);
    munmap(at, BYTES);
    close(fd);
    atomic_store(&((struct cuda_device *)device)->lost,
                 false); /* what else there is goes as ever */
    atomic_fetch_sub(&fake_pinned, 1);
    teardown();
}
END_TEST

UNIT_MAIN("kernels/cuda/memory", what_cannot_be_mapped,
          what_cannot_be_unpinned_stays_and_ends_the_device)

#else

#include "tests/unit/kernels/cuda/without.h"

UNIT_MAIN("kernels/cuda/memory", built_without_cuda)

#endif
