/* roll.c - letters to the other loops and back (roll.h). */
#include "server/gateway/roll.h"

#include <stddef.h>
#include <stdlib.h>

/* To one of the other loops. It is that one's until it comes back. */
struct call {
    struct kld_letter letter;
    struct kld_roll *roll;      /* constant */
    struct kld_gateway *called; /* constant */
};

struct kld_roll {
    struct kld_gateway *first;    /* constant */
    void (*all_turn)(void *user); /* constant */
    void *user;                   /* constant */
    uint32_t others;              /* constant */
    uint32_t out;                 /* letters that have not come back; the first loop's */
    struct call call[];
};

static struct call *call_of(struct kld_letter *letter) {
    return (struct call *)(void *)((char *)letter - offsetof(struct call, letter));
}

/* On the first loop. */
static void read_back(struct kld_letter *letter) {
    struct kld_roll *roll = call_of(letter)->roll;
    if (--roll->out == 0)
        roll->all_turn(roll->user);
}

/* On the one that was called. */
static void read_call(struct kld_letter *letter) {
    letter->read = read_back;
    kld_mail_post(&call_of(letter)->roll->first->mail, letter);
}

enum kld_status kld_roll_open(struct kld_gateway *const *loops, uint32_t count,
                              void (*all_turn)(void *user), void *user, struct kld_roll **ret_roll,
                              struct kld_error *err) {
    struct kld_roll *roll = calloc(1, sizeof *roll + (count - 1) * sizeof roll->call[0]);
    *ret_roll = roll;
    if (!roll)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    roll->first = loops[0];
    roll->all_turn = all_turn;
    roll->user = user;
    roll->others = count - 1;
    for (uint32_t i = 0; i < roll->others; i++) {
        roll->call[i].roll = roll;
        roll->call[i].called = loops[i + 1];
    }
    return KLD_OK;
}

void kld_roll_call(struct kld_roll *roll) {
    if (roll->out)
        return;
    if (roll->others == 0) {
        roll->all_turn(roll->user);
        return;
    }
    roll->out = roll->others; /* before one of them comes back, for which we have to turn */
    for (uint32_t i = 0; i < roll->others; i++) {
        roll->call[i].letter.read = read_call;
        kld_mail_post(&roll->call[i].called->mail, &roll->call[i].letter);
    }
}

void kld_roll_close(struct kld_roll *roll) { free(roll); }
