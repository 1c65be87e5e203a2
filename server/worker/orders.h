/* orders.h - what the supervisor tells the worker. Loop thread. */
#ifndef KLD_SERVER_WORKER_ORDERS_H
#define KLD_SERVER_WORKER_ORDERS_H

#include <stdbool.h>

#include "proto/status.h"

struct kld_worker;

/* Listens to options.control_fd, if there is one; the worker drains when that ends. */
enum kld_status kld_orders_init(struct kld_worker *worker, struct kld_error *err);
void kld_orders_done(struct kld_worker *worker);
/* Follows what has come by now. False: the supervisor is gone. */
bool kld_orders_hear(struct kld_worker *worker);

#endif
