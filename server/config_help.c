/* config_help.c - what --help prints: the table of settings, for people (config.h). Parses nothing.
 * Main thread. */
#include <stdio.h>

#include "server/config.h"

#define TEXT_MAX 56

static void print_setting(FILE *out, const char *name, const char *type, const char *value,
                          const char *help) {
    char left[TEXT_MAX];
    int bytes = snprintf(left, sizeof left, "--%s", name);
    for (char *c = left; *c; c++)
        if (*c == '_')
            *c = '-';
    snprintf(left + bytes, sizeof left - (size_t)bytes, "%s", type);
    fprintf(out, "  %-32s %s", left, help);
    if (value[0])
        fprintf(out, " [%s]", value);
    fputc('\n', out);
}

void kld_config_help(FILE *out) {
    static const char TEXT[] = " TEXT", COUNT[] = " N", BYTES[] = " BYTES", FLAG[] = "",
                      DEVICES[] = " LIST";
    fputs(
        "kld-server: computes KL divergences and their gradients for other programs, over HTTP\n"
        "and a Unix socket. With no options it serves on 127.0.0.1:8080.\n\n"
        "  kld-server [--OPTION VALUE | --OPTION=VALUE | --FLAG | --FLAG=false]...\n\n"
        "Every option is also an environment variable (--log-level: KLD_LOG_LEVEL) and a key of\n"
        "the JSON file named by --config (log_level). A flag goes before the environment, the\n"
        "environment before the file. BYTES may end in K, M, G or T. On SIGHUP all is read again;\n"
        "taken over are " KLD_CONFIG_RELOADED ", and what is in those files.\n\n",
        out);
#define X(TYPE, name, value, help) print_setting(out, #name, TYPE, value, help);
    KLD_CONFIG_MAP(X)
#undef X
    fprintf(out, "  %-32s %s\n", "--config TEXT", "a JSON file with any of these settings");
    fprintf(out, "  %-32s %s\n", "--version", "print the version");
    fprintf(out, "  %-32s %s\n", "--help-metrics", "print what /metrics says, as a Markdown table");
    fprintf(out, "  %-32s %s\n", "-h, --help", "print this");
}
