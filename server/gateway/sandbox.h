/* sandbox.h - what the gateway can no longer do once it reads what strangers send: no program is
 * started, no file is opened outside /dev/shm, no network connection is made, no memory becomes
 * code, and no privilege is held. */
#ifndef KLD_SERVER_GATEWAY_SANDBOX_H
#define KLD_SERVER_GATEWAY_SANDBOX_H

#include <stdbool.h>

#include "proto/status.h"

/* Before there is a second thread: threads inherit it. *ret_files:
 * the kernel also bounds files (Landlock); without it only the calls themselves are bounded. */
enum kld_status kld_sandbox_enter(bool *ret_files, struct kld_error *err);
/* Not in builds with a sanitizer, whose run-time needs more. */
bool kld_sandbox_built(void);

#endif
