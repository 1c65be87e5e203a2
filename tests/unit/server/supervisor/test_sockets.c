/* test_sockets.c - the Unix socket of the supervisor: what it replaces, and who cannot hold it up.
 */
#include "tests/unit/unit.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "server/supervisor/supervisor.h"

static char folder[64], path[100];
static uint64_t lock_waited_ns;
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
    ck_assert_int_eq(kld_unix_socket_open(path, 0600, false, &lock_waited_ns, &first, &error),
                     KLD_OK);
    ck_assert_int_eq(stat(path, &info), 0);
    ck_assert_uint_eq(info.st_mode & 0777, 0600);
    ck_assert_int_eq(kld_unix_socket_open(path, 0600, false, &lock_waited_ns, &second, &error),
                     KLD_EXISTS);
    close(first.fd); /* dies; its file stays */
    ck_assert_int_eq(kld_unix_socket_open(path, 0660, false, &lock_waited_ns, &second, &error),
                     KLD_OK);
    kld_unix_socket_close(&second, path);
    ck_assert_int_ne(stat(path, &info), 0);
    int file = open(path, O_CREAT | O_WRONLY, 0600);
    close(file);
    ck_assert_int_eq(kld_unix_socket_open(path, 0600, false, &lock_waited_ns, &second, &error),
                     KLD_EXISTS);
    teardown();
}
END_TEST

START_TEST(test_lock_of_somebody_else_is_not_waited_for) {
    struct kld_unix_socket opened;
    setup();
    int holder = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ck_assert_int_eq(flock(holder, LOCK_EX), 0);
    ck_assert_int_eq(kld_unix_socket_open(path, 0600, false, &lock_waited_ns, &opened, &error),
                     KLD_OK);
    kld_unix_socket_close(&opened, path);
    close(holder);
    teardown();
}
END_TEST

static void *end_in_order(void *fd) {
    usleep(300000); /* by then it was asked */
    unlink(path);
    close(*(int *)fd);
    return NULL;
}

/* As one that was told to end and has no worker any more, while its successor starts. */
START_TEST(test_one_that_ends_in_order_meanwhile_is_not_waited_for) {
    struct kld_unix_socket opened;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timespec begun, ended;
    pthread_t thread;
    setup();
    int old = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    ck_assert_int_eq(bind(old, (struct sockaddr *)&address, sizeof address), 0);
    ck_assert_int_eq(listen(old, 8), 0); /* answers nothing */
    clock_gettime(CLOCK_MONOTONIC, &begun);
    ck_assert_int_eq(pthread_create(&thread, NULL, end_in_order, &old), 0);
    ck_assert_int_eq(kld_unix_socket_open(path, 0600, false, &lock_waited_ns, &opened, &error),
                     KLD_OK);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    pthread_join(thread, NULL);
    ck_assert_int_lt(ended.tv_sec - begun.tv_sec, 4);
    kld_unix_socket_close(&opened, path);
    teardown();
}
END_TEST

UNIT_MAIN("server/supervisor/sockets", test_only_a_dead_socket_is_replaced,
          test_lock_of_somebody_else_is_not_waited_for,
          test_one_that_ends_in_order_meanwhile_is_not_waited_for)
