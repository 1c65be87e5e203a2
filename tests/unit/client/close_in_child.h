/* close_in_child.h - kld_close() in a child made by fork(): it ends, and at once. */
#ifndef KLD_TESTS_CLOSE_IN_CHILD_H
#define KLD_TESTS_CLOSE_IN_CHILD_H

#include <sys/wait.h>
#include <unistd.h>

#include "client/kld.h"
#include "tests/unit/unit.h"

static inline void close_in_child(struct kld_connection *connection) {
    pid_t child = fork();
    if (child == 0) {
        alarm(10);
        kld_close(connection);
        /* Not _exit(): valgrind and LeakSanitizer would look here for what threads of the parent
         * alone hold, on stacks that nobody has in this process. */
        execl("/bin/true", "true", (char *)NULL);
        _exit(1);
    }
    int status;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_int_eq(status, 0);
}

#endif
