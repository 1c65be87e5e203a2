/* split.h - the inside of a connection to several servers: shared by split.c (which part goes
 * where, the connection's table), split_servers.c (who there is, and who is lost) and split_job.c
 * (what a part is, and the whole of them). Everything belongs to the thread that owns the
 * connection.
 *
 * Each server is a connection of its own, a member, whose descriptor is watched by the split's. A
 * call is cut into ranges of rows; a range at a member is a part. Rows do not depend on each other,
 * so gradients, and losses of rows and elements, land where they belong; of a loss that is one
 * number the parts bring the terms, in FP64, which are added here in the order of proto/sum.h. */
#ifndef KLD_CLIENT_SPLIT_H
#define KLD_CLIENT_SPLIT_H

#include "client/connection.h"

#define SPLIT_SERVERS_MAX 64
#define SPLIT_DEPTH 2        /* parts at a member: one is computed while the next one travels */
#define SPLIT_PARTS_WANTED 4 /* for each server: who is slower gets fewer of them */
#define SPLIT_URL_MAX 512

struct split_range {
    uint64_t first, rows;
    uint32_t tries;         /* servers that could not */
    uint32_t device_losses; /* of them, those whose device failed: it may be what kills them */
};

struct split_call {
    struct kld_call base;
    /* The request of a part but for its rows and addresses; set by kld_split_plan(). */
    struct kld_request part;
    char *at[KLD_SLOT_COUNT]; /* the whole tensors; NULL: absent */
    bool scalar;              /* a loss that is added up here */
    bool zero;                /* rowmean over weights that sum to 0 */
    bool negative;            /* terms come with the other sign, since a normalizer has none */
    double divisor;           /* of the sum, above 0: 1 if `zero` */
    double *terms;            /* [rows]; owned; NULL where nothing is added up */
    uint64_t part_rows;

    uint64_t next_row;  /* the first that no range has had yet */
    uint64_t done_rows; /* whose results are here */
    struct split_range again[SPLIT_SERVERS_MAX * SPLIT_DEPTH]; /* ranges that came back undone */
    uint32_t again_count, in_flight;
    uint64_t progress_ns;   /* when something was last done for it */
    struct kld_error error; /* status not KLD_OK: it ends so, when no part is in flight any more */
};

struct split_part {
    struct split_call *call; /* NULL: free */
    struct split_server *server;
    struct split_range range;
    uint64_t id;         /* of the member's request */
    bool until_deadline; /* its time is all that its call has left, and no part_timeout_ns */
    bool has_time;       /* and that would do for a server that is there */
    void *scratch[2]; /* gradients that go over their own tensor, until all of it is here; owned */
};

enum split_state {
    SPLIT_AWAY,    /* asked again at retry_at_ns */
    SPLIT_READY,   /* takes parts */
    SPLIT_REFUSED, /* computes otherwise than the others, or does not let us in */
};

struct split_server {
    struct split_connection *split;
    struct kld_connection *member; /* owned */
    char name[128];                /* its URL, without a name and password in it */
    enum split_state state;
    bool answered; /* it was ready once */
    uint64_t retry_at_ns, pause_ns;
    uint32_t late;     /* calls since its last answer that ended while a part of them had time */
    uint64_t asked_ns; /* what the last question took that was in vain, the most it may */
    uint64_t links;    /* of the member when it was last asked who it is */
    struct kld_error error; /* what it said last, of a server that is not ready */
    uint32_t busy;
    struct split_part part[SPLIT_DEPTH];
};

struct split_connection {
    struct kld_connection base;
    struct split_server *servers; /* owned */
    uint32_t count, next;         /* next: where the search for a free one begins */
    struct kld_call_list calls;   /* in flight, in the order in which they get servers */
    struct kld_server_info info;  /* what all that are ready have in common; its version: or "" */
    char kind[80];                /* what decides the bits; "": no server has answered yet */
};

static inline uint64_t kld_split_smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* split_servers.c. Does a status say something about the server that others need not share, and
 * that may pass? */
bool kld_split_is_of_server(enum kld_status status);
/* One that does not come back by waiting: it does not let us in, or speaks otherwise. */
bool kld_split_is_refusal(enum kld_status status);
/* Does it answer, and is it one of them? It may take a second, the first times less; sets error,
 * and state but where it may be asked again. */
enum kld_status kld_split_server_ask(struct split_server *server);
/* It could not do what it was asked, and is left alone for a while. */
void kld_split_server_leave(struct split_server *server, const struct kld_error *error);
/* What each of them said, as far as it fits. */
enum kld_status kld_split_none_left(const struct split_connection *split, struct kld_error *err);
enum kld_status kld_split_open(struct kld_connection *connection, const char *url,
                               struct kld_error *err);
enum kld_status kld_split_info(struct kld_connection *connection, struct kld_server_info *ret_info,
                               struct kld_error *err);
bool kld_split_missing(const struct kld_connection *connection, uint32_t index,
                       struct kld_error *ret_why);
enum kld_status kld_split_ping(struct kld_connection *connection, struct kld_error *err);

/* split_job.c. Plans a call whose request was checked.
 */
enum kld_status kld_split_plan(struct split_call *call, uint32_t servers, uint64_t part_bytes_max,
                               struct kld_error *err);
/* The request for a part's range. */
enum kld_status kld_split_part_make(struct split_part *part, struct kld_request *ret_request,
                                    struct kld_error *err);
/* A part has come back: what is not in its place yet is put there. */
void kld_split_part_take(struct split_part *part, const struct kld_result *result);
void kld_split_part_free(struct split_part *part);
/* All rows are here: the loss, and what follows from it. */
void kld_split_finish(struct split_call *call);
void kld_split_call_free(struct split_call *call);

#endif
