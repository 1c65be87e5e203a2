/* main.c - picks the role: the supervisor as started by a person, or, behind the hidden first
 * argument, one of its children. Wiring only; everything else is in the folder of the role. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "proto/standard_fds.h"
#include "server/config.h"
#include "server/log.h"
#include "server/role.h"
#include "server/signals.h"
#include "server/stack.h"
#include "server/stats.h"

extern char **environ;

static int fail(const struct kld_error *err) {
    fprintf(stderr, "kld-server: %s\n", err->text);
    return EXIT_FAILURE;
}

/* argv: --role=NAME --index=N and every setting as a flag. The environment was read by the
 * supervisor and is not read again. */
static int child_main(int argc, char **argv) {
    /* After this the kernel ends us with the supervisor; if it died before, role code sees the end
     * of KLD_FD_CONTROL. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);

    const char *role = argv[1] + strlen("--role=");
    struct kld_child child = {.index = KLD_DEVICES_MAX};
    if (argc >= 3 && strncmp(argv[2], "--index=", 8) == 0)
        child.index = (uint32_t)strtoul(argv[2] + 8, NULL, 10);
    if (child.index >= KLD_DEVICES_MAX) {
        fprintf(stderr, "kld-server: --role is for the supervisor's own use\n");
        return EXIT_FAILURE;
    }
    struct kld_config config;
    enum kld_config_action action;
    struct kld_error err = {.status = KLD_OK};
    char *no_environment[] = {NULL};
    if (kld_config_parse(argc - 3, argv + 3, no_environment, &config, &action, &err) != KLD_OK)
        return fail(&err);
    bool worker = strcmp(role, "worker") == 0;
    char name[24];
    if (worker)
        snprintf(name, sizeof name, "worker%u", child.index);
    else
        snprintf(name, sizeof name, "gateway");
    char comm[32]; /* what ps and top show; else it would be "exe", as we were started */
    snprintf(comm, sizeof comm, "kld-%s", name);
    prctl(PR_SET_NAME, comm);
    if (kld_log_init(name, config.log_level, config.log_format, &err) != KLD_OK ||
        kld_stats_attach(KLD_FD_STATS, KLD_FD_STATE, &child.page, &err) != KLD_OK)
        return fail(&err);
    child.stats = worker ? &child.page->worker[child.index] : &child.page->common;
    kld_log_count_lost_in(child.stats);
    child.config = &config;
    int status = worker ? kld_worker_main(&child) : kld_gateway_main(&child);
    kld_log_count_lost_in(NULL);
    kld_stats_detach(child.page);
    return status;
}

static int printed(void) {
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout))
        return EXIT_SUCCESS;
    fprintf(stderr, "kld-server: standard output cannot be written%s%s\n", errno ? ": " : "",
            errno ? strerror(errno) : "");
    return EXIT_FAILURE;
}

/* From here on one that comes waits until somebody reads it (supervisor/hangup.c). True: it was
 * ignored, as nohup(1) does. */
static bool block_hangup(void) {
    struct sigaction before;
    sigset_t hangup;
    sigemptyset(&hangup);
    sigaddset(&hangup, SIGHUP);
    sigprocmask(SIG_BLOCK, &hangup, NULL);
    return sigaction(SIGHUP, NULL, &before) == 0 && before.sa_handler == SIG_IGN;
}

int main(int argc, char **argv) {
    kld_standard_fds_keep();
    signal(SIGPIPE, SIG_IGN); /* a peer that went away is an error code, not a signal */
    signal(SIGXFSZ, SIG_IGN); /* and so is a file that may not grow */
    bool hangup_ignored = block_hangup();
    kld_stack_reserve();
    if (argc > 1 && strncmp(argv[1], "--role=", 7) == 0)
        return child_main(argc, argv);
    /* Before they are watched PID 1 would miss them, as whoever inherits them as ignored. */
    kld_signals_block(NULL);

    struct kld_config config;
    enum kld_config_action action = KLD_CONFIG_RUN;
    struct kld_error err = {.status = KLD_OK};
    if (kld_config_parse(argc > 0 ? argc - 1 : 0, argv + 1, environ, &config, &action, &err) !=
        KLD_OK) {
        fail(&err);
        return KLD_EXIT_SETTINGS;
    }
    if (action != KLD_CONFIG_RUN)
        kld_signals_unblock();
    if (action == KLD_CONFIG_HELP)
        kld_config_help(stdout);
    else if (action == KLD_CONFIG_METRICS)
        kld_metrics_table(stdout);
    else if (action == KLD_CONFIG_VERSION)
        puts("kld-server " KLD_RELEASE);
    if (action != KLD_CONFIG_RUN)
        return printed();
    if (kld_log_init("supervisor", config.log_level, config.log_format, &err) != KLD_OK)
        return fail(&err);
    const struct kld_start start = {.argc = argc > 0 ? argc - 1 : 0,
                                    .argv = argv + 1,
                                    .environment = environ,
                                    .hangup_ignored = hangup_ignored};
    return kld_supervisor_main(&config, &start);
}
