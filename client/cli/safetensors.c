/* safetensors.c - headers of .safetensors files: strict where it matters for memory (offsets and
 * sizes), blind to metadata. */
#include "client/cli/safetensors.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define HEADER_BYTES_MAX (100u << 20) /* as the format's own reader has it */
#define WHOLE_MAX 9007199254740992.0  /* 2^53: beyond it a double is not the number in the file */

static const struct {
    const char *name;
    enum kld_dtype dtype;
} dtypes[] = {
    {"F32", KLD_DTYPE_FP32},  {"F64", KLD_DTYPE_FP64}, {"F16", KLD_DTYPE_FP16},
    {"BF16", KLD_DTYPE_BF16}, {"U8", KLD_DTYPE_UINT8}, {"BOOL", KLD_DTYPE_BOOL},
};

static bool whole(const cJSON *item, uint64_t *ret_number) {
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0) || item->valuedouble > WHOLE_MAX ||
        item->valuedouble != (double)(uint64_t)item->valuedouble)
        return false;
    *ret_number = (uint64_t)item->valuedouble;
    return true;
}

static enum kld_status read_shape(const cJSON *tensor, struct kld_array *array,
                                  struct kld_error *err) {
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(tensor, "shape"), *item;
    if (!cJSON_IsArray(shape))
        return kld_error_set(err, KLD_INVALID, "safetensors: the tensor has no shape");
    cJSON_ArrayForEach(item, shape) {
        if (array->rank == KLD_RANK_MAX)
            return kld_error_set(err, KLD_INVALID, "safetensors: more than %d dimensions",
                                 KLD_RANK_MAX);
        if (!whole(item, &array->shape[array->rank++]))
            return kld_error_set(err, KLD_INVALID,
                                 "safetensors: a dimension is not a whole number");
    }
    return KLD_OK;
}

static enum kld_status read_tensor(const cJSON *tensor, uint64_t values_at, uint64_t file_bytes,
                                   struct kld_array *array, struct kld_error *err) {
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(tensor, "dtype");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(tensor, "data_offsets");
    for (size_t i = 0; cJSON_IsString(dtype) && i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (strcmp(dtype->valuestring, dtypes[i].name) == 0)
            array->dtype = dtypes[i].dtype;
    if (!array->dtype)
        return kld_error_set(err, KLD_INVALID,
                             "safetensors: dtype '%.10s' is not supported; expected F64, F32, F16, "
                             "BF16, U8 or BOOL",
                             cJSON_IsString(dtype) ? dtype->valuestring : "");
    enum kld_status status = read_shape(tensor, array, err);
    if (!status)
        status = kld_array_size(array, err);
    if (status)
        return status;
    uint64_t begin, end;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        !whole(offsets->child, &begin) || !whole(offsets->child->next, &end) || begin > end ||
        end - begin != array->bytes)
        return kld_error_set(err, KLD_INVALID,
                             "safetensors: data_offsets do not fit the shape, which needs %" PRIu64
                             " bytes",
                             array->bytes);
    if (end > file_bytes - values_at)
        return kld_error_set(err, KLD_INVALID,
                             "safetensors: the file is cut short: the tensor ends %" PRIu64
                             " bytes beyond it",
                             end - (file_bytes - values_at));
    array->offset_bytes = values_at + begin;
    return KLD_OK;
}

static bool is_metadata(const cJSON *item) { return strcmp(item->string, "__metadata__") == 0; }

static enum kld_status find(const cJSON *root, const char *name, const cJSON **ret_tensor,
                            struct kld_error *err) {
    const cJSON *item, *found = NULL;
    char names[160] = "";
    size_t count = 0, used = 0;
    cJSON_ArrayForEach(item, root) {
        if (is_metadata(item))
            continue;
        count++;
        bool wanted = !name || strcmp(item->string, name) == 0;
        if (wanted && name && found)
            return kld_error_set(err, KLD_INVALID, "safetensors: two tensors of that name");
        if (wanted)
            found = item;
        int length =
            snprintf(names + used, sizeof names - used, "%s%.40s", used ? ", " : "", item->string);
        used += length > 0 && (size_t)length < sizeof names - used ? (size_t)length : 0;
        names[used] = '\0';
    }
    if (!found || (!name && count != 1))
        return kld_error_set(err, KLD_INVALID,
                             "safetensors: %s name one of its %zu tensors as "
                             "FILE.safetensors:NAME: %s",
                             name ? "no tensor of that name;" : "which tensor?", count, names);
    *ret_tensor = found;
    return KLD_OK;
}

enum kld_status kld_safetensors_parse(const void *data, uint64_t bytes, const char *name,
                                      struct kld_array *ret_array, struct kld_error *err) {
    uint64_t length = 0;
    if (bytes < 8)
        return kld_error_set(err, KLD_INVALID, "not a .safetensors file: %" PRIu64 " bytes", bytes);
    memcpy(&length, data, 8); /* little-endian, as is every machine that this is built for */
    if (length > HEADER_BYTES_MAX || length > bytes - 8)
        return kld_error_set(err, KLD_INVALID,
                             "safetensors: a header of %" PRIu64 " bytes in a file of %" PRIu64,
                             length, bytes);
    cJSON *root = cJSON_ParseWithLength((const char *)data + 8, length);
    if (!cJSON_IsObject(root)) {
        cJSON_Delete(root);
        return kld_error_set(err, KLD_INVALID, "safetensors: the header is not a JSON object");
    }
    struct kld_array array;
    memset(&array, 0, sizeof array);
    const cJSON *tensor = NULL;
    enum kld_status status = find(root, name, &tensor, err);
    if (!status)
        status = read_tensor(tensor, 8 + length, bytes, &array, err);
    cJSON_Delete(root);
    if (!status)
        *ret_array = array;
    return status;
}

size_t kld_safetensors_header(const struct kld_array *array, const char *name,
                              char ret_header[KLD_SAFETENSORS_HEADER_BYTES]) {
    const char *dtype = "";
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (dtypes[i].dtype == array->dtype)
            dtype = dtypes[i].name;
    char *json = ret_header + 8;
    size_t room = KLD_SAFETENSORS_HEADER_BYTES - 8;
    int used = snprintf(json, room, "{\"%s\":{\"dtype\":\"%s\",\"shape\":[", name, dtype);
    for (uint32_t i = 0; i < array->rank; i++)
        used +=
            snprintf(json + used, room - (size_t)used, "%s%" PRIu64, i ? "," : "", array->shape[i]);
    used += snprintf(json + used, room - (size_t)used, "],\"data_offsets\":[0,%" PRIu64 "]}}",
                     array->bytes);
    uint64_t length = ((uint64_t)used + 7) / 8 * 8;
    memset(json + used, ' ', length - (uint64_t)used);
    memcpy(ret_header, &length, 8);
    return 8 + length;
}
