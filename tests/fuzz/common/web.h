/* web.h - a raw HTTP client that keeps account: as long as it sent whole requests only, each is
 * answered, in order, by a reply that is whole, or by the announced end of the connection. */
#ifndef KLD_TESTS_FUZZ_WEB_H
#define KLD_TESTS_FUZZ_WEB_H

#include <netinet/in.h>

#include "tests/fuzz/common/fuzz.h"

#define FUZZ_REPLY_MAX (1 << 20)
/* A server drops more than that (KLD_HTTP_DISCARD_BYTES_MAX) of what comes behind its last reply.
 */
#define FUZZ_SENT_MAX (60 << 20)

struct fuzz_web {
    int fd; /* -1: not connected */
    struct sockaddr_in address;
    bool raw;       /* bytes were sent that may be no request, or it was cut */
    bool closes;    /* a reply said that it is the last one */
    uint64_t sent;  /* bytes since all was answered; with more than FUZZ_SENT_MAX it is raw */
    uint64_t heads; /* requests are asked for a reply without a body: bit i of those not answered */
    unsigned asked; /* requests without a reply yet */
    unsigned status;  /* of the last reply */
    size_t have;      /* bytes in `text` */
    const char *body; /* of the last reply, in `last` */
    size_t body_bytes;
    char text[FUZZ_REPLY_MAX], last[FUZZ_REPLY_MAX];
};

extern uint64_t fuzz_web_opened;           /* connections so far */
void fuzz_web_open(struct fuzz_web *web);  /* to web->address */
void fuzz_web_close(struct fuzz_web *web); /* with a reset: no port is kept in use */
/* All of it, reading replies meanwhile where the server wants that; false: the server has ended the
 * connection. */
bool fuzz_web_send(struct fuzz_web *web, const void *data, size_t bytes);
/* A whole request is about to be sent. */
void fuzz_web_ask(struct fuzz_web *web, bool head);
/* Takes what came within ms; false: the connection has ended, which a reply has announced, and
 * without a reset, which could take replies along; not where it is raw. */
bool fuzz_web_take(struct fuzz_web *web, int ms);
/* Until all that was asked is answered, or a reply has announced the end. */
void fuzz_web_settle(struct fuzz_web *web);

#endif
