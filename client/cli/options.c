/* options.c - command lines of the kld tool, from tables. Prints nothing but the help. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli/cli.h"
#include "proto/number.h"

static bool is_end(const struct kld_option *option) {
    return option->kind == KLD_OPTION_GROUP && !option->help;
}

static const char *dashes_of(const struct kld_option *option) {
    return option->name[1] ? "--" : "-";
}

/* A name of one letter has one dash, as in top(1): -n 3. */
static const struct kld_option *option_find(const struct kld_command *command, unsigned dashes,
                                            const char *name, size_t length) {
    if (dashes != (length == 1 ? 1 : 2))
        return NULL;
    for (const struct kld_option *option = command->options; !is_end(option); option++)
        if (option->name && strlen(option->name) == length &&
            strncmp(option->name, name, length) == 0)
            return option;
    return NULL;
}

static enum kld_status option_set(const struct kld_option *option, const char *value, void *to,
                                  struct kld_error *err) {
    char *field = (char *)to + option->offset, *end = NULL;
    if (option->kind == KLD_OPTION_TEXT) {
        memcpy(field, &value, sizeof value);
    } else if (option->kind == KLD_OPTION_FLAG) {
        *(bool *)field = true;
    } else if (option->kind == KLD_OPTION_COUNT || option->kind == KLD_OPTION_BYTES) {
        bool bytes = option->kind == KLD_OPTION_BYTES;
        uint64_t number;
        if (!kld_number_parse(value, 10, bytes, &number) || (bytes && !number))
            return kld_error_set(err, KLD_INVALID, "%s%s is '%.40s'; expected a whole number%s",
                                 dashes_of(option), option->name, value,
                                 bytes ? " above 0 (K, M, G, T allowed)" : "");
        memcpy(field, &number, sizeof number);
    } else {
        double number = strtod(value, &end);
        if (end == value || *end || !isfinite(number))
            return kld_error_set(err, KLD_INVALID, "%s%s is '%.40s'; expected a number",
                                 dashes_of(option), option->name, value);
        if (option->kind == KLD_OPTION_TIME &&
            !(number >= KLD_SECONDS_MIN && number <= KLD_SECONDS_MAX))
            return kld_error_set(
                err, KLD_INVALID, "%s%s is '%.40s'; expected seconds, from %g to %g",
                dashes_of(option), option->name, value, KLD_SECONDS_MIN, KLD_SECONDS_MAX);
        memcpy(field, &number, sizeof number);
    }
    if (option->given_offset)
        *(bool *)((char *)to + option->given_offset) = true;
    return KLD_OK;
}

/* argv[*at] is an option; *at moves to the last argument that was used. */
static enum kld_status take_option(const struct kld_command *command, int argc, char **argv,
                                   int *at, void *to, struct kld_error *err) {
    unsigned dashes = argv[*at][1] == '-' ? 2 : 1;
    const char *name = argv[*at] + dashes, *equals = strchr(name, '=');
    size_t length = equals ? (size_t)(equals - name) : strlen(name);
    const struct kld_option *option = option_find(command, dashes, name, length);
    if (!option)
        return kld_error_set(err, KLD_INVALID, "unknown option '%.60s'", argv[*at]);
    if (option->kind == KLD_OPTION_FLAG)
        return equals ? kld_error_set(err, KLD_INVALID, "--%s takes no value", option->name)
                      : option_set(option, NULL, to, err);
    if (equals)
        return option_set(option, equals + 1, to, err);
    if (*at + 1 >= argc)
        return kld_error_set(err, KLD_INVALID, "%s%s needs a value: %s", dashes_of(option),
                             option->name, option->value);
    return option_set(option, argv[++*at], to, err);
}

enum kld_status kld_options_parse(const struct kld_command *command, int argc, char **argv,
                                  void *to, const char *positional[KLD_POSITIONAL_MAX],
                                  struct kld_error *err) {
    size_t count = 0;
    bool options_over = false;
    for (int i = 0; i < argc; i++) {
        if (!options_over && (strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--help") == 0)) {
            kld_options_help(stdout, command);
            return KLD_CANCELLED;
        }
        if (!options_over && strcmp(argv[i], "--") == 0) {
            options_over = true;
        } else if (!options_over && argv[i][0] == '-' && argv[i][1]) {
            enum kld_status status = take_option(command, argc, argv, &i, to, err);
            if (status)
                return status;
        } else if (count == command->positional_max) {
            return kld_error_set(err, KLD_INVALID, "unexpected argument '%.60s'", argv[i]);
        } else {
            positional[count++] = argv[i];
        }
    }
    return count >= command->positional_min
               ? KLD_OK
               : kld_error_set(err, KLD_INVALID, "missing arguments: kld %s %s", command->name,
                               command->arguments);
}

void kld_options_help(FILE *out, const struct kld_command *command) {
    fprintf(out, "Usage: kld %s %s[options]\n\n%s\n", command->name, command->arguments,
            command->summary);
    if (command->details)
        fprintf(out, "\n%s\n", command->details);
    fprintf(out, "\nOptions:\n");
    for (const struct kld_option *option = command->options; !is_end(option); option++) {
        char left[64];
        if (option->kind == KLD_OPTION_GROUP) {
            fprintf(out, "\n%s:\n", option->help);
            continue;
        }
        snprintf(left, sizeof left, "%s%s%s%s", dashes_of(option), option->name,
                 option->value ? " " : "", option->value ? option->value : "");
        fprintf(out, "  %-28s %s\n", left, option->help);
    }
    fprintf(out, "  %-28s %s\n", "-h, --help", "this text");
    fprintf(out,
            "\nExit status: 0 it worked; 1 the computation failed, or standard output could not be "
            "written;\n2 the command line or a file is wrong; 3 no server, or it is busy or was "
            "lost.\n");
}
