/* div.c - `kld div`: two tensors from files, one loss, and where asked for its gradients. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/cli/cli.h"
#include "client/cli/result_file.h"
#include "client/cli/tensor_file.h"

#define PROGRESS_BYTES_MIN (8u << 20) /* shorter uploads are over before one looks */

struct div_options {
    struct kld_server_options server;
    const char *divergence, *reduction, *predictions_form, *targets_form;
    double numbers[KLD_NUMBER_COUNT];
    bool numbers_given[KLD_NUMBER_COUNT];
    const char *files[KLD_SLOT_COUNT]; /* of the slot; NULL: it is not there */
    const char *split;
    uint64_t part_bytes;
    double part_timeout_s;
    bool json, quiet;
};

/* What a run owns. */
struct division {
    struct kld_request request;
    struct kld_geometry geometry;
    struct kld_tensor_file inputs[KLD_SLOT_COUNT];
    struct kld_array outputs[KLD_SLOT_COUNT];
    struct kld_result_file files[KLD_SLOT_COUNT]; /* of the outputs */
    struct kld_connection *connection;
    struct kld_server_info info;
    struct kld_result result;
};

#define TEXT(flag, field, value, help)                                                             \
    { flag, KLD_OPTION_TEXT, value, help, offsetof(struct div_options, field), 0 }
#define NUMBER(flag, NAME, help)                                                                   \
    {                                                                                              \
        flag, KLD_OPTION_NUMBER, "NUMBER", help,                                                   \
            offsetof(struct div_options, numbers[KLD_NUMBER_##NAME]),                              \
            offsetof(struct div_options, numbers_given[KLD_NUMBER_##NAME])                         \
    }
#define FILE_OF(flag, SLOT, help)                                                                  \
    { flag, KLD_OPTION_TEXT, "FILE", help, offsetof(struct div_options, files[KLD_SLOT_##SLOT]), 0 }

static const struct kld_option options_list[] = {
    TEXT("divergence", divergence, "NAME", "one of those above (default forward_kl)"),
    TEXT("reduction", reduction, "NAME", "batchmean (default), sum, mean, rowmean, row, none"),
    TEXT("predictions-form", predictions_form, "FORM", "probs (default), logprobs, logits"),
    TEXT("targets-form", targets_form, "FORM", "the same for the targets"),
    NUMBER("temperature", TEMPERATURE, "divides logits (default 1)"),
    NUMBER("beta", BETA, "of js, 0 to 1 (default 0.5)"),
    NUMBER("skew", SKEW, "of skew_kl and skew_reverse_kl, from 0 to below 1"),
    NUMBER("weight", WEIGHT, "of mixed_kl, 0 to 1: the share of forward_kl"),
    NUMBER("scale", SCALE, "multiplies loss and gradients (default 1)"),
    NUMBER("normalizer", NORMALIZER, "replaces the divisor of mean, batchmean, rowmean"),
    NUMBER("grad-output", GRAD_OUTPUT, "the gradient of what follows, one number"),
    FILE_OF("row-mask", ROW_MASK, "bool or uint8, one a row; 0 leaves the row out"),
    FILE_OF("row-weights", ROW_WEIGHTS, "float32, one a row"),
    FILE_OF("grad-output-file", GRAD_OUTPUT, "the same as a tensor of the loss's shape"),
    {NULL, KLD_OPTION_GROUP, NULL, "Results (.npy, or .safetensors, which BF16 needs)", 0, 0},
    FILE_OF("loss", LOSS, "the loss; needed for the reductions row and none"),
    FILE_OF("row-loss", ROW_LOSS, "one value a row, whatever the reduction"),
    FILE_OF("grad-predictions", GRAD_PREDICTIONS, "the gradient of the predictions"),
    FILE_OF("grad-targets", GRAD_TARGETS, "the gradient of the targets"),
    {"json", KLD_OPTION_FLAG, NULL, "one JSON object", offsetof(struct div_options, json), 0},
    {"quiet", KLD_OPTION_FLAG, NULL, "nothing but the loss", offsetof(struct div_options, quiet),
     0},
    KLD_SERVER_OPTIONS(struct div_options, server),
    TEXT("split", split, "URL,URL,...",
         "several servers share the rows; the result is that of one (the bits: see above)"),
    {"part-bytes", KLD_OPTION_BYTES, "BYTES",
     "with --split: most tensor bytes of a part (default 64M)",
     offsetof(struct div_options, part_bytes), 0},
    {"part-timeout", KLD_OPTION_TIME, "SECONDS",
     "with --split: a part not done by then goes to another server (default 60)",
     offsetof(struct div_options, part_timeout_s), 0},
    KLD_OPTIONS_END,
};

/* ---- From options and files to a request --------------------------------------------------------
 */

static enum kld_status set_parameters(const struct div_options *options, struct kld_op *op,
                                      struct kld_error *err) {
    static const char *const numbers[KLD_NUMBER_COUNT] = {
#define X(NAME, name, value) name,
        KLD_NUMBER_MAP(X)
#undef X
    };
    const struct {
        const char *name, *value;
    } texts[] = {{"divergence", options->divergence},
                 {"reduction", options->reduction},
                 {"predictions_form", options->predictions_form},
                 {"targets_form", options->targets_form}};
    enum kld_status status = KLD_OK;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0] && !status; i++)
        if (texts[i].value)
            status = kld_op_set_text(op, texts[i].name, texts[i].value, err);
    for (int i = 0; i < KLD_NUMBER_COUNT && !status; i++)
        if (options->numbers_given[i])
            status = kld_op_set_number(op, numbers[i], options->numbers[i], err);
    return status;
}

#define SHAPE_TEXT_BYTES 128 /* eight dimensions of at most 2^40, brackets and commas */

static const char *shape_text(const uint64_t *shape, uint32_t rank,
                              char ret_text[SHAPE_TEXT_BYTES]) {
    size_t used = (size_t)sprintf(ret_text, "[");
    for (uint32_t i = 0; i < rank; i++)
        used += (size_t)sprintf(ret_text + used, "%s%" PRIu64, i ? "," : "", shape[i]);
    sprintf(ret_text + used, "]");
    return ret_text;
}

static bool has_shape(const struct kld_array *array, const uint64_t *shape, uint32_t rank) {
    return array->rank == rank && memcmp(array->shape, shape, rank * sizeof *shape) == 0;
}

/* predictions, the first of all, give the shape. */
static enum kld_status check_shape(const struct kld_op *op, enum kld_slot slot, const char *name,
                                   const struct kld_array *array, struct kld_error *err) {
    char is[SHAPE_TEXT_BYTES], flat[SHAPE_TEXT_BYTES], wanted[SHAPE_TEXT_BYTES];
    uint64_t rows = 1;
    uint32_t leading = op->rank - 1;
    for (uint32_t i = 0; i < leading; i++)
        rows *= op->shape[i];
    bool of_loss = slot == KLD_SLOT_GRAD_OUTPUT;
    shape_text(array->shape, array->rank, is);
    if (slot == KLD_SLOT_PREDICTIONS || slot == KLD_SLOT_TARGETS ||
        (of_loss && op->reduction == KLD_REDUCTION_NONE))
        return has_shape(array, op->shape, op->rank)
                   ? KLD_OK
                   : kld_error_set(err, KLD_INVALID,
                                   "%.100s: its shape is %s; expected %s, as of predictions", name,
                                   is, shape_text(op->shape, op->rank, wanted));
    if (of_loss && op->reduction != KLD_REDUCTION_ROW)
        return array->rank <= 1 && array->bytes == kld_dtype_bytes(array->dtype)
                   ? KLD_OK
                   : kld_error_set(err, KLD_INVALID,
                                   "%.100s: its shape is %s; expected one number, as the loss is",
                                   name, is);
    if (has_shape(array, &rows, 1) || has_shape(array, op->shape, leading))
        return KLD_OK;
    return kld_error_set(err, KLD_INVALID, "%.100s: its shape is %s; expected %s%s%s, one a row",
                         name, is, shape_text(&rows, 1, flat), leading > 1 ? " or " : "",
                         leading > 1 ? shape_text(op->shape, leading, wanted) : "");
}

/* What is said of an input, by its name, is about its file. */
static enum kld_status name_file(const struct div_options *options, struct kld_error *err) {
    struct kld_error plain = *err;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        const char *name = kld_slot_name(slot);
        size_t length = strlen(name);
        if (options->files[slot] && !kld_slot_is_output(slot) &&
            strncmp(plain.text, name, length) == 0 && plain.text[length] == ' ')
            return kld_error_set(err, plain.status, "%.100s: %s", options->files[slot], plain.text);
    }
    return plain.status;
}

static enum kld_status open_inputs(const struct div_options *options, struct division *division,
                                   struct kld_error *err) {
    struct kld_op *op = &division->request.op;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        struct kld_tensor_file *file = &division->inputs[slot];
        if (kld_slot_is_output(slot) || !options->files[slot])
            continue;
        enum kld_status status = kld_tensor_file_open(options->files[slot], file, err);
        if (status)
            return status;
        if (slot == KLD_SLOT_PREDICTIONS) { /* outputs are made of its shape */
            if (file->array.rank == 0)
                return kld_error_set(err, KLD_INVALID,
                                     "%.100s: a single number; expected a tensor of rank 1 to %d",
                                     options->files[slot], KLD_RANK_MAX);
            op->rank = file->array.rank;
            memcpy(op->shape, file->array.shape, sizeof op->shape);
        }
        if ((status =
                 check_shape(op, (enum kld_slot)slot, options->files[slot], &file->array, err)))
            return status;
        op->tensor[slot].dtype = file->array.dtype;
        division->request.bytes[slot].data = (void *)file->data;
    }
    return KLD_OK;
}

static void output_shape(const struct kld_op *op, enum kld_slot slot, struct kld_array *array) {
    bool wide = slot == KLD_SLOT_GRAD_PREDICTIONS || slot == KLD_SLOT_GRAD_TARGETS ||
                (slot == KLD_SLOT_LOSS && op->reduction == KLD_REDUCTION_NONE);
    bool tall = wide || slot == KLD_SLOT_ROW_LOSS ||
                (slot == KLD_SLOT_LOSS && op->reduction == KLD_REDUCTION_ROW);
    array->rank = wide ? op->rank : tall ? op->rank - 1 : 0;
    memcpy(array->shape, op->shape, array->rank * sizeof array->shape[0]);
}

static enum kld_status prepare_outputs(const struct div_options *options, struct division *division,
                                       struct kld_error *err) {
    struct kld_op *op = &division->request.op;
    const struct kld_tensor_file *q = &division->inputs[KLD_SLOT_PREDICTIONS];
    const struct kld_tensor_file *p = &division->inputs[KLD_SLOT_TARGETS];
    bool wide = q->array.dtype == KLD_DTYPE_FP64 || p->array.dtype == KLD_DTYPE_FP64;
    enum kld_dtype dtypes[KLD_SLOT_COUNT] = {0};
    dtypes[KLD_SLOT_LOSS] = dtypes[KLD_SLOT_ROW_LOSS] = wide ? KLD_DTYPE_FP64 : KLD_DTYPE_FP32;
    dtypes[KLD_SLOT_GRAD_PREDICTIONS] = q->array.dtype;
    dtypes[KLD_SLOT_GRAD_TARGETS] = p->array.dtype;
    bool scalar = op->reduction != KLD_REDUCTION_NONE && op->reduction != KLD_REDUCTION_ROW;
    if (!scalar && !options->files[KLD_SLOT_LOSS])
        return kld_error_set(err, KLD_INVALID,
                             "reduction '%s' gives a tensor: name a file for it with --loss FILE",
                             kld_reduction_name(op->reduction));
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        struct kld_array *array = &division->outputs[slot];
        if (!kld_slot_is_output(slot) || !options->files[slot])
            continue;
        enum kld_status status = kld_tensor_file_check(options->files[slot], dtypes[slot], err);
        if (status)
            return status;
        array->dtype = dtypes[slot];
        op->tensor[slot].dtype = dtypes[slot];
        output_shape(op, (enum kld_slot)slot, array);
        if ((status = kld_array_size(array, err)))
            return status;
        void *data =
            mmap(NULL, array->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED)
            return kld_error_set(err, KLD_NO_MEMORY, "no memory for %" PRIu64 " bytes of results",
                                 array->bytes);
        division->request.bytes[slot].data = data;
    }
    return KLD_OK;
}

static size_t header_of(const struct div_options *options, const struct division *division,
                        uint32_t slot, char ret_header[KLD_TENSOR_FILE_HEADER_BYTES]) {
    return kld_tensor_file_header(options->files[slot], kld_slot_name(slot),
                                  &division->outputs[slot], ret_header);
}

static enum kld_status open_outputs(const struct div_options *options, struct division *division,
                                    struct kld_error *err) {
    struct kld_result_file *files = division->files;
    char header[KLD_TENSOR_FILE_HEADER_BYTES];
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        if (!division->outputs[slot].bytes)
            continue;
        uint64_t bytes = header_of(options, division, slot, header) + division->outputs[slot].bytes;
        enum kld_status status =
            kld_result_file_open(options->files[slot], bytes, &files[slot], err);
        if (status)
            return status;
        for (uint32_t other = 0; other < slot; other++)
            if (files[other].name && kld_result_file_same(&files[other], &files[slot]))
                return kld_error_set(err, KLD_INVALID, "%.100s is to hold two results: %s and %s",
                                     options->files[slot], kld_slot_name(other),
                                     kld_slot_name(slot));
    }
    return KLD_OK;
}

static void division_close(struct division *division) {
    kld_close(division->connection);
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++) {
        kld_tensor_file_close(&division->inputs[slot]);
        kld_result_file_close(&division->files[slot]);
        if (division->outputs[slot].bytes && division->request.bytes[slot].data)
            munmap(division->request.bytes[slot].data, division->outputs[slot].bytes);
    }
}

/* ---- Results ------------------------------------------------------------------------------------
 */

static int show_progress(void *user, uint64_t sent, uint64_t total) {
    int *shown = user, percent = total ? (int)(100 * (double)sent / (double)total) : 0;
    if (total < PROGRESS_BYTES_MIN || percent == *shown)
        return 0;
    *shown = percent;
    char bar[31];
    memset(bar, ' ', 30);
    memset(bar, '#', (size_t)percent * 30 / 100);
    bar[30] = '\0';
    fprintf(stderr, "\r[%s] %3d%%  %.1f of %.1f MB", bar, percent, (double)sent / 1e6,
            (double)total / 1e6);
    if (sent == total)
        fprintf(stderr, "\r%70s\r", "");
    fflush(stderr);
    return 0;
}

static void print_json(const struct division *division) {
    const struct kld_op *op = &division->request.op;
    const struct kld_result *result = &division->result;
    printf("{");
    if (result->scalar) {
        printf("\"loss\":");
        kld_cli_json_number(stdout, result->loss,
                            division->geometry.loss_dtype == KLD_DTYPE_FP64 ? 17 : 9);
        if (!isfinite(result->loss))
            printf(",\"non_finite\":\"%s\"", isnan(result->loss) ? "nan"
                                             : result->loss > 0  ? "inf"
                                                                 : "-inf");
        printf(",");
    }
    printf("\"divergence\":\"%s\",\"reduction\":\"%s\",\"shape\":[",
           kld_divergence_name(op->divergence), kld_reduction_name(op->reduction));
    for (uint32_t i = 0; i < op->rank; i++)
        printf("%s%" PRIu64, i ? "," : "", op->shape[i]);
    printf("],\"backend\":");
    kld_cli_json_string(stdout, division->info.backend);
    printf(",\"device\":");
    kld_cli_json_string(stdout, division->info.device);
    printf(",\"total_ms\":%.3f,\"kernel_ms\":%.3f,\"attempts\":%" PRIu32 "}\n",
           (double)result->total_ns / 1e6, (double)result->kernel_ns / 1e6, result->attempts);
}

/* Servers of --split that had no part in it, because they were never there. */
static void warn_of_missing(const struct division *division) {
    struct kld_error why;
    for (uint32_t i = 0; kld_missing(division->connection, i, &why); i++)
        fprintf(stderr, "kld: warning: a server did not answer: %s\n", kld_cli_printable(why.text));
}

static void print_results(const struct div_options *options, const struct division *division) {
    const struct kld_op *op = &division->request.op;
    struct kld_server_info info = division->info;
    int why;
    if (!options->quiet)
        warn_of_missing(division);
    if (options->json) {
        print_json(division);
        return;
    }
    if (division->result.scalar)
        printf("%.*g\n", division->geometry.loss_dtype == KLD_DTYPE_FP64 ? 17 : 9,
               division->result.loss);
    (void)kld_cli_flush(&why); /* which main() tells; the loss is before what stderr says */
    if (!options->quiet)
        fprintf(stderr, "%s, %s over %" PRIu64 " rows of %" PRIu64 ", on %s (%s), %.3f ms\n",
                kld_divergence_name(op->divergence), kld_reduction_name(op->reduction),
                division->geometry.rows, division->geometry.classes,
                kld_cli_printable(info.backend), kld_cli_printable(info.device),
                (double)division->result.total_ns / 1e6);
}

/* All of them are whole before one has its name. */
static enum kld_status write_results(const struct div_options *options, struct division *division,
                                     struct kld_error *err) {
    char header[KLD_TENSOR_FILE_HEADER_BYTES];
    enum kld_status status = KLD_OK;
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT && !status; slot++)
        if (division->files[slot].name)
            status = kld_result_file_write(
                &division->files[slot], header, header_of(options, division, slot, header),
                division->request.bytes[slot].data, division->outputs[slot].bytes, err);
    for (uint32_t slot = 0; slot < KLD_SLOT_COUNT && !status; slot++)
        if (division->files[slot].name)
            status = kld_result_file_place(&division->files[slot], err);
    return status;
}

/* Everything that can be wrong before a server is asked. */
static enum kld_status prepare(const struct div_options *options, struct division *division,
                               struct kld_error *err) {
    kld_op_init(&division->request.op);
    if (!options->split && (options->part_bytes || options->part_timeout_s > 0))
        return kld_error_set(err, KLD_INVALID, "%s is for several servers; expected --split too",
                             options->part_bytes ? "--part-bytes" : "--part-timeout");
    enum kld_status status = set_parameters(options, &division->request.op, err);
    if (!status)
        status = open_inputs(options, division, err);
    if (!status)
        status = prepare_outputs(options, division, err);
    if (status)
        return status;
    struct kld_op placed = division->request.op;
    for (int slot = 0; slot < KLD_SLOT_COUNT; slot++)
        placed.tensor[slot].region = (uint64_t)slot + 1; /* none of them overlap */
    status = kld_op_check(&placed, &division->geometry, err);
    return status ? name_file(options, err) : open_outputs(options, division, err);
}

/* --split in the place of --server. */
static enum kld_status connect_split(const struct div_options *options,
                                     struct kld_connect_options *connect, struct division *division,
                                     struct kld_error *err) {
    struct kld_server_options server = options->server;
    if (server.server)
        return kld_error_set(err, KLD_INVALID, "--server and --split; expected one of them");
    char *url = malloc(strlen(options->split) + sizeof "split:");
    if (!url)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for a connection");
    sprintf(url, "split:%s", options->split);
    server.server = url;
    connect->part_bytes_max = options->part_bytes;
    connect->part_timeout_ns = (uint64_t)(options->part_timeout_s * 1e9);
    enum kld_status status = kld_cli_connect(&server, connect, &division->connection, err);
    free(url);
    return status;
}

static enum kld_status compute(const struct div_options *options, struct division *division,
                               struct kld_error *err) {
    struct kld_error why;
    int shown = -1;
    bool watched = !options->quiet && !options->json && isatty(STDERR_FILENO);
    struct kld_connect_options connect = {.staging_bytes_max = 1ull << 44,
                                          .progress = watched ? show_progress : NULL,
                                          .progress_user = &shown};
    enum kld_status status =
        options->split ? connect_split(options, &connect, division, err)
                       : kld_cli_connect(&options->server, &connect, &division->connection, err);
    if (!status)
        status = kld_info(division->connection, &division->info, err);
    division->request.timeout_ns = kld_cli_timeout_ns(&options->server);
    bool missing = !status && kld_missing(division->connection, 0, &why);
    if (!status)
        status = kld_run(division->connection, &division->request, &division->result, err);
    if (status && shown >= 0)
        fprintf(stderr, "\r%70s\r", ""); /* the error begins a line */
    if (!status && missing) /* of several servers; some may have come while the others computed */
        status = kld_info(division->connection, &division->info, err);
    return status;
}

static int run_div(int argc, char **argv, const struct kld_command *command) {
    struct div_options options = {0};
    struct division division;
    struct kld_error error = {0};
    const char *positional[KLD_POSITIONAL_MAX] = {NULL};
    memset(&division, 0, sizeof division);
    enum kld_status status = kld_options_parse(command, argc, argv, &options, positional, &error);
    if (status)
        return status == KLD_CANCELLED ? KLD_EXIT_OK : kld_cli_usage(command, &error);
    options.files[KLD_SLOT_PREDICTIONS] = positional[0];
    options.files[KLD_SLOT_TARGETS] = positional[1];
    int code = KLD_EXIT_OK;
    if (prepare(&options, &division, &error))
        code =
            error.status == KLD_NO_MEMORY ? kld_cli_fail(&error) : kld_cli_usage(command, &error);
    else if (compute(&options, &division, &error))
        code = options.split ? kld_cli_fail(&error) : kld_cli_fail_at(&error, &options.server, "");
    else if (write_results(&options, &division, &error))
        code = kld_cli_usage(command, &error);
    else
        print_results(&options, &division);
    division_close(&division);
    return code;
}

const struct kld_command kld_command_div = {
    .name = "div",
    .arguments = "PREDICTIONS TARGETS ",
    .summary = "the divergence of two tensors in files, and its gradients",
    .details =
        "PREDICTIONS (q) and TARGETS (p) are .npy files or FILE.safetensors:NAME, of one shape;\n"
        "the last dimension holds the classes. Prints the loss.\n"
        "\n"
        "Divergences: forward_kl, reverse_kl, jeffreys, mixed_kl (with --weight), js (--beta),\n"
        "skew_kl and skew_reverse_kl (with --skew), tv, cross_entropy.\n"
        "\n"
        "A job too large for one server: --split http://a:8080,http://b:8080 (a part of a lost\n"
        "server goes to another one). On CPUs all bits are those of one server. On GPUs those of\n"
        "gradients and of losses by row or element are, but a loss that is one number may differ\n"
        "from the unsplit job's in its last FP64 bit.",
    .options = options_list,
    .positional_min = 2,
    .positional_max = 2,
    .run = run_div,
};
