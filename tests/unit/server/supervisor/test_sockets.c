/* test_sockets.c - the Unix socket of the supervisor: what it replaces, and who cannot hold it up.
 */
#include "tests/unit/unit.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/supervisor/supervisor.h"

static char folder[64], path[128];
static struct kld_error error;

static void setup(void) {
    snprintf(folder, sizeof folder, "/tmp/kld-sockets-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/kld.sock", folder);
}

static void teardown(void) {
    unlink(path);
    ck_assert_int_eq(rmdir(folder), 0);
}

START_TEST(test_only_a_dead_socket_is_replaced) {
    struct kld_unix_socket first, second;
    struct stat info;
    setup();
    ck_assert_int_eq(kld_unix_socket_open(path, 0600, false, &first, &error), KLD_OK);
    ck_assert_int_eq(stat(path, &info), 0);
    ck_assert_uint_eq(info.st_mode & 0777, 0600);
    ck_assert_int_eq(kld_unix_socket_open(path, 0600, false, &second, &error), KLD_EXISTS);
    close(first.fd); /* dies; its file stays */
    ck_assert_int_eq(kld_unix_socket_open(path, 0660, false, &second, &error), KLD_OK);
    kld_unix_socket_close(&second, path);
    ck_assert_int_ne(stat(path, &info), 0);
    int file = open(path, O_CREAT | O_WRONLY, 0600);
    close(file);
    ck_assert_int_eq(kld_unix_socket_open(path, 0600, false, &second, &error), KLD_EXISTS);
    teardown();
}
END_TEST

START_TEST(test_lock_of_somebody_else_is_not_waited_for) {
    struct kld_unix_socket opened;
    setup();
    int holder = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ck_assert_int_eq(flock(holder, LOCK_EX), 0);
    ck_assert_int_eq(kld_unix_socket_open(path, 0600, false, &opened, &error), KLD_OK);
    kld_unix_socket_close(&opened, path);
    close(holder);
    teardown();
}
END_TEST

UNIT_MAIN("server/supervisor/sockets", test_only_a_dead_socket_is_replaced,
          test_lock_of_somebody_else_is_not_waited_for)
