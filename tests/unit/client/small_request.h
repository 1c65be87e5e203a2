/* small_request.h - the request that the tests of every kind of connection make: FP32, plain
 * memory, loss and gradient. Fills in the op and the places; the numbers are each test's own. */
#ifndef KLD_TESTS_UNIT_CLIENT_SMALL_REQUEST_H
#define KLD_TESTS_UNIT_CLIENT_SMALL_REQUEST_H

#include <string.h>

#include "client/kld.h"

static inline struct kld_request small_request(uint64_t rows, uint64_t classes, float *predictions,
                                               float *targets, float *gradient) {
    struct kld_request request;
    memset(&request, 0, sizeof request);
    kld_op_init(&request.op);
    request.op.rank = 2;
    request.op.shape[0] = rows;
    request.op.shape[1] = classes;
    const enum kld_slot slots[] = {KLD_SLOT_PREDICTIONS, KLD_SLOT_TARGETS,
                                   KLD_SLOT_GRAD_PREDICTIONS};
    float *const data[] = {predictions, targets, gradient};
    for (int i = 0; i < 3; i++) {
        request.op.tensor[slots[i]].dtype = KLD_DTYPE_FP32;
        request.bytes[slots[i]].data = data[i];
    }
    return request;
}

#endif
