/* cli.h - the kld tool: what its commands share. One process, one thread; exits through main().
 *
 * Exit status: 0 it worked; 1 the computation failed, an answer was wrong or standard output could
 * not be written; 2 the command line or a file is wrong; 3 the server could not be reached, or was
 * too busy, or lost. */
#ifndef KLD_CLIENT_CLI_CLI_H
#define KLD_CLIENT_CLI_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "client/kld.h"

enum kld_exit { KLD_EXIT_OK = 0, KLD_EXIT_FAILED = 1, KLD_EXIT_USAGE = 2, KLD_EXIT_SERVER = 3 };

/* ---- options.c: one table an option list --------------------------------------------------------
 */

enum kld_option_kind {
    KLD_OPTION_TEXT,   /* const char * */
    KLD_OPTION_FLAG,   /* bool */
    KLD_OPTION_COUNT,  /* uint64_t */
    KLD_OPTION_BYTES,  /* uint64_t, above 0; K, M, G or T may follow */
    KLD_OPTION_NUMBER, /* double */
    KLD_OPTION_TIME,   /* double, of seconds, from KLD_SECONDS_MIN to KLD_SECONDS_MAX */
    KLD_OPTION_GROUP,  /* no option: a heading in the help */
};

/* Of less the whole nanoseconds are 0, which stands for a default or for no limit. */
#define KLD_SECONDS_MIN 1e-9
#define KLD_SECONDS_MAX 1e9

struct kld_option {
    const char *name; /* without the dashes; one letter has one dash */
    enum kld_option_kind kind;
    const char *value; /* how the help calls it */
    const char *help;
    size_t offset;       /* of the variable in the command's struct */
    size_t given_offset; /* of a bool that tells whether it was given; 0: there is none */
};

struct kld_command {
    const char *name, *arguments, *summary, *details;
    const struct kld_option *options; /* the last is KLD_OPTIONS_END */
    size_t positional_min, positional_max;
    int (*run)(int argc, char **argv, const struct kld_command *command);
};

#define KLD_OPTIONS_END                                                                            \
    { NULL, KLD_OPTION_GROUP, NULL, NULL, 0, 0 }
#define KLD_POSITIONAL_MAX 2

/* Fills *to and positional[]. KLD_OK; KLD_CANCELLED: help was asked for and printed; KLD_INVALID:
 * an error was described. */
enum kld_status kld_options_parse(const struct kld_command *command, int argc, char **argv,
                                  void *to, const char *positional[KLD_POSITIONAL_MAX],
                                  struct kld_error *err);
void kld_options_help(FILE *out, const struct kld_command *command);

/* ---- What every command with a server takes
 * ------------------------------------------------------ */

struct kld_server_options {
    const char *server, *token_file, *ca_file, *cert_file, *key_file;
    double timeout_s; /* 0: not given */
};

/* Entries of an option table for the struct_'s field `server`. */
#define KLD_SERVER_OPTIONS(struct_, field)                                                         \
    {NULL, KLD_OPTION_GROUP, NULL, "Server", 0, 0},                                                \
        {"server",                                                                                 \
         KLD_OPTION_TEXT,                                                                          \
         "URL",                                                                                    \
         "unix:PATH, http://HOST:PORT, https://HOST:PORT or local: (default: $KLD_SERVER, else "   \
         "local:)",                                                                                \
         offsetof(struct_, field.server),                                                          \
         0},                                                                                       \
        {"timeout",                                                                                \
         KLD_OPTION_TIME,                                                                          \
         "SECONDS",                                                                                \
         "give up after so long (default 60; connecting: at most 5)",                              \
         offsetof(struct_, field.timeout_s),                                                       \
         0},                                                                                       \
        {"token-file",                                                                             \
         KLD_OPTION_TEXT,                                                                          \
         "FILE",                                                                                   \
         "http: a file with the bearer token",                                                     \
         offsetof(struct_, field.token_file),                                                      \
         0},                                                                                       \
        {"ca-file",                                                                                \
         KLD_OPTION_TEXT,                                                                          \
         "FILE",                                                                                   \
         "https: certificates to trust",                                                           \
         offsetof(struct_, field.ca_file),                                                         \
         0},                                                                                       \
        {"cert-file",                                                                              \
         KLD_OPTION_TEXT,                                                                          \
         "FILE",                                                                                   \
         "https: a client certificate to show (PEM)",                                              \
         offsetof(struct_, field.cert_file),                                                       \
         0},                                                                                       \
    {                                                                                              \
        "key-file", KLD_OPTION_TEXT, "FILE", "https: its key (default: in --cert-file)",           \
            offsetof(struct_, field.key_file), 0                                                   \
    }

/* Connects; `options` holds what the command sets beside the server options, or NULL. */
enum kld_status kld_cli_connect(const struct kld_server_options *server,
                                const struct kld_connect_options *options,
                                struct kld_connection **ret_connection, struct kld_error *err);
uint64_t kld_cli_timeout_ns(const struct kld_server_options *server);

/* What a server said, for a terminal, which obeys control characters: '?' in their place. */
const char *kld_cli_printable(char *text);
/* Prints "kld: ..." with advice; returns the exit status that fits. */
int kld_cli_fail(const struct kld_error *error);
/* The same of a server, whose address comes behind that; asked: what it was asked for, or "". */
int kld_cli_fail_at(const struct kld_error *error, const struct kld_server_options *server,
                    const char *asked);
int kld_cli_usage(const struct kld_command *command, const struct kld_error *error);
/* Writes standard output out; false: that failed, now or before. *ret_errno: why, if it is known.
 */
bool kld_cli_flush(int *ret_errno);
/* A JSON number, or null where it is not finite; a JSON string, U+FFFD where it is no UTF-8. */
void kld_cli_json_number(FILE *out, double number, int digits);
void kld_cli_json_string(FILE *out, const char *text);

#define KLD_CLI_URL_MAX 300
/* The server that kld_cli_connect() asks, without a name and password in it. */
void kld_cli_server_shown(const struct kld_server_options *server, char *ret_url, size_t capacity);

/* report.c: members of a JSON object, each behind a comma; lines. */
struct kld_report;
void kld_cli_report_json(FILE *out, const struct kld_report *report);
void kld_cli_report_text(FILE *out, const struct kld_report *report);

extern const struct kld_command kld_command_div, kld_command_status, kld_command_ping,
    kld_command_bench, kld_command_top;

#endif
