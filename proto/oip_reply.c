/* oip_reply.c - Open Inference replies, metadata and configuration of the model, written as text.
 * Everything goes into a buffer of fixed size; no allocation, no I/O. Runs in the gateway: on its
 * loop for small replies, on its thread pool for large ones. */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/oip.h"
#include "proto/oip_number.h"
#include "proto/utf8.h"

void kld_oip_append(struct kld_oip_text *text, const char *format, ...) {
    char small[512];
    va_list arguments;
    if (text->overflow)
        return;
    va_start(arguments, format);
    int length = vsnprintf(small, sizeof small, format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= sizeof small ||
        (size_t)length > text->capacity - text->length) {
        text->overflow = true;
        return;
    }
    memcpy(text->data + text->length, small, (size_t)length);
    text->length += (size_t)length;
}

static void append_bytes(struct kld_oip_text *text, const char *bytes, size_t length) {
    if (text->overflow || length > text->capacity - text->length) {
        text->overflow = true;
        return;
    }
    memcpy(text->data + text->length, bytes, length);
    text->length += length;
}

static void append_text(struct kld_oip_text *text, const char *literal) {
    append_bytes(text, literal, strlen(literal));
}

void kld_oip_append_string(struct kld_oip_text *text, const char *string) {
    append_text(text, "\"");
    for (const char *s = string; *s;) {
        size_t length = kld_utf8_sequence(s, strnlen(s, 4));
        if (length == 0)
            append_text(text, "?");
        else if (*s == '"' || *s == '\\')
            kld_oip_append(text, "\\%c", *s);
        else if ((unsigned char)*s < 0x20)
            kld_oip_append(text, "\\u%04x", (unsigned)*s);
        else
            append_bytes(text, s, length);
        s += length ? length : 1;
    }
    append_text(text, "\"");
}

void kld_oip_append_error(struct kld_oip_text *text, const char *error) {
    append_text(text, "{\"error\":");
    kld_oip_append_string(text, error);
    append_text(text, "}");
}

void kld_oip_append_shape(struct kld_oip_text *text, const uint64_t *shape, uint32_t rank) {
    append_text(text, "[");
    for (uint32_t i = 0; i < rank; i++) {
        char digits[24], *at = digits + sizeof digits;
        for (uint64_t left = shape[i]; at == digits + sizeof digits || left; left /= 10)
            *--at = (char)('0' + left % 10);
        if (i)
            *--at = ',';
        append_bytes(text, at, (size_t)(digits + sizeof digits - at));
    }
    append_text(text, "]");
}

uint64_t kld_oip_reply_bytes_max(const struct kld_oip_request *request) {
    uint64_t bytes = 256 + 6 * strlen(request->id); /* \u00xx */
    for (uint32_t i = 0; i < request->output_count; i++) {
        const struct kld_oip_tensor *output = &request->output[i];
        bytes += 512 + KLD_RANK_MAX * 21 + 6 * strlen(output->region);
        if (output->where == KLD_OIP_JSON) /* -1.23456789e-38, and the seventeen digits of FP64 */
            bytes += output->elements * (output->dtype == KLD_DTYPE_FP64 ? 26 : 17);
    }
    return bytes;
}

static double element(const struct kld_oip_tensor *output, const void *values, uint64_t index) {
    float single;
    double number;
    if (output->dtype == KLD_DTYPE_FP64) {
        memcpy(&number, (const char *)values + index * sizeof number, sizeof number);
        return number;
    }
    memcpy(&single, (const char *)values + index * sizeof single, sizeof single);
    return single;
}

static const char *kind(double number) {
    return isnan(number) ? "nan" : number > 0 ? "inf" : "-inf";
}

/* *ret_first: kind of the first number that is not finite, or NULL; *ret_alike: all are of it. */
static void append_numbers(struct kld_oip_text *text, const struct kld_oip_tensor *output,
                           const void *values, const char **ret_first, bool *ret_alike) {
    *ret_first = NULL;
    *ret_alike = true;
    append_text(text, ",\"data\":[");
    for (uint64_t i = 0; i < output->elements && !text->overflow; i++) {
        double number = element(output, values, i);
        if (i)
            append_bytes(text, ",", 1);
        if (isfinite(number)) {
            char digits[KLD_NUMBER_TEXT_MAX];
            append_bytes(text, digits,
                         output->dtype == KLD_DTYPE_FP64
                             ? kld_number_write_double(digits, number)
                             : kld_number_write_float(digits, (float)number));
            continue;
        }
        append_bytes(text, "null", 4);
        if (!*ret_first)
            *ret_first = kind(number);
        *ret_alike = *ret_alike && *ret_first == kind(number);
    }
    append_text(text, "]");
}

static void append_json_output(struct kld_oip_text *text, const struct kld_oip_tensor *output,
                               const void *values) {
    const char *first;
    bool alike;
    append_numbers(text, output, values, &first, &alike);
    if (!first)
        return;
    append_text(text, ",\"parameters\":{\"non_finite\":");
    if (alike) {
        kld_oip_append(text, "\"%s\"}", first);
        return;
    }
    const char *before = "[";
    for (uint64_t i = 0; i < output->elements && !text->overflow; i++) {
        double number = element(output, values, i);
        if (isfinite(number))
            continue;
        kld_oip_append(text, "%s\"%s\"", before, kind(number));
        before = ",";
    }
    append_text(text, "]}");
}

void kld_oip_reply(struct kld_oip_text *text, const struct kld_oip_request *request,
                   const void *const *values) {
    append_text(text, "{");
    if (request->has_id) {
        append_text(text, "\"id\":");
        kld_oip_append_string(text, request->id);
        append_text(text, ",");
    }
    append_text(text, "\"model_name\":\"" KLD_OIP_MODEL
                      "\",\"model_version\":\"" KLD_OIP_MODEL_VERSION "\",\"outputs\":[");
    for (uint32_t i = 0; i < request->output_count; i++) {
        const struct kld_oip_tensor *output = &request->output[i];
        append_text(text, i ? ",{\"name\":\"" : "{\"name\":\"");
        append_text(text, kld_slot_name(output->slot));
        append_text(text, "\",\"datatype\":\"");
        append_text(text, kld_dtype_name(output->dtype));
        append_text(text, "\",\"shape\":");
        kld_oip_append_shape(text, output->shape, output->rank);
        if (output->where == KLD_OIP_JSON) {
            append_json_output(text, output, values[i]);
        } else if (output->where == KLD_OIP_BINARY) {
            kld_oip_append(text, ",\"parameters\":{\"binary_data_size\":%" PRIu64 "}",
                           output->bytes);
        } else {
            append_text(text, ",\"parameters\":{\"shared_memory_region\":");
            kld_oip_append_string(text, output->region);
            kld_oip_append(text,
                           ",\"shared_memory_offset\":%" PRIu64
                           ",\"shared_memory_byte_size\":%" PRIu64 "}",
                           output->region_offset_bytes, output->bytes);
        }
        append_text(text, "}");
    }
    append_text(text, "]}");
}

static void append_tensors(struct kld_oip_text *text, bool outputs, bool config) {
    const char *comma = "";
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        if (kld_slot_is_output(slot) != outputs)
            continue;
        bool matrix = slot == KLD_SLOT_PREDICTIONS || slot == KLD_SLOT_TARGETS ||
                      slot == KLD_SLOT_GRAD_PREDICTIONS || slot == KLD_SLOT_GRAD_TARGETS;
        bool optional = !outputs && slot != KLD_SLOT_PREDICTIONS && slot != KLD_SLOT_TARGETS;
        const char *dtype = slot == KLD_SLOT_ROW_MASK ? "BOOL" : "FP32";
        const char *shape = matrix ? "[-1,-1]" : "[-1]";
        kld_oip_append(text, "%s{\"name\":\"%s\",", comma, kld_slot_name(slot));
        if (config)
            kld_oip_append(text, "\"data_type\":\"TYPE_%s\",\"dims\":%s%s}", dtype, shape,
                           optional ? ",\"optional\":true" : "");
        else
            kld_oip_append(text, "\"datatype\":\"%s\",\"shape\":%s}", dtype, shape);
        comma = ",";
    }
}

void kld_oip_append_metadata(struct kld_oip_text *text) {
    kld_oip_append(text, "{\"name\":\"" KLD_OIP_MODEL "\",\"versions\":[\"" KLD_OIP_MODEL_VERSION
                         "\"],\"platform\":\"" KLD_OIP_PLATFORM "\",\"inputs\":[");
    append_tensors(text, false, false);
    append_text(text, "],\"outputs\":[");
    append_tensors(text, true, false);
    append_text(text, "]}");
}

void kld_oip_append_config(struct kld_oip_text *text) {
    kld_oip_append(text, "{\"name\":\"" KLD_OIP_MODEL "\",\"platform\":\"" KLD_OIP_PLATFORM
                         "\",\"backend\":\"kld\",\"version_policy\":{\"specific\":{\"versions\":"
                         "[" KLD_OIP_MODEL_VERSION "]}},\"max_batch_size\":0,\"input\":[");
    append_tensors(text, false, true);
    append_text(text, "],\"output\":[");
    append_tensors(text, true, true);
    append_text(text, "],\"parameters\":{");
    const struct {
        const char *name, *values;
    } choices[] = {{"divergences", kld_divergence_list()},
                   {"forms", kld_form_list()},
                   {"reductions", kld_reduction_list()},
                   {"datatypes", kld_dtype_list()},
                   {"request_parameters", kld_op_parameter_list()}};
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++)
        kld_oip_append(text, "%s\"%s\":{\"string_value\":\"%s\"}", i ? "," : "", choices[i].name,
                       choices[i].values);
    append_text(text, "}}");
}

void kld_oip_append_index(struct kld_oip_text *text, const char *reason, bool only_ready) {
    append_text(text, "[");
    if (!reason || !only_ready)
        kld_oip_append(text,
                       "{\"name\":\"" KLD_OIP_MODEL "\",\"version\":\"" KLD_OIP_MODEL_VERSION
                       "\",\"state\":\"%s\",\"reason\":\"%s\"}",
                       reason ? "UNAVAILABLE" : "READY", reason ? reason : "");
    append_text(text, "]");
}
