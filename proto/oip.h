/* oip.h - Open Inference JSON to struct kld_op and back.
 *
 * kld_oip_parse() turns the JSON part of an infer request into the operator it asks for, a list of
 * where the bytes of each input are (in the JSON itself, in the binary tail, in a shared-memory
 * region) and a list of how each output is wanted. It has passed kld_op_check() then. The bytes of
 * JSON tensors are decoded later, by kld_oip_decode(), straight into the memory of the tensor.
 * Replies are written into a buffer of fixed size (struct kld_oip_text).
 *
 * Knows nothing of HTTP. No I/O, no state; any thread. */
#ifndef KLD_PROTO_OIP_H
#define KLD_PROTO_OIP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/op.h"
#include "proto/status.h"

#define KLD_OIP_MODEL "kl_div"
#define KLD_OIP_MODEL_VERSION "1"
#define KLD_OIP_PLATFORM "kld_native"
#define KLD_OIP_INPUTS_MAX 5
#define KLD_OIP_OUTPUTS_MAX 4
#define KLD_OIP_NAME_MAX 128 /* bytes of a region's or a stored tensor's name, NUL included */
#define KLD_OIP_KEY_MAX 256  /* bytes of a region's key, NUL included */
#define KLD_OIP_ID_MAX 257   /* bytes of a request's id, NUL included */

enum kld_oip_where { KLD_OIP_JSON, KLD_OIP_BINARY, KLD_OIP_REGION, KLD_OIP_STORED };

/* One tensor of a request. Plain values, except `data`. */
struct kld_oip_tensor {
    enum kld_slot slot;
    enum kld_oip_where where;
    uint32_t dtype;
    uint32_t rank;
    uint64_t shape[KLD_RANK_MAX];
    uint64_t elements;
    uint64_t bytes;                /* of the tensor, rows following each other */
    const char *data, *data_end;   /* JSON input: its array, in the text given to the parser */
    uint64_t tail_offset_bytes;    /* binary input: from the start of the binary tail */
    char region[KLD_OIP_NAME_MAX]; /* region, stored tensor: its name */
    uint64_t region_offset_bytes;
};

struct kld_oip_request {
    struct kld_op op; /* dtypes, shape, parameters; regions and offsets mean nothing outside */
    struct kld_geometry geometry;
    uint32_t input_count, output_count;
    struct kld_oip_tensor input[KLD_OIP_INPUTS_MAX]; /* binary ones in the order of the tail */
    struct kld_oip_tensor output[KLD_OIP_OUTPUTS_MAX];
    uint64_t tail_bytes; /* that the binary tail must have */
    uint64_t timeout_ns; /* 0: not given */
    bool has_device;
    uint64_t device; /* has_device: of the server's, or beyond them */
    bool has_id;
    char id[KLD_OIP_ID_MAX];
};

/* The last request that was understood: one whose text differs in nothing but tensor data, as those
 * of a program that asks again and again, is not taken apart anew. Zeroed: none yet. */
#define KLD_OIP_MEMO_BYTES_MAX 4096
struct kld_oip_memo {
    size_t bytes; /* of text; 0: none */
    char text[KLD_OIP_MEMO_BYTES_MAX];
    uint32_t array[KLD_OIP_INPUTS_MAX]; /* where in text inputs[i].data is, without its numbers; 0:
                                           it is no array, or not there */
    struct kld_oip_request request;     /* its data pointers mean nothing */
};

/* text need not be NUL-terminated; it must outlive the use of input[].data. memo: NULL, or the
 * calling thread's alone. */
enum kld_status kld_oip_parse(const char *text, size_t bytes, struct kld_oip_memo *memo,
                              struct kld_oip_request *ret_request, struct kld_error *err);

/* Is the text of a JSON input long enough for its elements? kld_oip_decode() would find that out,
 * too, but only where memory for all of them was found first. */
enum kld_status kld_oip_check_length(const struct kld_oip_tensor *tensor, struct kld_error *err);
/* Writes the numbers of a JSON input to `to`, tensor->bytes long and aligned to 8. */
enum kld_status kld_oip_decode(const struct kld_oip_tensor *tensor, void *to,
                               struct kld_error *err);

/* The body of a register request for a system shared-memory region. */
struct kld_oip_register {
    char key[KLD_OIP_KEY_MAX];
    uint64_t offset_bytes, byte_size;
};
enum kld_status kld_oip_parse_register(const char *text, size_t bytes,
                                       struct kld_oip_register *ret_register,
                                       struct kld_error *err);
/* The same for CUDA shared memory. */
#define KLD_OIP_CUDA_HANDLE_BYTES 64
struct kld_oip_register_cuda {
    uint8_t handle[KLD_OIP_CUDA_HANDLE_BYTES]; /* cudaIpcMemHandle_t */
    uint64_t device_id, byte_size;
};
enum kld_status kld_oip_parse_register_cuda(const char *text, size_t bytes,
                                            struct kld_oip_register_cuda *ret_register,
                                            struct kld_error *err);
/* The body of a repository index request: empty, or {"ready": bool}; true wants no model that is
 * not ready. */
enum kld_status kld_oip_parse_index(const char *text, size_t bytes, bool *ret_ready,
                                    struct kld_error *err);

/* ---- Writing ------------------------------------------------------------------------------------
 */

/* A text of bounded size. Appending past `capacity` sets overflow and writes nothing more. */
struct kld_oip_text {
    char *data;      /* the caller's; not NUL-terminated */
    size_t capacity; /* bytes at data */
    size_t length;
    bool overflow;
};

void kld_oip_append(struct kld_oip_text *text, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Is this a name for a region or a stored tensor, `what`: UTF-8 of 1 to KLD_OIP_NAME_MAX - 1 bytes?
 * JSON, in which it is listed and asked for, has no other. */
enum kld_status kld_oip_check_name(const char *name, const char *what, struct kld_error *err);

/* As a JSON string with its quotes. Bytes that are not UTF-8 become '?'. */
void kld_oip_append_string(struct kld_oip_text *text, const char *string);
/* {"error": "..."} */
void kld_oip_append_error(struct kld_oip_text *text, const char *error);
/* [2,3] */
void kld_oip_append_shape(struct kld_oip_text *text, const uint64_t *shape, uint32_t rank);

/* At least as many bytes as kld_oip_reply() can need for this request. */
uint64_t kld_oip_reply_bytes_max(const struct kld_oip_request *request);
/* The JSON of a reply. values[i]: the bytes of output i, read if it goes out as JSON. A number that
 * is not finite is null, and the output has parameters.non_finite: "nan", "inf" or "-inf" where all
 * of them are alike, else an array that names each null in order. */
void kld_oip_reply(struct kld_oip_text *text, const struct kld_oip_request *request,
                   const void *const *values);

void kld_oip_append_metadata(struct kld_oip_text *text); /* of the model */
void kld_oip_append_config(struct kld_oip_text *text);   /* Triton's ModelConfig */
/* The repository index: the model, or, where only what is ready is wanted and it is not, none.
 * `reason`: why it is not, no character of which JSON would escape; NULL: it is ready. */
void kld_oip_append_index(struct kld_oip_text *text, const char *reason, bool only_ready);

#endif
