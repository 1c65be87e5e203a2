/* server.c - connecting, and telling what went wrong: for every command of the kld tool. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/cli/cli.h"
#include "proto/utf8.h"

#define TIMEOUT_S 60.0
#define CONNECT_S_MAX 5.0
#define TOKEN_BYTES_MAX 1024                 /* as the server has it */
#define TOKEN_LINE_MAX (TOKEN_BYTES_MAX + 2) /* with the end of the line, or one byte too many */

uint64_t kld_cli_timeout_ns(const struct kld_server_options *server) {
    return (uint64_t)((server->timeout_s > 0 ? server->timeout_s : TIMEOUT_S) * 1e9);
}

static enum kld_status read_token(const char *path, char *ret_token, struct kld_error *err) {
    FILE *file = fopen(path, "re");
    bool read = file && fgets(ret_token, TOKEN_LINE_MAX, file);
    int reason = !file || ferror(file) ? errno : 0;
    if (file)
        fclose(file);
    size_t bytes = read ? strcspn(ret_token, "\r\n") : 0;
    if (reason)
        return kld_error_set(err, KLD_INVALID, "--token-file %.100s: %s", path, strerror(reason));
    if (bytes == 0)
        return kld_error_set(err, KLD_INVALID,
                             "--token-file %.100s: no token can be read from its first line", path);
    if (bytes > TOKEN_BYTES_MAX)
        return kld_error_set(
            err, KLD_INVALID,
            "--token-file %.100s: its first line has more than the %d bytes of a token", path,
            TOKEN_BYTES_MAX);
    ret_token[bytes] = '\0';
    return KLD_OK;
}

#define VARIABLE "KLD_SERVER"

/* *ret_source: where it comes from, for people; NULL: from nowhere. */
static const char *url_of(const struct kld_server_options *server, const char **ret_source) {
    const char *url = server->server ? server->server : getenv(VARIABLE);
    bool given = url && *url;
    *ret_source = !given ? NULL : server->server ? "" : " ($" VARIABLE ")";
    return given ? url : "local:";
}

static void append(char *to, size_t capacity, const char *text, size_t bytes) {
    size_t used = strlen(to);
    snprintf(to + used, capacity - used, "%.*s", (int)bytes, text);
}

static bool is_path(const char *url) {
    return strncmp(url, "unix:", 5) == 0 || strncmp(url, "local:", 6) == 0;
}

/* Without what stands before an '@' in front of the path, and in a text that is no URL before the
 * last one: a password, maybe. */
static void append_shown(char *to, size_t capacity, const char *url, size_t bytes) {
    const char *host = memmem(url, bytes, "://", 3), *end = url + bytes;
    size_t most = bytes;
    if (host) {
        host += 3;
        append(to, capacity, url, (size_t)(host - url));
        const char *path = memchr(host, '/', (size_t)(end - host));
        most = (size_t)((path ? path : end) - host);
    } else {
        host = url;
    }
    const char *at = is_path(url) ? NULL : memrchr(host, '@', most);
    host = at ? at + 1 : host;
    append(to, capacity, host, (size_t)(end - host));
}

void kld_cli_server_shown(const struct kld_server_options *server, char *ret_url, size_t capacity) {
    const char *source, *url = url_of(server, &source);
    bool several = strncmp(url, "split:", 6) == 0;
    ret_url[0] = '\0';
    if (several) {
        append(ret_url, capacity, url, 6);
        url += 6;
    }
    for (;;) {
        size_t bytes = several ? strcspn(url, ",") : strlen(url);
        append_shown(ret_url, capacity, url, bytes);
        if (!url[bytes])
            return;
        append(ret_url, capacity, ",", 1);
        url += bytes + 1;
    }
}

enum kld_status kld_cli_connect(const struct kld_server_options *server,
                                const struct kld_connect_options *options,
                                struct kld_connection **ret_connection, struct kld_error *err) {
    struct kld_connect_options all = options ? *options : (struct kld_connect_options){0};
    const char *source;
    char token[TOKEN_LINE_MAX];
    double seconds = server->timeout_s > 0 && server->timeout_s < CONNECT_S_MAX ? server->timeout_s
                                                                                : CONNECT_S_MAX;
    if (server->token_file) {
        enum kld_status status = read_token(server->token_file, token, err);
        if (status)
            return status;
        all.token = token;
    }
    const struct {
        const char *option, *path;
    } files[] = {{"ca", server->ca_file}, {"cert", server->cert_file}, {"key", server->key_file}};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++)
        if (files[i].path && access(files[i].path, R_OK) != 0)
            return kld_error_set(err, KLD_INVALID, "--%s-file %.100s: %s", files[i].option,
                                 files[i].path, strerror(errno));
    if (server->key_file && !server->cert_file)
        return kld_error_set(err, KLD_INVALID, "--key-file without --cert-file; expected both");
    all.client_name = "kld";
    all.ca_file = server->ca_file;
    all.cert_file = server->cert_file;
    all.key_file = server->key_file;
    all.connect_timeout_ns = (uint64_t)(seconds * 1e9);
    return kld_connect(url_of(server, &source), &all, ret_connection, err);
}

const char *kld_cli_printable(char *text) {
    for (unsigned char *at = (unsigned char *)text; *at; at++)
        if (*at < ' ' || *at == 0x7f || (at[0] == 0xc2 && at[1] >= 0x80 && at[1] < 0xa0))
            *at = '?';
    return text;
}

#define MORE_DESCRIPTORS "close files, or raise the limit of how many may be open (ulimit -n)"

int kld_cli_fail(const struct kld_error *error) {
    struct kld_error shown = *error;
    static const struct {
        enum kld_status status;
        enum kld_exit exit;
        const char *about; /* in the error's text, where a status has several causes; "": any */
        const char *advice;
    } rules[] = {
        {KLD_INVALID, KLD_EXIT_USAGE, "", "kld COMMAND -h lists what is understood"},
        {KLD_NOT_FOUND, KLD_EXIT_USAGE, "", "kld COMMAND -h lists what is understood"},
        {KLD_UNAVAILABLE, KLD_EXIT_SERVER, "no file descriptors", MORE_DESCRIPTORS},
        {KLD_UNAVAILABLE, KLD_EXIT_SERVER, "",
         "start kld-server, or compute in this process with --server local:"},
        {KLD_BUSY, KLD_EXIT_SERVER, "", "try again in a moment"},
        {KLD_THROTTLED, KLD_EXIT_SERVER, "", "try again in a moment"},
        {KLD_DEVICE_LOST, KLD_EXIT_SERVER, "", "try again: the server replaces a lost device"},
        {KLD_DEADLINE, KLD_EXIT_SERVER, "no file descriptors", MORE_DESCRIPTORS},
        {KLD_DEADLINE, KLD_EXIT_SERVER, "",
         "allow more time with --timeout SECONDS (a part of --split: --part-timeout)"},
        {KLD_UNAUTHENTICATED, KLD_EXIT_SERVER, "client certificate",
         "show one of the server's --tls-client-ca with --cert-file FILE --key-file FILE"},
        {KLD_UNAUTHENTICATED, KLD_EXIT_SERVER, "", "name a token with --token-file FILE"},
        {KLD_FORBIDDEN, KLD_EXIT_SERVER, "ca_file",
         "name the certificates to trust with --ca-file FILE"},
        {KLD_FORBIDDEN, KLD_EXIT_SERVER, "its mode or group",
         "join the socket's group, or ask who runs the server for another --unix-mode"},
        {KLD_FORBIDDEN, KLD_EXIT_SERVER, "does not have the right",
         "use a token that has it (--token-file FILE), or ask who runs the server for the right"},
        {KLD_FORBIDDEN, KLD_EXIT_SERVER, "", "ask who runs the server to let you use it"},
        {KLD_NO_MEMORY, KLD_EXIT_FAILED, "RLIMIT_FSIZE",
         "raise the limit of files (ulimit -f), or with --split take smaller --part-bytes"},
        {KLD_NO_MEMORY, KLD_EXIT_FAILED, "no file descriptors", MORE_DESCRIPTORS},
        {KLD_NO_MEMORY, KLD_EXIT_FAILED, "for a socket", "try again once there is memory"},
        {KLD_NO_MEMORY, KLD_EXIT_FAILED, "",
         "spread the rows over several servers: kld div --split URL,URL,..."},
    };
    fprintf(stderr, "kld: %s\n", kld_cli_printable(shown.text));
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        if (rules[i].status != error->status || !strstr(error->text, rules[i].about))
            continue;
        fprintf(stderr, "     %s\n", rules[i].advice);
        return rules[i].exit;
    }
    return KLD_EXIT_FAILED;
}

int kld_cli_fail_at(const struct kld_error *error, const struct kld_server_options *server,
                    const char *asked) {
    int code = kld_cli_fail(error);
    const char *source;
    char url[KLD_CLI_URL_MAX];
    kld_cli_server_shown(server, url, sizeof url);
    (void)url_of(server, &source);
    if (source) /* else it is this process, and nobody named it */
        fprintf(stderr, "     tried: %s%s%s\n", asked, kld_cli_printable(url), source);
    return code;
}

int kld_cli_usage(const struct kld_command *command, const struct kld_error *error) {
    struct kld_error shown = *error; /* with what a file says, maybe */
    fprintf(stderr, "kld: %s\n     see: kld %s -h\n", kld_cli_printable(shown.text), command->name);
    return KLD_EXIT_USAGE;
}

bool kld_cli_flush(int *ret_errno) {
    static int why; /* the stream keeps that it failed, and not of what */
    errno = 0;      /* what has failed before did not leave its reason */
    if (fflush(stdout) != 0 && !why)
        why = errno;
    *ret_errno = why;
    return !why && !ferror(stdout);
}

void kld_cli_json_number(FILE *out, double number, int digits) {
    if (isfinite(number))
        fprintf(out, "%.*g", digits, number);
    else
        fputs("null", out);
}

void kld_cli_json_string(FILE *out, const char *text) {
    fputc('"', out);
    for (size_t left = strlen(text), used; left > 0; left -= used, text += used) {
        size_t sequence = kld_utf8_sequence(text, left);
        used = sequence ? sequence : 1;
        if (!sequence)
            fputs("\\ufffd", out);
        else if (*text == '"' || *text == '\\')
            fprintf(out, "\\%c", *text);
        else if ((unsigned char)*text < 0x20)
            fprintf(out, "\\u%04x", (unsigned)*text);
        else
            fwrite(text, 1, used, out);
    }
    fputc('"', out);
}
