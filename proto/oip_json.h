/* oip_json.h - strict reading of JSON text for proto/oip.c, and typed access to what was read.
 *
 * Two steps. A scanner of our own checks the whole text: grammar, UTF-8, depth, length of numbers,
 * nothing behind the value. It notes where the tensor arrays are (inputs[i].data) without building
 * anything for them, so that a body full of numbers costs no memory beyond its text. What remains,
 * at most KLD_JSON_SKELETON_MAX bytes, goes to cJSON; objects with two equal keys are refused.
 *
 * Internal to proto/oip*.c, but for the first step, which server/config.c takes as well. Any
 * thread. */
#ifndef KLD_PROTO_OIP_JSON_H
#define KLD_PROTO_OIP_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"

#define KLD_JSON_DEPTH_MAX 16
#define KLD_JSON_NUMBER_MAX 60                  /* characters; cJSON reads 63 */
#define KLD_JSON_SKELETON_MAX ((size_t)1 << 20) /* bytes of JSON that are not tensor data */
#define KLD_JSON_KEYS_MAX 64                    /* keys of one object */
#define KLD_JSON_ARRAYS_MAX 8                   /* inputs whose data is looked for */

struct kld_json_span {
    const char *begin, *end; /* the text of an array, '[' to ']' included; NULL: none */
};

/* The first step: *ret_text is the text without what the spans hold, NUL-terminated, *ret_bytes
 * long, to be released with free(). Arrays are missing from it, but not where they were. */
enum kld_status kld_json_skeleton(const char *text, size_t bytes, char **ret_text,
                                  size_t *ret_bytes, struct kld_json_span *spans,
                                  struct kld_error *err);
/* Would the first step find that same skeleton in the text? Then it is not taken apart anew: what
 * lies between the arrays is compared, the arrays are scanned, and spans[i] is the one at arrays[i]
 * of the skeleton, for i < count; 0: none. False: whatever it would find, an error among it. */
bool kld_json_is_again(const char *text, size_t bytes, const char *skeleton, size_t length,
                       const uint32_t *arrays, size_t count, struct kld_json_span *spans);
/* The second, of such a text. *ret_root is to be released with cJSON_Delete(). */
enum kld_status kld_json_tree(const char *skeleton, size_t bytes, cJSON **ret_root,
                              struct kld_error *err);
/* Both. spans may be NULL: then nothing is set aside.
 * Each inputs[i].data array (i < KLD_JSON_ARRAYS_MAX) is empty in the tree and spans[i] is its
 * text. */
enum kld_status kld_json_parse(const char *text, size_t bytes, cJSON **ret_root,
                               struct kld_json_span *spans, struct kld_error *err);

/* oip.c: what a tree asks for. The request is zeroed, its op initialised. */
struct kld_oip_request;
enum kld_status kld_oip_read(const cJSON *root, const struct kld_json_span *spans,
                             struct kld_oip_request *request, struct kld_error *err);

/* A whole number in [0, 2^53]. what: for the error text. */
enum kld_status kld_json_whole(const cJSON *item, const char *what, uint64_t *ret_value,
                               struct kld_error *err);
/* Every key of the object is in `known` (NULL-terminated), else KLD_INVALID that lists them. */
enum kld_status kld_json_keys(const cJSON *object, const char *what, const char *const *known,
                              struct kld_error *err);

#endif
