/* main.c - the kld tool: picks the command, and tells where its output could not be written. What a
 * command does is in the file of its name. */
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "client/cli/cli.h"
#include "proto/standard_fds.h"

static const struct kld_command *const commands[] = {
    &kld_command_div, &kld_command_status, &kld_command_top, &kld_command_ping, &kld_command_bench,
};

static void help(FILE *out) {
    fprintf(out,
            "Usage: kld COMMAND [options]\n\n"
            "KL-family divergences and their gradients, by a kld server or in this process.\n\n"
            "Commands:\n");
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        fprintf(out, "  %-10s %s\n", commands[i]->name, commands[i]->summary);
    fprintf(out, "\nkld COMMAND -h, or kld help COMMAND, tells more; kld --version the version. "
                 "The server is named by\n"
                 "--server, else by $KLD_SERVER; with neither, kld computes in this process.\n\n"
                 "Example: kld div student.npy teacher.npy --grad-predictions grad.npy\n");
}

static const struct kld_command *find(const char *name) {
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        if (strcmp(name, commands[i]->name) == 0)
            return commands[i];
    return NULL;
}

static int run(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "";
    const struct kld_command *command = find(name);
    if (command)
        return command->run(argc - 2, argv + 2, command);
    bool asked = strcmp(name, "help") == 0;
    if (asked && argc > 2)
        name = argv[2];
    if (asked && (command = find(name))) {
        kld_options_help(stdout, command);
        return KLD_EXIT_OK;
    }
    if (strcmp(name, "-h") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "help") == 0) {
        help(stdout);
        return KLD_EXIT_OK;
    }
    if (strcmp(name, "--version") == 0) {
        printf("kld %s\n", kld_version());
        return KLD_EXIT_OK;
    }
    if (*name)
        fprintf(stderr, "kld: no command '%.40s'\n\n", name);
    help(stderr);
    return KLD_EXIT_USAGE;
}

/* Files are mapped: somebody who cuts one while it is read takes the pages away. */
static void file_was_cut(int signal) {
    static const char text[] = "kld: a file was cut short while it was read, or its disk failed\n";
    static atomic_flag told = ATOMIC_FLAG_INIT;
    (void)signal;
    while (atomic_flag_test_and_set(&told)) /* several threads read, and one tells */
        pause();
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
    _exit(KLD_EXIT_USAGE);
}

int main(int argc, char **argv) {
    signal(SIGBUS, file_was_cut);
    signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is an error code, not a signal */
    kld_standard_fds_keep();
    int code = run(argc, argv);
    int why;
    if (kld_cli_flush(&why))
        return code;
    fprintf(stderr, "kld: standard output cannot be written%s%s\n", why ? ": " : "",
            why ? strerror(why) : "");
    return code ? code : KLD_EXIT_FAILED;
}
