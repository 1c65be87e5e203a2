/* oip_texts.h - the tensors of the infer requests that the tests of Open Inference JSON parse, and
 * where those land. */
#ifndef KLD_TESTS_UNIT_PROTO_OIP_TEXTS_H
#define KLD_TESTS_UNIT_PROTO_OIP_TEXTS_H

#include <string.h>

#include "proto/oip.h"

static struct kld_oip_request request;
static struct kld_error err;

static enum kld_status parse(const char *text) {
    memset(&err, 0, sizeof err);
    return kld_oip_parse(text, strlen(text), NULL, &request, &err);
}

#define P "{\"name\":\"predictions\",\"shape\":[1,2],\"datatype\":\"FP32\",\"data\":[0.5,0.5]}"
#define T "{\"name\":\"targets\",\"shape\":[1,2],\"datatype\":\"FP32\",\"data\":[[0.25,0.75]]}"
#define INPUTS "\"inputs\":[" P "," T "]"

#endif
