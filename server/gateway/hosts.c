/* hosts.c - compares what a request calls this server with its names (hosts.h). Asks no name
 * server. Any thread. */
#include "server/gateway/hosts.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

#define HOST_BYTES_MAX 256 /* longer than a name can be */
#define BLANKS " \t"

static bool is_loopback(int fd) {
    struct sockaddr_storage bound = {.ss_family = AF_UNSPEC};
    socklen_t bytes = sizeof bound;
    if (getsockname(fd, (struct sockaddr *)&bound, &bytes) != 0)
        return true; /* the careful answer */
    if (bound.ss_family == AF_INET)
        return ntohl(((struct sockaddr_in *)(void *)&bound)->sin_addr.s_addr) >> 24 == 127;
    if (bound.ss_family != AF_INET6)
        return false;
    const struct in6_addr *v6 = &((struct sockaddr_in6 *)(void *)&bound)->sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(v6) || (IN6_IS_ADDR_V4MAPPED(v6) && v6->s6_addr[12] == 127);
}

bool kld_hosts_matter(const struct kld_config *config, int fd) {
    return !config->tokens[0] && !config->tls_cert[0] && (config->http_hosts[0] || is_loopback(fd));
}

static bool is_port(const char *text) {
    if (*text == ':')
        text += 1 + strspn(text + 1, "0123456789");
    return !text[strspn(text, BLANKS)];
}

static bool is_listed(const char *names, const char *name, size_t size) {
    for (;; names++) {
        names += strspn(names, BLANKS);
        size_t item = strcspn(names, ","), length = item;
        while (length && strchr(BLANKS, names[length - 1]))
            length--;
        if ((length == 1 && *names == '*') ||
            (length && length == size && strncasecmp(names, name, size) == 0))
            return true;
        names += item;
        if (!*names)
            return false;
    }
}

static bool is_ours(const char *host, const char *names) {
    char text[HOST_BYTES_MAX];
    struct in6_addr address;
    bool bracket = *host == '[';
    size_t size = bracket ? strcspn(++host, "]") : strcspn(host, ":" BLANKS);
    const char *rest = host + size;
    if (size >= sizeof text || (bracket && *rest++ != ']') || !is_port(rest))
        return false;
    memcpy(text, host, size);
    text[size] = '\0';
    if (inet_pton(bracket ? AF_INET6 : AF_INET, text, &address) == 1)
        return true;
    return !bracket && (strcasecmp(text, "localhost") == 0 || is_listed(names, text, size));
}

enum kld_status kld_hosts_check(const struct kld_config *config, const char *host,
                                struct kld_error *err) {
    if (!host || is_ours(host, config->http_hosts))
        return KLD_OK;
    return kld_error_set(err, KLD_FORBIDDEN,
                         "the request's Host is neither an address nor localhost nor one of the "
                         "names of this server (http_hosts)");
}
