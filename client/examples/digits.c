/* digits.c - what a teacher and a student say about real handwritten digits: loss and gradient over
 * HTTP and over shared memory, compared bit for bit with each other and with FP64.
 *
 *   digits UNIX-URL HTTP-URL FOLDER     FOLDER: tests/data/digits
 *
 * Prints a table; exit status 1 if anything differs from what it has to be. A program of one thread
 * that uses nothing but libkld. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kld/kld.h>

#define RELATIVE_MAX 1e-6
#define ULPS_MAX 4.0

struct array {
    uint64_t rows, columns;
    uint32_t element_bytes;
    void *data;
};

/* A .npy file of version 1 with a shape of one or two dimensions, FP32 or FP64. */
static int load(const char *folder, const char *name, struct array *ret_array) {
    char path[512], header[512] = "";
    unsigned char magic[10];
    snprintf(path, sizeof path, "%s/%s.npy", folder, name);
    FILE *file = fopen(path, "rb");
    int ok = file && fread(magic, 1, 10, file) == 10 && memcmp(magic, "\x93NUMPY\x01", 7) == 0;
    size_t header_bytes = ok ? magic[8] + 256u * magic[9] : 0;
    ok = ok && header_bytes < sizeof header && fread(header, 1, header_bytes, file) == header_bytes;
    const char *shape = ok ? strstr(header, "'shape': (") : NULL;
    unsigned long long rows = 0, columns = 1;
    ok = shape && sscanf(shape, "'shape': (%llu, %llu", &rows, &columns) >= 1;
    ret_array->element_bytes = ok && strstr(header, "'<f8'") ? 8 : 4;
    ret_array->rows = rows;
    ret_array->columns = columns;
    size_t bytes = (size_t)(rows * columns * ret_array->element_bytes);
    ret_array->data = ok ? malloc(bytes) : NULL;
    ok = ok && ret_array->data && fread(ret_array->data, 1, bytes, file) == bytes;
    if (file)
        fclose(file);
    if (!ok)
        fprintf(stderr, "digits: cannot read %s\n", path);
    return ok;
}

struct answer {
    float loss;
    float *gradient;
    double relative, ulps, round_trip_ms;
};

/* The distance of a float from the truth, in units of the last place of the truth. */
static double ulps_between(float value, double truth) {
    float rounded = (float)truth;
    float step = nextafterf(fabsf(rounded), INFINITY) - fabsf(rounded);
    return fabs((double)value - (double)rounded) / (double)step;
}

static void compare(struct answer *answer, const struct array *loss, const struct array *gradient) {
    const double *expected = gradient->data, *expected_loss = loss->data;
    answer->relative = fabs((double)answer->loss - *expected_loss) / fabs(*expected_loss);
    answer->ulps = 0;
    for (uint64_t i = 0; i < gradient->rows * gradient->columns; i++) {
        double ulps = ulps_between(answer->gradient[i], expected[i]);
        if (!(ulps <= answer->ulps)) /* a NaN counts */
            answer->ulps = ulps;
    }
}

static void describe(struct kld_request *request, const struct array *student) {
    memset(request, 0, sizeof *request);
    kld_op_init(&request->op); /* forward_kl, batchmean, probabilities on both sides */
    request->op.rank = 2;
    request->op.shape[0] = student->rows;
    request->op.shape[1] = student->columns;
    request->op.tensor[KLD_SLOT_PREDICTIONS].dtype = KLD_DTYPE_FP32;
    request->op.tensor[KLD_SLOT_TARGETS].dtype = KLD_DTYPE_FP32;
    request->op.tensor[KLD_SLOT_LOSS].dtype = KLD_DTYPE_FP32;
    request->op.tensor[KLD_SLOT_GRAD_PREDICTIONS].dtype = KLD_DTYPE_FP32;
}

/* Plain pointers: over HTTP the tensors travel in the body. */
static enum kld_status ask_http(struct kld_connection *connection, const struct array *student,
                                const struct array *teacher, struct answer *answer,
                                struct kld_error *err) {
    struct kld_request request;
    struct kld_result result;
    describe(&request, student);
    request.bytes[KLD_SLOT_PREDICTIONS].data = student->data;
    request.bytes[KLD_SLOT_TARGETS].data = teacher->data;
    request.bytes[KLD_SLOT_LOSS].data = &answer->loss;
    request.bytes[KLD_SLOT_GRAD_PREDICTIONS].data = answer->gradient;
    enum kld_status status = kld_run(connection, &request, &result, err);
    answer->round_trip_ms = (double)result.total_ns / 1e6;
    return status;
}

/* A region: both sides see the same memory, nothing is sent. */
static enum kld_status ask_shared(struct kld_connection *connection, const struct array *student,
                                  const struct array *teacher, struct answer *answer,
                                  struct kld_error *err) {
    struct kld_request request;
    struct kld_result result = {.total_ns = 0};
    struct kld_region *region = NULL;
    uint64_t bytes = student->rows * student->columns * sizeof(float), step = bytes + 64;
    step -= step % 64;
    enum kld_status status = kld_region_create(connection, 3 * step + 64, &region, err);
    if (status != KLD_OK)
        return status;
    unsigned char *memory = kld_region_data(region);
    memcpy(memory, student->data, bytes);
    memcpy(memory + step, teacher->data, bytes);
    describe(&request, student);
    const enum kld_slot slots[] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS,
                                   KLD_SLOT_GRAD_PREDICTIONS, KLD_SLOT_LOSS};
    for (uint64_t i = 0; i < 4; i++) {
        request.bytes[slots[i]].region = region;
        request.bytes[slots[i]].offset_bytes = i * step;
    }
    status = kld_run(connection, &request, &result, err);
    memcpy(answer->gradient, memory + 2 * step, bytes);
    memcpy(&answer->loss, memory + 3 * step, sizeof answer->loss);
    answer->round_trip_ms = (double)result.total_ns / 1e6;
    kld_region_drop(region);
    return status;
}

typedef enum kld_status (*ask_fn)(struct kld_connection *, const struct array *,
                                  const struct array *, struct answer *, struct kld_error *);

/* Asks twice: the second answer, warmed up, is the one that is timed. 0 on success. */
static int ask(const char *url, ask_fn function, const struct array *student,
               const struct array *teacher, struct answer *answer) {
    struct kld_connection *connection = NULL;
    struct kld_error err = {.status = KLD_OK};
    answer->gradient = malloc(student->rows * student->columns * sizeof(float));
    if (!answer->gradient)
        return 1;
    enum kld_status status = kld_connect(url, NULL, &connection, &err);
    for (int i = 0; i < 2 && status == KLD_OK; i++)
        status = function(connection, student, teacher, answer, &err);
    kld_close(connection);
    if (status != KLD_OK)
        fprintf(stderr, "digits: %s: %s\n", url, err.text);
    return status != KLD_OK;
}

static void print_row(const char *name, const struct answer *answer) {
    printf("  %-16s %.9f   %8.1e      %.0f ulp     %8.3f ms\n", name, (double)answer->loss,
           answer->relative, answer->ulps, answer->round_trip_ms);
}

int main(int argc, char **argv) {
    struct array student, teacher, loss, gradient;
    struct answer shared = {.gradient = NULL}, http = {.gradient = NULL};
    if (argc != 4) {
        fprintf(stderr, "usage: digits UNIX-URL HTTP-URL FOLDER\n");
        return 2;
    }
    if (!load(argv[3], "student", &student) || !load(argv[3], "teacher", &teacher) ||
        !load(argv[3], "loss", &loss) || !load(argv[3], "gradient", &gradient))
        return 1;
    if (ask(argv[1], ask_shared, &student, &teacher, &shared) ||
        ask(argv[2], ask_http, &student, &teacher, &http)) {
        free(shared.gradient);
        free(http.gradient);
        return 1;
    }
    compare(&shared, &loss, &gradient);
    compare(&http, &loss, &gradient);
    int same =
        memcmp(&shared.loss, &http.loss, sizeof(float)) == 0 &&
        memcmp(shared.gradient, http.gradient, student.rows * student.columns * sizeof(float)) == 0;
    int right = shared.relative <= RELATIVE_MAX && shared.ulps <= ULPS_MAX &&
                http.relative <= RELATIVE_MAX && http.ulps <= ULPS_MAX;
    printf("Handwritten digits: %llu rows of %llu classes, FP32, forward_kl, batchmean\n"
           "  over             loss          off FP64   gradient off  round trip\n",
           (unsigned long long)student.rows, (unsigned long long)student.columns);
    print_row("shared memory", &shared);
    print_row("HTTP", &http);
    printf("  FP64             %.9f   loss and gradient %s; the two ways in: %s\n\n",
           *(double *)loss.data, right ? "right" : "WRONG", same ? "bit-identical" : "DIFFERENT");
    free(shared.gradient);
    free(http.gradient);
    free(student.data);
    free(teacher.data);
    free(loss.data);
    free(gradient.data);
    return !(same && right);
}
