/* mail.c - a list under a mutex and a wake-up (mail.h). */
#include "server/gateway/mail.h"

#include <stddef.h>

static void arrived(uv_async_t *async) {
    struct kld_mail *mail = async->data;
    uv_mutex_lock(&mail->mutex);
    struct kld_letter *letter = mail->first;
    mail->first = mail->last = NULL;
    uv_mutex_unlock(&mail->mutex);
    while (letter) {
        struct kld_letter *next = letter->next; /* reading may free it or send it again */
        letter->read(letter);
        letter = next;
    }
}

enum kld_status kld_mail_open(struct kld_mail *mail, uv_loop_t *loop, struct kld_error *err) {
    mail->first = mail->last = NULL;
    if (uv_mutex_init(&mail->mutex) != 0 || uv_async_init(loop, &mail->async, arrived) != 0)
        return kld_error_set(err, KLD_NO_MEMORY, "a loop cannot be woken");
    mail->async.data = mail;
    return KLD_OK;
}

void kld_mail_post(struct kld_mail *mail, struct kld_letter *letter) {
    letter->next = NULL;
    uv_mutex_lock(&mail->mutex);
    if (mail->last)
        mail->last->next = letter;
    else
        mail->first = letter;
    mail->last = letter;
    uv_mutex_unlock(&mail->mutex);
    uv_async_send(&mail->async);
}

static void handle_closed(uv_handle_t *handle) {
    struct kld_mail *mail = handle->data;
    uv_mutex_destroy(&mail->mutex);
    mail->closed(mail);
}

void kld_mail_close(struct kld_mail *mail, void (*closed)(struct kld_mail *mail)) {
    mail->closed = closed;
    arrived(&mail->async); /* what came last */
    uv_close((uv_handle_t *)&mail->async, handle_closed);
}
