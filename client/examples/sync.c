/* sync.c - the shortest useful program with libkld: student and teacher probabilities in shared
 * memory, the loss and its gradient back, one blocking call. No tensor byte crosses the socket.
 *
 *   gcc sync.c -o sync $(pkg-config --cflags --libs kld)      (in this tree: make examples)
 *   ./sync unix:/run/kld/kld.sock      or   ./sync http://127.0.0.1:8080   or   ./sync local:
 */
#include <stdio.h>
#include <string.h>

#include <kld/kld.h>

#define ROWS 64
#define CLASSES 1000
#define TENSOR_BYTES (ROWS * CLASSES * sizeof(float))

/* Stands for a model: rows of positive numbers that sum to 1. */
static void fill(float *rows, unsigned seed) {
    for (int row = 0; row < ROWS; row++) {
        float sum = 0, *at = rows + row * CLASSES;
        for (int i = 0; i < CLASSES; i++) {
            seed = seed * 1664525u + 1013904223u;
            sum += at[i] = (float)(seed >> 8) + 1;
        }
        for (int i = 0; i < CLASSES; i++)
            at[i] /= sum;
    }
}

int main(int argc, char **argv) {
    struct kld_connection *connection = NULL;
    struct kld_region *region;
    struct kld_error error;
    struct kld_result result;
    struct kld_request request;
    int failed = 1;

    if (kld_connect(argc > 1 ? argv[1] : "local:", NULL, &connection, &error))
        goto out;
    /* One region for three tensors: predictions, targets, gradient. */
    if (kld_region_create(connection, 3 * TENSOR_BYTES, &region, &error))
        goto out;
    float *data = kld_region_data(region);
    fill(data, 1);
    fill(data + ROWS * CLASSES, 2);

    memset(&request, 0, sizeof request);
    kld_op_init(&request.op); /* forward_kl, batchmean, probabilities */
    request.op.rank = 2;
    request.op.shape[0] = ROWS;
    request.op.shape[1] = CLASSES;
    const enum kld_slot slots[] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS,
                                   KLD_SLOT_GRAD_PREDICTIONS};
    for (int i = 0; i < 3; i++) {
        request.op.tensor[slots[i]].dtype = KLD_DTYPE_FP32;
        request.bytes[slots[i]].region = region;
        request.bytes[slots[i]].offset_bytes = (uint64_t)i * TENSOR_BYTES;
    }
    request.timeout_ns = 10000000000; /* 10 s */

    if (kld_run(connection, &request, &result, &error))
        goto out;
    printf("loss %.9g, gradient[0] %.9g, in %.3f ms\n", result.loss, data[2 * ROWS * CLASSES],
           (double)result.total_ns / 1e6);
    failed = 0;
out:
    if (failed)
        fprintf(stderr, "%s\n", error.text);
    kld_close(connection); /* with every region that it made */
    return failed;
}
