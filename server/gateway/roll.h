/* roll.h - do all HTTP loops turn? The first one sends each of the others a letter, which comes
 * back as soon as that one turns. First loop's thread but for the letters that are out. */
#ifndef KLD_SERVER_GATEWAY_ROLL_H
#define KLD_SERVER_GATEWAY_ROLL_H

#include "server/gateway/gateway.h"

struct kld_roll;

/* loops: count of them, each with its mail open. all_turn() comes on the first one's thread. */
enum kld_status kld_roll_open(struct kld_gateway *const *loops, uint32_t count,
                              void (*all_turn)(void *user), void *user, struct kld_roll **ret_roll,
                              struct kld_error *err);
/* all_turn() comes once each of them has turned since; at once where there is but one. While it has
 * yet to come for an earlier call this one adds nothing. Not after the letter that has another loop
 * close its mail was sent: what is out by then comes back before that is read. */
void kld_roll_call(struct kld_roll *roll);
/* Nobody has mail any more. NULL: nothing. */
void kld_roll_close(struct kld_roll *roll);

#endif
