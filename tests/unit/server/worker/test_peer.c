/* test_peer.c - the lists of users and groups. A peer on a socket pair is this process. */
#include "server/worker/peer.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/unit.h"

static enum kld_status lists(struct kld_peers *peers, const char *uids, const char *gids) {
    static struct kld_config config;
    struct kld_error err;
    snprintf(config.allow_uids, sizeof config.allow_uids, "%s", uids);
    snprintf(config.allow_gids, sizeof config.allow_gids, "%s", gids);
    memset(peers, 0, sizeof *peers);
    return kld_peers_init(peers, &config, &err);
}

static const struct kld_gateway_process no_gateway = {.pidfd = -1};

START_TEST(lists_are_parsed) {
    struct kld_peers peers;
    ck_assert_int_eq(lists(&peers, "", ""), KLD_OK);
    ck_assert_uint_eq(peers.uids_count + peers.gids_count, 0);
    ck_assert_int_eq(lists(&peers, "0,1000,4294967294", "7"), KLD_OK);
    ck_assert_uint_eq(peers.uids_count, 3);
    ck_assert_uint_eq(peers.uids[2], 4294967294u);
    ck_assert_uint_eq(peers.gids[0], 7);
    const char *const bad[] = {"x", "1,x", "-1", "1;2", " 1", "1,,2", "4294967295", "1 "};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        ck_assert_msg(lists(&peers, bad[i], "") == KLD_INVALID, "'%s' was taken", bad[i]);
    char many[3 * KLD_PEER_LIST_MAX] = "1";
    for (int i = 0; i < KLD_PEER_LIST_MAX; i++)
        strcat(many, ",2");
    ck_assert_int_eq(lists(&peers, many, ""), KLD_TOO_LARGE);
}
END_TEST

static struct kld_error why; /* of the last check */

/* Connects as another user and returns what the check says. */
static enum kld_status check_as(const struct kld_peers *peers, uid_t uid, gid_t gid) {
    struct sockaddr_un_any {
        sa_family_t family;
        char path[108];
    } address = {.family = AF_UNIX};
    socklen_t bytes = sizeof address;
    int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    ck_assert_int_eq(bind(listener, (struct sockaddr *)&address, sizeof(sa_family_t)), 0);
    getsockname(listener, (struct sockaddr *)&address, &bytes);
    listen(listener, 1);
    pid_t child = fork();
    if (child == 0) {
        if (setgid(gid) == 0 && setuid(uid) == 0)
            connect(socket(AF_UNIX, SOCK_SEQPACKET, 0), (struct sockaddr *)&address, bytes);
        _exit(0);
    }
    int fd = accept(listener, NULL, NULL);
    struct ucred peer;
    enum kld_status status = kld_peer_check(peers, &no_gateway, fd, &peer, &why);
    ck_assert_uint_eq(peer.uid, uid);
    waitpid(child, NULL, 0);
    close(fd);
    close(listener);
    return status;
}

START_TEST(users_and_groups_pass_by_either_list) {
    UNIT_NEEDS(geteuid() == 0, "root, who alone can become somebody else");
    struct kld_peers peers;
    lists(&peers, "", "");
    ck_assert_int_eq(check_as(&peers, 1234, 1234), KLD_OK);
    lists(&peers, "1234", "77");
    ck_assert_int_eq(check_as(&peers, 1234, 1), KLD_OK);
    ck_assert_int_eq(check_as(&peers, 5, 77), KLD_OK);
    ck_assert_int_eq(check_as(&peers, 0, 0), KLD_OK); /* our own user */
    ck_assert_int_eq(check_as(&peers, 5, 5), KLD_FORBIDDEN);
    lists(&peers, "1234", "");
    ck_assert_int_eq(check_as(&peers, 5, 1234), KLD_FORBIDDEN);
}
END_TEST

/* What /proc says of a process, in a folder of the test's. text NULL: no such file. */
static void write_file(const char *folder, const char *name, const char *text) {
    char path[96];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    unlink(path);
    FILE *file = text ? fopen(path, "w") : NULL;
    ck_assert(!text == !file);
    if (!file)
        return;
    fputs(text, file);
    fclose(file);
}

START_TEST(nobody_is_whoever_is_not_mapped) {
    const struct {
        const char *map, *overflow;
        uint32_t nobody;
    } cases[] = {
        {"         0          0 4294967295\n", "65534\n", KLD_PEER_NONE},
        {"0 0 1000\n1000 1000 4294966295\n", "65534\n", KLD_PEER_NONE},
        {"0 1000 1\n1 100000 65536\n", "65534\n", 65534}, /* and 65534 is among these */
        {"0 0 4294967294\n", "4711\n", 4711},
        {"", "65534\n", 65534},
        {"0 0 1\n", "", 65534},
    };
    char folder[] = "/tmp/kld-test-peer-XXXXXX", overflow[64];
    bool known = false;
    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(overflow, sizeof overflow, "%s/overflow", folder);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_file(folder, "uid_map", cases[i].map);
        write_file(folder, "overflow", cases[i].overflow);
        ck_assert_uint_eq(kld_peer_nobody(folder, "uid_map", overflow, &known), cases[i].nobody);
        ck_assert(known);
    }
    write_file(folder, "uid_map", NULL);
    write_file(folder, "overflow", "4711\n");
    ck_assert_uint_eq(kld_peer_nobody(folder, "uid_map", overflow, &known), 4711);
    ck_assert_msg(!known, "nothing of the process is there");
    write_file(folder, "status", "");
    ck_assert_uint_eq(kld_peer_nobody(folder, "uid_map", overflow, &known), KLD_PEER_NONE);
    ck_assert_msg(known, "a kernel without user namespaces");
    write_file(folder, "status", NULL);
    write_file(folder, "overflow", NULL);
    rmdir(folder);
    ck_assert_uint_eq(kld_peer_nobody("/nowhere", "uid_map", "/nowhere", &known), 65534);
    ck_assert(!known);
}
END_TEST

START_TEST(nobody_may_not_connect) {
    UNIT_NEEDS(geteuid() == 0, "root, who alone can become somebody else");
    struct kld_peers peers;
    lists(&peers, "", "");
    peers.nobody_uid = peers.nobody_gid = 1234;
    ck_assert_int_eq(check_as(&peers, 1234, 5), KLD_FORBIDDEN);
    ck_assert_ptr_nonnull(strstr(why.text, "its uid is not mapped"));
    peers.uids_known = false;
    ck_assert_int_eq(check_as(&peers, 1234, 5), KLD_FORBIDDEN);
    ck_assert_ptr_nonnull(strstr(why.text, "cannot read which those are (/proc/self/uid_map)"));
    ck_assert_uint_lt(strlen(why.text), sizeof why.text - 1);
    ck_assert_int_eq(check_as(&peers, 5, 1234), KLD_OK);
    lists(&peers, "1234,6", "1234,7");
    peers.nobody_uid = peers.nobody_gid = 1234;
    ck_assert_int_eq(check_as(&peers, 1234, 7), KLD_FORBIDDEN);
    ck_assert_int_eq(check_as(&peers, 5, 1234), KLD_FORBIDDEN);
    ck_assert_int_eq(check_as(&peers, 5, 7), KLD_OK);
    ck_assert_int_eq(check_as(&peers, 6, 1234), KLD_OK);
}
END_TEST

/* A process that its parent has not waited for has ended all the same; on a kernel that gives no
 * descriptor of it, it counts as living until then. */
START_TEST(a_dead_process_is_told_from_a_living_one) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t bytes = sizeof address;
    int gate[2], listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    ck_assert_int_eq(bind(listener, (struct sockaddr *)&address, sizeof(sa_family_t)), 0);
    getsockname(listener, (struct sockaddr *)&address, &bytes);
    listen(listener, 1);
    ck_assert_int_eq(pipe(gate), 0);
    pid_t child = fork();
    if (child == 0) {
        char byte;
        close(gate[1]);
        connect(socket(AF_UNIX, SOCK_SEQPACKET, 0), (struct sockaddr *)&address, bytes);
        _exit(read(gate[0], &byte, 1) != 0);
    }
    int fd = accept(listener, NULL, NULL), pidfd = kld_peer_pidfd(fd);
    ck_assert(!kld_peer_is_dead(pidfd, child) && !kld_peer_is_dead(-1, child));
    ck_assert(!kld_peer_is_dead(-1, 0)); /* of another PID namespace */
    close(gate[1]);
    siginfo_t how;
    ck_assert_int_eq(waitid(P_PID, (id_t)child, &how, WEXITED | WNOWAIT), 0);
    ck_assert_int_eq(kld_peer_is_dead(pidfd, child), pidfd >= 0);
    ck_assert(!kld_peer_is_dead(-1, child));
    ck_assert_int_eq(waitpid(child, NULL, 0), child);
    ck_assert(kld_peer_is_dead(pidfd, child) && kld_peer_is_dead(-1, child));
    if (pidfd >= 0)
        ck_assert(kld_peer_is_dead(pidfd, 0)); /* it has no number here, and needs none */
}
END_TEST

/* By number and descriptor; whose child it is says nothing. */
START_TEST(the_gateway_is_the_process_that_was_named) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t bytes = sizeof address;
    int gate[2], listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    ck_assert_int_eq(bind(listener, (struct sockaddr *)&address, sizeof(sa_family_t)), 0);
    getsockname(listener, (struct sockaddr *)&address, &bytes);
    listen(listener, 1);
    ck_assert_int_eq(pipe(gate), 0);
    pid_t child = fork(), other;
    if (child == 0) {
        char byte;
        close(gate[1]);
        connect(socket(AF_UNIX, SOCK_SEQPACKET, 0), (struct sockaddr *)&address, bytes);
        _exit(read(gate[0], &byte, 1) != 0);
    }
    if ((other = fork()) == 0)
        _exit(0);
    int fd = accept(listener, NULL, NULL);
    struct kld_gateway_process none = {.pidfd = -1}, named = {child, pidfd_open(child, 0)},
                               by_number = {child, -1}, sibling = {getpid(), -1},
                               reused = {child, pidfd_open(other, 0)};
    ck_assert_int_eq(waitpid(other, NULL, 0), other);
    ck_assert(kld_peer_is_gateway(&named, fd) && kld_peer_is_gateway(&by_number, fd));
    ck_assert(!kld_peer_is_gateway(&none, fd) && !kld_peer_is_gateway(&sibling, fd));
    ck_assert(!kld_peer_is_gateway(&reused, fd)); /* the one that was named has ended */
    close(gate[1]);
    ck_assert_int_eq(waitpid(child, NULL, 0), child);
    ck_assert(!kld_peer_is_gateway(&named, fd) && !kld_peer_is_gateway(&by_number, fd));
}
END_TEST

START_TEST(what_is_no_socket_is_refused) {
    struct kld_peers peers;
    struct ucred peer;
    struct kld_error err;
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    lists(&peers, "", "");
    ck_assert_int_eq(kld_peer_check(&peers, &no_gateway, fds[0], &peer, &err), KLD_FORBIDDEN);
}
END_TEST

UNIT_MAIN("server/worker/peer", lists_are_parsed, users_and_groups_pass_by_either_list,
          nobody_is_whoever_is_not_mapped, nobody_may_not_connect,
          a_dead_process_is_told_from_a_living_one, the_gateway_is_the_process_that_was_named,
          what_is_no_socket_is_refused)
