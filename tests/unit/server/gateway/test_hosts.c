/* test_hosts.c - which names in Host are the server's, and where they matter. */
#include "server/gateway/hosts.h"

#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/unit/unit.h"

static struct kld_config config;
static struct kld_error err;

static bool is_ours(const char *host) { return kld_hosts_check(&config, host, &err) == KLD_OK; }

START_TEST(names_and_addresses) {
    const char *const ours[] = {"localhost", "LOCALHOST:80",    "127.0.0.1",  "10.0.0.1:1",
                                "[::1]",     "[fe80::1]:8080 ", "localhost:", "localhost\t"};
    const char *const foreign[] = {"",      "x",      "localhost.",  "127.0.0.1.x", "::1",
                                   "[::1",  "[::1]x", "localhost:x", "localhost x", "127.1",
                                   "[1.1]", "]",      "[",           ":80"};
    char longest[1024];
    for (size_t i = 0; i < sizeof ours / sizeof ours[0]; i++)
        ck_assert_msg(is_ours(ours[i]), "%s", ours[i]);
    for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++)
        ck_assert_msg(!is_ours(foreign[i]), "%s", foreign[i]);
    for (size_t length = 1; length < sizeof longest; length++) {
        memset(longest, 'a', length);
        longest[length] = '\0';
        ck_assert(!is_ours(longest));
    }
    ck_assert(is_ours(NULL));
}
END_TEST

START_TEST(lists_of_names) {
    strcpy(config.http_hosts, "a.example, B ,,c");
    ck_assert(is_ours("A.example:1") && is_ours("b") && is_ours("c") && is_ours("localhost"));
    ck_assert(!is_ours("a") && !is_ours("a.example.x") && !is_ours("") && !is_ours(","));
    ck_assert(!is_ours("cc") && !is_ours("*") && !is_ours(":1"));
    strcpy(config.http_hosts, "c,*");
    ck_assert(is_ours("x") && is_ours("c"));
}
END_TEST

static int listen_at(uint32_t address) {
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(address)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert(bind(fd, (struct sockaddr *)&any, sizeof any) == 0);
    return fd;
}

START_TEST(where_they_matter) {
    int loopback = listen_at(INADDR_LOOPBACK), any = listen_at(INADDR_ANY);
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&config, 0, sizeof config);
    ck_assert(kld_hosts_matter(&config, loopback) && !kld_hosts_matter(&config, any));
    if (fd >= 0 && bind(fd, (struct sockaddr *)&six, sizeof six) == 0)
        ck_assert(kld_hosts_matter(&config, fd));
    close(fd);
    strcpy(config.http_hosts, "a");
    ck_assert(kld_hosts_matter(&config, any));
    strcpy(config.tokens, "/a");
    ck_assert(!kld_hosts_matter(&config, any) && !kld_hosts_matter(&config, loopback));
    config.tokens[0] = '\0';
    strcpy(config.tls_cert, "/a");
    ck_assert(!kld_hosts_matter(&config, any) && !kld_hosts_matter(&config, loopback));
    close(loopback);
    close(any);
}
END_TEST

UNIT_MAIN("server/gateway/hosts", names_and_addresses, lists_of_names, where_they_matter)
