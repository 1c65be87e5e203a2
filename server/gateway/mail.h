/* mail.h - how one loop tells another something: letters, read in order on the loop that they were
 * sent to. A letter lies in its sender's struct and is the receiver's until it has been read.
 * kld_mail_post() from any thread; the rest on the loop's own. */
#ifndef KLD_SERVER_GATEWAY_MAIL_H
#define KLD_SERVER_GATEWAY_MAIL_H

#include <uv.h>

#include "proto/status.h"

struct kld_letter {
    struct kld_letter *next;
    void (*read)(struct kld_letter *letter); /* on the receiver's loop */
};

struct kld_mail {
    uv_async_t async;
    uv_mutex_t mutex;
    struct kld_letter *first, *last; /* under the mutex */
    void (*closed)(struct kld_mail *mail);
};

enum kld_status kld_mail_open(struct kld_mail *mail, uv_loop_t *loop, struct kld_error *err);
void kld_mail_post(struct kld_mail *mail, struct kld_letter *letter);
/* Nobody posts any more. closed() comes on the loop. */
void kld_mail_close(struct kld_mail *mail, void (*closed)(struct kld_mail *mail));

#endif
