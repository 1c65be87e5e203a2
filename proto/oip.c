/* oip.c - an infer request in Open Inference JSON, read into struct kld_oip_request.
 * Decides what each key means; the strictness about JSON itself is in oip_json.c, the numbers of
 * tensors in oip_data.c, replies in oip_reply.c. No I/O. Runs in the gateway: on its loop for small
 * texts, on its thread pool for large ones. */
#include "proto/oip.h"

#include <inttypes.h>
#include <string.h>

#include "proto/oip_json.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static const char *text_of(const cJSON *object, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsString(item) ? item->valuestring : NULL;
}

/* NULL also where it is null: some clients write every field of theirs. */
static const cJSON *field_of(const cJSON *object, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsNull(item) ? NULL : item;
}

/* Where the bytes of a tensor are, as its `parameters` say. */
struct place {
    bool binary_given, binary; /* outputs: binary_data */
    bool has_size;             /* inputs: binary_data_size */
    uint64_t size_bytes;
    bool has_region, has_region_size;
    char region[KLD_OIP_NAME_MAX];
    uint64_t region_offset_bytes, region_size_bytes;
    bool has_stored; /* inputs: a tensor that the server keeps */
    char stored[KLD_OIP_NAME_MAX];
    uint32_t dtype; /* outputs: asked for; 0: the output's own */
};

static enum kld_status read_place(const cJSON *parameters, bool output, const char *name,
                                  struct place *place, struct kld_error *err) {
    static const char *const input_keys[] = {"binary_data_size",     "shared_memory_region",
                                             "shared_memory_offset", "shared_memory_byte_size",
                                             "stored_tensor",        NULL};
    static const char *const output_keys[] = {"binary_data",
                                              "shared_memory_region",
                                              "shared_memory_offset",
                                              "shared_memory_byte_size",
                                              "datatype",
                                              NULL};
    memset(place, 0, sizeof *place);
    if (!parameters)
        return KLD_OK;
    if (!cJSON_IsObject(parameters))
        return kld_error_set(err, KLD_INVALID, "%s: parameters must be an object", name);
    enum kld_status status =
        kld_json_keys(parameters, name, output ? output_keys : input_keys, err);
    const cJSON *item;
    cJSON_ArrayForEach(item, parameters) {
        if (status)
            return status;
        const char *key = item->string;
        if (strcmp(key, "binary_data") == 0) {
            if (!cJSON_IsBool(item))
                return kld_error_set(err, KLD_INVALID, "%s: binary_data must be true or false",
                                     name);
            place->binary_given = true;
            place->binary = cJSON_IsTrue(item);
        } else if (strcmp(key, "shared_memory_region") == 0 || strcmp(key, "stored_tensor") == 0) {
            bool stored = key[1] == 't';
            char *to = stored ? place->stored : place->region;
            if (!cJSON_IsString(item) || !*item->valuestring ||
                strlen(item->valuestring) >= KLD_OIP_NAME_MAX)
                return kld_error_set(err, KLD_INVALID, "%s: %s must be a name of 1 to %d bytes",
                                     name, key, KLD_OIP_NAME_MAX - 1);
            *(stored ? &place->has_stored : &place->has_region) = true;
            strcpy(to, item->valuestring);
        } else if (strcmp(key, "datatype") == 0) {
            enum kld_dtype dtype;
            if (!cJSON_IsString(item) || !kld_dtype_from_name(item->valuestring, &dtype))
                return kld_error_set(err, KLD_INVALID, "%s: unknown datatype; known: %s", name,
                                     kld_dtype_list());
            place->dtype = dtype;
        } else if (strcmp(key, "binary_data_size") == 0) {
            place->has_size = true;
            status = kld_json_whole(item, "binary_data_size", &place->size_bytes, err);
        } else if (strcmp(key, "shared_memory_offset") == 0) {
            status = kld_json_whole(item, key, &place->region_offset_bytes, err);
        } else {
            place->has_region_size = true;
            status = kld_json_whole(item, key, &place->region_size_bytes, err);
        }
    }
    if (status)
        return status;
    if (place->has_region != place->has_region_size ||
        (place->region_offset_bytes && !place->has_region))
        return kld_error_set(err, KLD_INVALID,
                             "%s: shared_memory_region and shared_memory_byte_size go together",
                             name);
    return KLD_OK;
}

static enum kld_status set_region(struct kld_oip_tensor *tensor, const struct place *place,
                                  bool output, struct kld_error *err) {
    const char *name = kld_slot_name(tensor->slot);
    uint64_t end;
    if (output ? place->region_size_bytes < tensor->bytes
               : place->region_size_bytes != tensor->bytes)
        return kld_error_set(err, KLD_INVALID,
                             "%s: shared_memory_byte_size is %" PRIu64 "; the tensor has %" PRIu64
                             " bytes",
                             name, place->region_size_bytes, tensor->bytes);
    if (__builtin_add_overflow(place->region_offset_bytes, tensor->bytes, &end))
        return kld_error_set(err, KLD_INVALID, "%s: shared_memory_offset overflows", name);
    if (place->region_offset_bytes % kld_dtype_bytes(tensor->dtype))
        return kld_error_set(err, KLD_INVALID,
                             "%s: shared_memory_offset %" PRIu64
                             " is not a multiple of its %" PRIu32 "-byte element",
                             name, place->region_offset_bytes, kld_dtype_bytes(tensor->dtype));
    tensor->where = KLD_OIP_REGION;
    strcpy(tensor->region, place->region);
    tensor->region_offset_bytes = place->region_offset_bytes;
    return KLD_OK;
}

static enum kld_status read_shape(const cJSON *input, struct kld_oip_tensor *tensor,
                                  struct kld_error *err) {
    const char *name = kld_slot_name(tensor->slot);
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(input, "shape"), *item;
    if (!cJSON_IsArray(shape))
        return kld_error_set(err, KLD_INVALID, "%s: shape must be an array of whole numbers", name);
    tensor->elements = 1;
    cJSON_ArrayForEach(item, shape) {
        uint64_t size;
        if (tensor->rank == KLD_RANK_MAX)
            return kld_error_set(err, KLD_INVALID, "%s: rank must be 1 to %d", name, KLD_RANK_MAX);
        if (kld_json_whole(item, "", &size, err))
            return kld_error_set(err, KLD_INVALID,
                                 "%s: dimension %" PRIu32
                                 " of the shape must be a whole number from 1 to 2^40",
                                 name, tensor->rank);
        if (size == 0)
            return kld_error_set(err, KLD_INVALID, "%s: dimension %" PRIu32 " of the shape is 0",
                                 name, tensor->rank);
        if (__builtin_mul_overflow(tensor->elements, size, &tensor->elements) ||
            tensor->elements > KLD_ELEMENTS_MAX)
            return kld_error_set(err, KLD_TOO_LARGE,
                                 "%s: the shape has more than 2^40 elements, the most allowed",
                                 name);
        tensor->shape[tensor->rank++] = size;
    }
    if (tensor->rank == 0)
        return kld_error_set(err, KLD_INVALID, "%s: rank must be 1 to %d, not 0", name,
                             KLD_RANK_MAX);
    return KLD_OK;
}

/* Exactly one of data, binary_data_size, shared_memory_region and stored_tensor says where the
 * bytes are. */
static enum kld_status read_source(const cJSON *input, const struct kld_json_span *span,
                                   struct kld_oip_request *request, struct kld_oip_tensor *tensor,
                                   struct kld_error *err) {
    const char *name = kld_slot_name(tensor->slot);
    const cJSON *data = field_of(input, "data");
    struct place place;
    enum kld_status status = read_place(field_of(input, "parameters"), false, name, &place, err);
    if (status)
        return status;
    if ((data != NULL) + place.has_size + place.has_region + place.has_stored != 1)
        return kld_error_set(err, KLD_INVALID,
                             "%s must have exactly one of data, parameters.binary_data_size, "
                             "parameters.shared_memory_region and parameters.stored_tensor",
                             name);
    if (place.has_stored) {
        tensor->where = KLD_OIP_STORED;
        strcpy(tensor->region, place.stored);
        return KLD_OK;
    }
    if (place.has_region)
        return set_region(tensor, &place, false, err);
    if (data) {
        if (!span || !span->begin || !cJSON_IsArray(data) || data->child)
            return kld_error_set(err, KLD_INVALID, "%s: data must be an array of numbers", name);
        if (tensor->dtype == KLD_DTYPE_FP16 || tensor->dtype == KLD_DTYPE_BF16)
            return kld_error_set(err, KLD_INVALID, "%s: %s cannot be sent as JSON; send it binary",
                                 name, kld_dtype_name(tensor->dtype));
        tensor->where = KLD_OIP_JSON;
        tensor->data = span->begin;
        tensor->data_end = span->end;
        return KLD_OK;
    }
    if (place.size_bytes != tensor->bytes)
        return kld_error_set(err, KLD_INVALID,
                             "%s: binary_data_size is %" PRIu64
                             "; its shape and datatype need %" PRIu64 " bytes",
                             name, place.size_bytes, tensor->bytes);
    tensor->where = KLD_OIP_BINARY;
    tensor->tail_offset_bytes = request->tail_bytes;
    request->tail_bytes += tensor->bytes; /* at most 5 * 2^43 */
    return KLD_OK;
}

static enum kld_status read_input(const cJSON *input, const struct kld_json_span *span,
                                  struct kld_oip_request *request, struct kld_error *err) {
    static const char *const keys[] = {"name", "shape", "datatype", "parameters", "data", NULL};
    const char *name = text_of(input, "name"), *datatype = text_of(input, "datatype");
    enum kld_slot slot;
    enum kld_dtype dtype;
    enum kld_status status;
    if (!name)
        return kld_error_set(err, KLD_INVALID, "an input has no name");
    if (!kld_slot_from_name(name, &slot) || kld_slot_is_output(slot))
        return kld_error_set(err, KLD_INVALID,
                             "unknown input '%.40s'; known: predictions, targets, row_weights, "
                             "row_mask, grad_output",
                             name);
    if (request->op.tensor[slot].dtype)
        return kld_error_set(err, KLD_INVALID, "input '%s' is there twice", name);
    if ((status = kld_json_keys(input, name, keys, err)))
        return status;
    if (!datatype || !kld_dtype_from_name(datatype, &dtype))
        return kld_error_set(err, KLD_INVALID,
                             "%s: unknown datatype '%.20s'; known: %s, UINT8, "
                             "BOOL",
                             name, datatype ? datatype : "", kld_dtype_list());
    struct kld_oip_tensor *tensor = &request->input[request->input_count++];
    memset(tensor, 0, sizeof *tensor);
    tensor->slot = slot;
    tensor->dtype = dtype;
    request->op.tensor[slot].dtype = dtype;
    if ((status = read_shape(input, tensor, err)))
        return status;
    tensor->bytes = tensor->elements * kld_dtype_bytes(dtype);
    return read_source(input, span, request, tensor, err);
}

static enum kld_status read_inputs(const cJSON *root, const struct kld_json_span *spans,
                                   struct kld_oip_request *request, struct kld_error *err) {
    const cJSON *inputs = cJSON_GetObjectItemCaseSensitive(root, "inputs"), *input;
    enum kld_status status;
    size_t index = 0;
    if (!cJSON_IsArray(inputs))
        return kld_error_set(err, KLD_INVALID, "'inputs' must be an array of tensors");
    cJSON_ArrayForEach(input, inputs) {
        if (!cJSON_IsObject(input))
            return kld_error_set(err, KLD_INVALID, "an input must be an object");
        const struct kld_json_span *span = index < KLD_JSON_ARRAYS_MAX ? &spans[index] : NULL;
        if ((status = read_input(input, span, request, err)))
            return status;
        index++;
    }
    return KLD_OK;
}

static bool same_shape(const struct kld_oip_tensor *tensor, const uint64_t *shape, uint32_t rank) {
    return tensor->rank == rank && memcmp(tensor->shape, shape, rank * sizeof *shape) == 0;
}

static enum kld_status wrong_shape(const struct kld_oip_tensor *tensor, const char *expected,
                                   const uint64_t *shape, uint32_t rank, struct kld_error *err) {
    char is[96], wanted[96];
    struct kld_oip_text a = {.data = is, .capacity = sizeof is - 1};
    struct kld_oip_text b = {.data = wanted, .capacity = sizeof wanted - 1};
    kld_oip_append_shape(&a, tensor->shape, tensor->rank);
    kld_oip_append_shape(&b, shape, rank);
    return kld_error_set(err, KLD_INVALID, "%s has shape %.*s; expected %s %.*s",
                         kld_slot_name(tensor->slot), (int)a.length, is, expected, (int)b.length,
                         wanted);
}

/* predictions give the shape; every other input must fit it. */
static enum kld_status check_shapes(struct kld_oip_request *request, struct kld_error *err) {
    struct kld_op *op = &request->op;
    for (uint32_t i = 0; i < request->input_count; i++) {
        const struct kld_oip_tensor *input = &request->input[i];
        if (input->slot != KLD_SLOT_PREDICTIONS)
            continue;
        op->rank = input->rank;
        memcpy(op->shape, input->shape, sizeof op->shape);
    }
    if (op->rank == 0 || !op->tensor[KLD_SLOT_TARGETS].dtype)
        return kld_error_set(err, KLD_INVALID, "input '%s' is missing",
                             op->rank == 0 ? "predictions" : "targets");
    uint64_t rows = 1;
    for (uint32_t i = 0; i + 1 < op->rank; i++)
        rows *= op->shape[i];
    bool scalar = op->reduction != KLD_REDUCTION_NONE && op->reduction != KLD_REDUCTION_ROW;
    for (uint32_t i = 0; i < request->input_count; i++) {
        const struct kld_oip_tensor *input = &request->input[i];
        const uint64_t one = 1;
        bool wide = input->slot == KLD_SLOT_PREDICTIONS || input->slot == KLD_SLOT_TARGETS ||
                    (input->slot == KLD_SLOT_GRAD_OUTPUT && op->reduction == KLD_REDUCTION_NONE);
        if (wide) {
            if (!same_shape(input, op->shape, op->rank))
                return wrong_shape(input, "the shape of predictions,", op->shape, op->rank, err);
        } else if (input->slot == KLD_SLOT_GRAD_OUTPUT && scalar) {
            if (!same_shape(input, &one, 1))
                return wrong_shape(input, "that of the loss,", &one, 1, err);
        } else if (!same_shape(input, &rows, 1) && !same_shape(input, op->shape, op->rank - 1)) {
            return wrong_shape(input, "one value a row,", &rows, 1, err);
        }
    }
    return KLD_OK;
}

static enum kld_status read_parameters(const cJSON *root, struct kld_oip_request *request,
                                       bool *ret_binary, struct kld_error *err) {
    const cJSON *parameters = field_of(root, "parameters"), *item;
    if (!parameters)
        return KLD_OK;
    if (!cJSON_IsObject(parameters))
        return kld_error_set(err, KLD_INVALID, "'parameters' must be an object");
    cJSON_ArrayForEach(item, parameters) {
        const char *name = item->string;
        uint64_t whole;
        enum kld_status status = KLD_OK;
        if (strcmp(name, "binary_data_output") == 0) {
            if (!cJSON_IsBool(item))
                return kld_error_set(err, KLD_INVALID, "binary_data_output must be true or false");
            *ret_binary = cJSON_IsTrue(item);
        } else if (strcmp(name, "timeout") == 0) {
            status = kld_json_whole(item, "timeout (microseconds)", &whole, err);
            if (!status)
                request->timeout_ns = whole > UINT64_MAX / 1000 ? UINT64_MAX : whole * 1000;
        } else if (strcmp(name, "device") == 0) {
            status = kld_json_whole(item, "device", &request->device, err);
            request->has_device = true;
        } else if (strcmp(name, "priority") == 0) {
            status = kld_json_whole(item, "priority", &whole, err);
        } else if (!kld_op_parameter_kind(name)) {
            return kld_error_set(err, KLD_INVALID,
                                 "unknown parameter '%.40s'; known: %s, binary_data_output, "
                                 "device, timeout, priority",
                                 name, kld_op_parameter_list());
        } else if (cJSON_IsString(item)) {
            status = kld_op_set_text(&request->op, name, item->valuestring, err);
        } else if (cJSON_IsNumber(item)) {
            status = kld_op_set_number(&request->op, name, item->valuedouble, err);
        } else {
            return kld_error_set(err, KLD_INVALID, "parameter '%s' must be a %s", name,
                                 kld_op_parameter_kind(name) == 1 ? "text" : "number");
        }
        if (status)
            return status;
    }
    return KLD_OK;
}

/* dtype: asked for, or 0. */
static void shape_output(const struct kld_oip_request *request, struct kld_oip_tensor *output,
                         uint32_t dtype) {
    const struct kld_op *op = &request->op;
    bool wide = output->slot == KLD_SLOT_GRAD_PREDICTIONS ||
                output->slot == KLD_SLOT_GRAD_TARGETS ||
                (output->slot == KLD_SLOT_LOSS && op->reduction == KLD_REDUCTION_NONE);
    bool tall = wide || output->slot == KLD_SLOT_ROW_LOSS ||
                (output->slot == KLD_SLOT_LOSS && op->reduction == KLD_REDUCTION_ROW);
    output->rank = wide ? op->rank : tall ? op->rank - 1 : 0;
    output->elements = 1;
    for (uint32_t i = 0; i < output->rank; i++) {
        output->shape[i] = op->shape[i];
        output->elements *= op->shape[i];
    }
    if (output->rank == 0) {
        output->rank = 1;
        output->shape[0] = 1;
    }
    uint32_t predictions = op->tensor[KLD_SLOT_PREDICTIONS].dtype;
    uint32_t targets = op->tensor[KLD_SLOT_TARGETS].dtype;
    if (output->slot == KLD_SLOT_GRAD_PREDICTIONS)
        output->dtype = predictions;
    else if (output->slot == KLD_SLOT_GRAD_TARGETS)
        output->dtype = targets;
    else
        output->dtype = predictions == KLD_DTYPE_FP64 || targets == KLD_DTYPE_FP64 ? KLD_DTYPE_FP64
                                                                                   : KLD_DTYPE_FP32;
    output->dtype = dtype ? dtype : output->dtype; /* kld_op_check() knows which fit */
    output->bytes = output->elements * kld_dtype_bytes(output->dtype);
}

/* item: NULL for the loss that goes out when no output is named. */
static enum kld_status read_output(const cJSON *item, bool binary, struct kld_oip_request *request,
                                   struct kld_error *err) {
    static const char *const keys[] = {"name", "parameters", NULL};
    const char *name = item ? text_of(item, "name") : "loss";
    struct place place;
    enum kld_slot slot;
    enum kld_status status;
    if (!name)
        return kld_error_set(err, KLD_INVALID, "an output has no name");
    if (!kld_slot_from_name(name, &slot) || !kld_slot_is_output(slot))
        return kld_error_set(err, KLD_INVALID,
                             "unknown output '%.40s'; known: loss, row_loss, grad_predictions, "
                             "grad_targets",
                             name);
    if (request->op.tensor[slot].dtype)
        return kld_error_set(err, KLD_INVALID, "output '%s' is there twice", name);
    if (item && (status = kld_json_keys(item, name, keys, err)))
        return status;
    if ((status = read_place(field_of(item, "parameters"), true, name, &place, err)))
        return status;
    struct kld_oip_tensor *output = &request->output[request->output_count++];
    memset(output, 0, sizeof *output);
    output->slot = slot;
    shape_output(request, output, place.dtype);
    request->op.tensor[slot].dtype = output->dtype;
    if (place.has_region) {
        if (place.binary)
            return kld_error_set(err, KLD_INVALID, "%s cannot go to binary_data and to a region",
                                 name);
        return set_region(output, &place, true, err);
    }
    output->where = (place.binary_given ? place.binary : binary) ? KLD_OIP_BINARY : KLD_OIP_JSON;
    return KLD_OK;
}

static enum kld_status read_outputs(const cJSON *root, bool binary, struct kld_oip_request *request,
                                    struct kld_error *err) {
    const cJSON *outputs = field_of(root, "outputs"), *output;
    enum kld_status status;
    if (outputs && !cJSON_IsArray(outputs))
        return kld_error_set(err, KLD_INVALID, "'outputs' must be an array");
    if (!outputs || !outputs->child)
        return read_output(NULL, binary, request, err);
    cJSON_ArrayForEach(output, outputs) {
        if (!cJSON_IsObject(output))
            return kld_error_set(err, KLD_INVALID, "an output must be an object");
        if ((status = read_output(output, binary, request, err)))
            return status;
    }
    return KLD_OK;
}

/* Gives each tensor a place that stands for its real one, so that kld_op_check() sees which tensors
 * of a caller's regions overlap: the same name is the same region. */
static enum kld_status check_op(struct kld_oip_request *request, struct kld_error *err) {
    const struct kld_oip_tensor *list[KLD_OIP_INPUTS_MAX + KLD_OIP_OUTPUTS_MAX];
    size_t count = 0;
    for (uint32_t i = 0; i < request->input_count; i++)
        list[count++] = &request->input[i];
    for (uint32_t i = 0; i < request->output_count; i++)
        list[count++] = &request->output[i];
    for (size_t i = 0; i < count; i++) {
        struct kld_tensor *tensor = &request->op.tensor[list[i]->slot];
        size_t region = i;
        for (size_t j = 0; j < i && list[i]->where == KLD_OIP_REGION; j++)
            if (list[j]->where == KLD_OIP_REGION && strcmp(list[j]->region, list[i]->region) == 0) {
                region = j;
                break;
            }
        tensor->region = region + 1;
        tensor->offset_bytes = list[i]->region_offset_bytes;
    }
    enum kld_status status = kld_op_check(&request->op, &request->geometry, err);
    for (size_t i = 0; i < count; i++)
        request->op.tensor[list[i]->slot].region = request->op.tensor[list[i]->slot].offset_bytes =
            0;
    return status;
}

/* Behind check_op(): of a dtype that an output cannot have JSON is not what is wrong. */
static enum kld_status check_forms(const struct kld_oip_request *request, struct kld_error *err) {
    for (uint32_t i = 0; i < request->output_count; i++) {
        const struct kld_oip_tensor *output = &request->output[i];
        if (output->where == KLD_OIP_JSON &&
            (output->dtype == KLD_DTYPE_FP16 || output->dtype == KLD_DTYPE_BF16))
            return kld_error_set(err, KLD_INVALID,
                                 "%s is %s, which JSON cannot hold; ask for it with binary_data",
                                 kld_slot_name(output->slot), kld_dtype_name(output->dtype));
    }
    return KLD_OK;
}

/* The path has named the model; a body that names another one was meant for somebody else. One that
 * names none may say so. */
static enum kld_status check_model(const cJSON *root, const char *key, const char *ours,
                                   struct kld_error *err) {
    const cJSON *value = field_of(root, key);
    if (!value ||
        (cJSON_IsString(value) && (!*value->valuestring || strcmp(value->valuestring, ours) == 0)))
        return KLD_OK;
    return kld_error_set(err, KLD_INVALID, "'%s' is not \"%s\", the one served here", key, ours);
}

enum kld_status kld_oip_read(const cJSON *root, const struct kld_json_span *spans,
                             struct kld_oip_request *request, struct kld_error *err) {
    static const char *const keys[] = {"id",         "parameters",    "inputs", "outputs",
                                       "model_name", "model_version", NULL};
    bool binary = false;
    enum kld_status status;
    if (!cJSON_IsObject(root))
        return kld_error_set(err, KLD_INVALID, "the request must be a JSON object");
    if ((status = kld_json_keys(root, "request", keys, err)))
        return status;
    if ((status = check_model(root, "model_name", KLD_OIP_MODEL, err)) ||
        (status = check_model(root, "model_version", KLD_OIP_MODEL_VERSION, err)))
        return status;
    const cJSON *id = field_of(root, "id");
    if (id) {
        if (!cJSON_IsString(id) || strlen(id->valuestring) >= sizeof request->id)
            return kld_error_set(err, KLD_INVALID, "'id' must be a text of at most %d bytes",
                                 KLD_OIP_ID_MAX - 1);
        strcpy(request->id, id->valuestring);
        request->has_id = true;
    }
    if ((status = read_parameters(root, request, &binary, err)) ||
        (status = read_inputs(root, spans, request, err)) ||
        (status = check_shapes(request, err)) ||
        (status = read_outputs(root, binary, request, err)) || (status = check_op(request, err)))
        return status;
    return check_forms(request, err);
}
