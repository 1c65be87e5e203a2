/* upload_query.c - reads the numbers and names of a query (upload_query.h). Knows no HTTP. Any
 * thread. */
#include "server/gateway/upload_query.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>

static bool read_whole(const char *text, uint64_t most, uint64_t *ret_value) {
    char *end;
    errno = 0;
    if (*text < '0' || *text > '9')
        return false;
    *ret_value = strtoull(text, &end, 10);
    return !errno && !*end && *ret_value <= most;
}

static enum kld_status read_shape(const char *text, struct kld_upload_tensor *tensor,
                                  struct kld_error *err) {
    uint64_t elements = 1;
    for (const char *at = text ? text : "";; at++) {
        char *end;
        errno = 0;
        unsigned long long size = *at >= '0' && *at <= '9' ? strtoull(at, &end, 10) : 0;
        if (!size || errno || (*end && *end != ',') || tensor->rank == KLD_RANK_MAX)
            return kld_error_set(err, KLD_INVALID,
                                 "shape must be 1 to %d whole numbers greater than 0, by comma",
                                 KLD_RANK_MAX);
        tensor->shape[tensor->rank++] = size;
        if (__builtin_mul_overflow(elements, size, &elements) || elements > KLD_ELEMENTS_MAX)
            return kld_error_set(err, KLD_TOO_LARGE,
                                 "the shape has more than 2^40 elements, the most allowed");
        at = end;
        if (!*at)
            break;
    }
    tensor->bytes = elements * kld_dtype_bytes(tensor->dtype);
    return KLD_OK;
}

enum kld_status kld_upload_query_read(const struct kld_upload_query *query,
                                      uint64_t lifetime_ms_max, uint32_t devices,
                                      struct kld_upload_tensor *ret_tensor, struct kld_error *err) {
    struct kld_upload_tensor tensor = {.lifetime_ms = lifetime_ms_max, .device = UINT32_MAX};
    uint64_t value;
    enum kld_dtype dtype;
    if (!query->datatype || !kld_dtype_from_name(query->datatype, &dtype))
        return kld_error_set(err, KLD_INVALID, "unknown datatype '%.20s'; known: %s, UINT8, BOOL",
                             query->datatype ? query->datatype : "", kld_dtype_list());
    tensor.dtype = dtype;
    if (query->lifetime_ms &&
        (!read_whole(query->lifetime_ms, lifetime_ms_max, &tensor.lifetime_ms) ||
         !tensor.lifetime_ms))
        return kld_error_set(err, KLD_INVALID,
                             "lifetime_ms must be a whole number from 1 to %" PRIu64
                             " (tensor_lifetime_ms)",
                             lifetime_ms_max);
    if (query->device) {
        if (!read_whole(query->device, UINT32_MAX, &value) || value >= devices)
            return kld_error_set(err, KLD_INVALID,
                                 "device '%.20s' is none of the %u of this server", query->device,
                                 devices);
        tensor.device = (uint32_t)value;
    }
    enum kld_status status = read_shape(query->shape, &tensor, err);
    if (status == KLD_OK)
        *ret_tensor = tensor;
    return status;
}
