/* npy.c - libFuzzer over the headers of tensor files: .npy and .safetensors. Whatever is accepted
 * must lie inside the file and have the size of its shape; a promise broken is a crash here.
 *
 * Input: 1 byte that chooses the format, the file. */
#include <stdlib.h>
#include <string.h>

#include "client/cli/safetensors.h"
#include "tests/fuzz/common/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct kld_array array;
    struct kld_error err = {0};
    if (bytes == 0)
        return 0;
    uint64_t size = bytes - 1;
    enum kld_status status = data[0] & 1 ? kld_safetensors_parse(data + 1, size, NULL, &array, &err)
                                         : kld_npy_parse(data + 1, size, &array, &err);
    if (status) {
        require(err.status == status && err.text[0] && memchr(err.text, 0, sizeof err.text));
        return 0;
    }
    uint64_t elements = 1;
    require(array.rank <= KLD_RANK_MAX);
    for (uint32_t i = 0; i < array.rank; i++) {
        require(array.shape[i] > 0 && array.shape[i] <= KLD_ELEMENTS_MAX);
        elements *= array.shape[i];
    }
    require(array.bytes == elements * kld_dtype_bytes(array.dtype));
    require(array.offset_bytes <= size && array.bytes <= size - array.offset_bytes);
    char header[KLD_SAFETENSORS_HEADER_BYTES];
    require(kld_safetensors_header(&array, "x", header) <= sizeof header);
    require(kld_npy_header(&array, header) <= KLD_NPY_HEADER_BYTES);
    return 0;
}
