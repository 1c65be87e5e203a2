/* client.h - a conversation of libkld with a server, in parts, each for itself, during which any
 * call below libkld may fail: what came of it, as faillib.py has it for servers. */
#ifndef KLD_TESTS_FAIL_CLIENT_H
#define KLD_TESTS_FAIL_CLIENT_H

#include "client/kld.h"

/* The worst that happened counts. */
enum outcome {
    RIGHT,  /* every answer */
    CLEAR,  /* an error that says what was wrong, and does not blame the caller */
    BLAMED, /* an error that blames the caller, who did nothing wrong */
    WRONG,  /* an answer, or an error without its text */
};

struct script {
    const char *url, *other_url; /* of split: two; else the second is NULL */
    enum outcome outcome;
    char text[512];         /* of the first error, or the first wrong answer */
    struct kld_error error; /* of the call that is being made */
};

/* What a part is to call before and after a stretch during which nothing may fail. */
void calm_begins(void);
void calm_ends(void);

struct part {
    const char *name;
    void (*run)(struct script *script);
};
extern const struct part client_parts[];

/* What parts need beyond libkld, made before anything fails. False: it cannot be. */
bool client_parts_open(void);

#endif
