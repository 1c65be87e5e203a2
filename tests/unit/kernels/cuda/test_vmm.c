/* test_vmm.c - addresses that get their memory piece by piece: what is mapped where, what is
 * refused, and that all of it goes; over the double of the runtime. Single allocations are in
 * test_thread.c. A build without CUDA has none of it, and says so. */
#include "kernels/backend.h"

#include <string.h>

#include "tests/unit/unit.h"

#ifdef KLD_WITH_CUDA
#include "tests/unit/kernels/cuda/fixture.h"

#define ROOM (4 * FAKE_UNIT)

static struct kld_memory *space;

static void setup_space(void) {
    setup();
    ck_assert_int_eq(cuda->memory_reserve(device, ROOM, &space, &err), KLD_OK);
    ck_assert_int_eq(atomic_load(&fake_ranges), 1);
    ck_assert_int_eq(atomic_load(&fake_maps), 0);
}

static void teardown_space(void) {
    ck_assert_int_eq(cuda->memory_free(space), KLD_OK);
    teardown(); /* counts mappings and ranges */
}

static void refused(struct kld_memory *memory, int fd, uint64_t offset, uint64_t bytes,
                    const char *said) {
    int maps = atomic_load(&fake_maps);
    ck_assert_int_eq(cuda->memory_grow_fd(memory, fd, offset, bytes, &err), KLD_INVALID);
    ck_assert_msg(strstr(err.text, said) != NULL, "%s", err.text);
    ck_assert_int_eq(atomic_load(&fake_maps), maps);
    ck_assert_int_eq(atomic_load(&fake_handles), 0);
}

START_TEST(pieces_lie_side_by_side) {
    setup_space();
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)((struct cuda_memory *)space)->at;
    for (uint64_t i = 0; i < 4; i++) {
        ck_assert_int_eq(cuda->memory_grow_fd(space, 7, i * FAKE_UNIT, FAKE_UNIT, &err), KLD_OK);
        ck_assert_int_eq(atomic_load(&fake_handles), 0); /* the mapping alone holds it */
        ck_assert_uint_eq(fake_mapped[i].at, at + i * FAKE_UNIT);
    }
    ck_assert_int_eq(atomic_load(&fake_maps), 4);
    prepare(&records[0], space, true); /* its tensors are used where they are */
    submit(&records[0], 0);
    wait_for(&records[0], false);
    ck_assert_int_eq(records[0].job.status, KLD_OK);
    ck_assert_int_eq(records[0].launches, 1);
    cuda->poll(device, false);
    ck_assert_int_eq(atomic_load(&fake_ranges), 1);
    teardown_space();
}
END_TEST

START_TEST(what_is_no_piece_is_refused) {
    setup_space();
    ck_assert_int_eq(cuda->memory_grow_fd(space, 7, 0, FAKE_UNIT, &err), KLD_OK);
    refused(space, 99, FAKE_UNIT, FAKE_UNIT, "not a CUDA allocation");
    refused(space, 7, FAKE_UNIT, FAKE_UNIT + 4096, "a multiple of 2097152");
    refused(space, 7, FAKE_UNIT, 0, "a multiple of 2097152");
    refused(space, 7, FAKE_UNIT, 2 * FAKE_UNIT, "does not have 4194304 bytes");
    refused(space, 7, 0, FAKE_UNIT, "does not have 2097152 bytes"); /* something is there */
    refused(space, 7, ROOM, FAKE_UNIT, "do not fit addresses of 8388608 bytes");
    refused(space, 7, FAKE_UNIT, ROOM, "do not fit");
    refused(space, 7, UINT64_MAX - FAKE_UNIT + 1, FAKE_UNIT, "do not fit");
    refused(pool, 7, 0, FAKE_UNIT, "do not fit");
    atomic_store(&fake_device_of_fd, 1);
    refused(space, 7, FAKE_UNIT, FAKE_UNIT, "another device");
    atomic_store(&fake_device_of_fd, 0);
    atomic_store(&fake_access_error, CUDA_ERROR_INVALID_DEVICE);
    refused(space, 7, FAKE_UNIT, FAKE_UNIT, "does not have");
    atomic_store(&fake_access_error, 0);
    ck_assert_int_eq(cuda->memory_grow_fd(space, 7, FAKE_UNIT, FAKE_UNIT, &err), KLD_OK);
    teardown_space();
}
END_TEST

START_TEST(addresses_that_cannot_be_had_are_no_loss) {
    struct kld_memory *none;
    setup_space();
    ck_assert_int_eq(cuda->memory_reserve(device, 4096, &none, &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "a multiple of 2097152"));
    const CUresult errors[] = {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_INVALID_VALUE,
                               CUDA_ERROR_UNKNOWN};
    for (int i = 0; i < 3; i++) {
        atomic_store(&fake_reserve_error, errors[i]);
        ck_assert_int_eq(cuda->memory_reserve(device, ROOM, &none, &err), KLD_NO_MEMORY);
        ck_assert_ptr_nonnull(strstr(err.text, "no addresses are left for 8388608 bytes"));
    }
    atomic_store(&fake_reserve_error, 0);
    ck_assert_int_eq(cuda->memory_grow_fd(space, 7, 0, FAKE_UNIT, &err), KLD_OK);
    teardown_space();
}
END_TEST

UNIT_MAIN("kernels/cuda/vmm", pieces_lie_side_by_side, what_is_no_piece_is_refused,
          addresses_that_cannot_be_had_are_no_loss)

#else

#include "tests/unit/kernels/cuda/without.h"

UNIT_MAIN("kernels/cuda/vmm", built_without_cuda)

#endif
