/* async.c - libkld in an event loop of one's own: several requests in flight, poll() over the
 * connection's descriptor, results in a callback. Tensors are plain memory here; libkld copies them
 * through shared memory, or sends them over HTTP.
 *
 *   gcc async.c -o async $(pkg-config --cflags --libs kld)      (in this tree: make examples)
 *   ./async unix:/run/kld/kld.sock      or   ./async http://127.0.0.1:8080   or   ./async local:
 */
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include <kld/kld.h>

#define BATCHES 8
#define ROWS 16
#define CLASSES 512

struct batch {
    int number;
    float predictions[ROWS][CLASSES], targets[ROWS][CLASSES]; /* logits */
    int *left;                                                /* batches that are not done */
    int *failed;
};

static struct batch batches[BATCHES];

/* Runs inside kld_process(), once for each request that was submitted. */
static void on_done(void *user, enum kld_status status, const struct kld_result *result,
                    const struct kld_error *error) {
    struct batch *batch = user;
    --*batch->left;
    if (status) {
        *batch->failed = 1;
        fprintf(stderr, "batch %d: %s\n", batch->number, error->text);
    } else {
        printf("batch %d: loss %.6f after %.3f ms, sent %u time(s)\n", batch->number, result->loss,
               (double)result->total_ns / 1e6, result->attempts);
    }
}

static enum kld_status submit(struct kld_connection *connection, struct batch *batch,
                              struct kld_error *error) {
    struct kld_request request;
    memset(&request, 0, sizeof request);
    kld_op_init(&request.op);
    request.op.rank = 2;
    request.op.shape[0] = ROWS;
    request.op.shape[1] = CLASSES;
    request.op.predictions_form = request.op.targets_form = KLD_FORM_LOGITS;
    request.op.divergence = KLD_DIVERGENCE_REVERSE_KL;
    kld_op_set_number(&request.op, "temperature", 2.0, NULL);
    request.op.tensor[KLD_SLOT_PREDICTIONS].dtype = KLD_DTYPE_FP32;
    request.op.tensor[KLD_SLOT_TARGETS].dtype = KLD_DTYPE_FP32;
    request.bytes[KLD_SLOT_PREDICTIONS].data = batch->predictions;
    request.bytes[KLD_SLOT_TARGETS].data = batch->targets;
    return kld_submit(connection, &request, on_done, batch, NULL, error);
}

int main(int argc, char **argv) {
    struct kld_connection *connection = NULL;
    struct kld_error error;
    int left = 0, failed = 0;

    enum kld_status status = kld_connect(argc > 1 ? argv[1] : "local:", NULL, &connection, &error);
    for (int i = 0; i < BATCHES && !status; i++) {
        struct batch *batch = &batches[i];
        *batch = (struct batch){.number = i, .left = &left, .failed = &failed};
        for (int j = 0; j < ROWS * CLASSES; j++) {
            batch->predictions[j / CLASSES][j % CLASSES] = (float)((j * 7 + i) % 13) / 4;
            batch->targets[j / CLASSES][j % CLASSES] = (float)((j * 5 + i) % 11) / 4;
        }
        status = submit(connection, batch, &error);
        left += status == KLD_OK;
    }
    while (left > 0 && !status) {
        /* One's own descriptors would be polled here too. */
        struct pollfd polled = {.fd = kld_fd(connection), .events = POLLIN};
        poll(&polled, 1, 1000);
        status = kld_process(connection, 0, &error);
    }
    if (status)
        fprintf(stderr, "%s\n", error.text);
    kld_close(connection);
    return failed || status ? 1 : 0;
}
