/* test_table_list.c - the list of kernel cases loses none: one that it has no room for ends the
 * program. */
#include "tests/unit/unit.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/kernels/table_list.h"

START_TEST(test_more_than_room) {
    struct table_case cases[2];
    struct table_list list = {.at = cases, .room = 2};
    ck_assert_ptr_eq(table_list_add(&list, "first", 1, 1), &cases[0]);
    ck_assert_ptr_eq(table_list_add(&list, "second", 1, 1), &cases[1]);
    ck_assert_uint_eq(list.count, 2);
    pid_t child = fork();
    ck_assert_int_ge(child, 0);
    if (child == 0) {
        table_list_add(&list, "third", 1, 1);
        _exit(0);
    }
    int status;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}
END_TEST

UNIT_MAIN("kernels/table_list", test_more_than_room)
