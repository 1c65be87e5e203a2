/* fake_http.h - an HTTP server for tests of libkld: answers infer requests over a real socket, in
 * threads of the test's process, and misbehaves on demand. Of predictions and targets, FP32 and
 * equally large, it computes loss = sum of predictions - sum of targets, row_loss (FP64) the same
 * of each row, and grad_predictions = 2 * predictions. */
#ifndef KLD_TESTS_FAKE_HTTP_H
#define KLD_TESTS_FAKE_HTTP_H

#include <pthread.h>
#include <stdatomic.h>

enum fake_http_mode {
    FAKE_HTTP_GOOD,
    FAKE_HTTP_BUSY,       /* 503 with an error text and Retry-After: 0 */
    FAKE_HTTP_BUSY_1S,    /* the same with Retry-After: 1 */
    FAKE_HTTP_LOST,       /* 503 whose KLD-Status says device_lost */
    FAKE_HTTP_INVALID,    /* 400 with an error text */
    FAKE_HTTP_LOCKED,     /* 401 with an error text */
    FAKE_HTTP_PLAIN_500,  /* 500, not JSON */
    FAKE_HTTP_HANG_UP,    /* the connection is closed without an answer */
    FAKE_HTTP_CUT,        /* the connection is closed in the middle of the tail */
    FAKE_HTTP_SHORT,      /* the tail is shorter than the JSON says */
    FAKE_HTTP_LONG,       /* the tail is longer */
    FAKE_HTTP_NONSENSE,   /* the JSON part is none */
    FAKE_HTTP_WRONG_SIZE, /* an output of another size than asked for */
    FAKE_HTTP_NO_LENGTH,  /* no Inference-Header-Content-Length */
    FAKE_HTTP_SILENT,     /* no answer at all, the connection stays */
    FAKE_HTTP_LATE,       /* a good answer, after 300 ms */
    FAKE_HTTP_IN_PIECES,  /* a good answer, a few bytes at a time */
};

struct fake_http {
    char url[64];
    atomic_int mode; /* of the next `times` infer requests; good ones afterwards */
    atomic_int times;
    atomic_int requests, not_ready;    /* not_ready: so many times is /v2/health/ready a 503 */
    _Atomic(const char *) metadata;    /* what GET /v2 says; NULL: "fake", "1.2" and nothing else */
    _Atomic(const char *) turned_away; /* so long GET /v2 is answered with this status line */
    char last_head[4096];              /* the JSON of the last infer request */
    char last_authorization[256], last_traceparent[64]; /* "0": none */

    int listener;
    pthread_t thread;
    pthread_mutex_t lock; /* of the three texts */
    atomic_int stop, threads;
};

void fake_http_open(struct fake_http *server);
void fake_http_close(struct fake_http *server);

#endif
