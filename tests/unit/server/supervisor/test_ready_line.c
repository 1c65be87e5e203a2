/* test_ready_line.c - what is closed with a ready line that was never opened. How a server fares
 * whose line nobody reads is tested end to end. */
#include <fcntl.h>
#include <unistd.h>

#include "server/supervisor/ready_line.h"
#include "tests/unit/unit.h"

/* As of a start that is refused before there is a loop. */
START_TEST(unopened_closes_nothing) {
    struct kld_ready_line line = {.bytes = 0};
    int pair[2];
    ck_assert_int_eq(pipe(pair), 0);
    ck_assert_int_eq(dup2(pair[0], STDIN_FILENO), STDIN_FILENO);
    kld_ready_line_close(&line);
    ck_assert_int_ge(fcntl(STDIN_FILENO, F_GETFD), 0);
    close(pair[0]);
    close(pair[1]);
}
END_TEST

UNIT_MAIN("server/supervisor/ready_line", unopened_closes_nothing)
