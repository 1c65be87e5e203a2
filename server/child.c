/* child.c - what a child tells the supervisor over the control socket.
 * One packet each time; the supervisor's side is supervisor/child.c. Main thread of a child. */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "server/role.h"

void kld_child_report_send(enum kld_status status, const char *backend, uint32_t devices,
                           const char *text) {
    struct kld_child_report report;
    memset(&report, 0, sizeof report);
    report.status = (uint32_t)status;
    report.devices = devices;
    snprintf(report.backend, sizeof report.backend, "%s", backend ? backend : "");
    snprintf(report.text, sizeof report.text, "%s", text ? text : "");
    /* Not checked: a supervisor that is gone ends this child anyway (role.h). */
    (void)!send(KLD_FD_CONTROL, &report, sizeof report, MSG_NOSIGNAL);
}

void kld_child_alive_send(int control_fd) {
    (void)!send(control_fd, "!", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}
