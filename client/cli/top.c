/* top.c - `kld top`: looks at a server's /metrics again and again; the terminal, keys and signals.
 * What it shows is top_view.c's. One thread: signals are read from a descriptor, so nothing runs in
 * a handler, and the terminal is given back whatever ends it but SIGKILL. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "client/cli/cli.h"
#include "client/cli/top.h"
#include "proto/number.h"

#define DELAY_S 1.0
#define DELAY_S_MIN 0.1
#define DELAY_S_MAX 3600.0
#define MESSAGE_S 5.0    /* what happened once is shown so long */
#define PROCESSES_S 10.0 /* an earlier look, to compare processes with, is at most so old */
#define ANSWER_S_MAX 2.0 /* of a server that accepts and says nothing; keys wait as long */

#define ENTER "\033[?1049h\033[?25l" /* the other screen, no cursor */
#define LEAVE "\033[?25h\033[?1049l"

struct top_options {
    struct kld_server_options server;
    double delay_s;
    uint64_t count;
    bool batch, once;
};

struct top {
    const struct top_options *options;
    char url[KLD_CLI_URL_MAX];
    struct kld_connection *connection; /* NULL: not yet */
    char *text;                        /* of /metrics */
    struct kld_top_sample samples[2];
    struct kld_top_sample *before, *now; /* of them; NULL: none */
    struct kld_top_sample earlier;       /* at_s 0: none */
    double silent_since_s;               /* 0: it answers */
    char message[KLD_ERROR_TEXT_MAX + 128];
    double message_until_s; /* 0: until the next look */
    struct kld_error error; /* of the last look */
    bool screen;            /* else lines, one block after the other */
    bool keys;              /* standard input is a terminal, too */
    struct termios were;    /* keys: as it was */
    sigset_t mask_was;
    int signals; /* descriptor */
};

static double clock_s(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* ---- The server -------------------------------------------------------------------------------*/

static enum kld_status ask(struct top *top, struct kld_top_sample *sample) {
    struct kld_error *err = &top->error;
    /* lazy: a server that is not there yet is waited for. */
    struct kld_connect_options lazy = {.lazy = true};
    struct kld_server_options server = top->options->server;
    enum kld_status status = KLD_OK;
    err->status = KLD_OK;
    if (server.timeout_s <= 0 || server.timeout_s > ANSWER_S_MAX)
        server.timeout_s = ANSWER_S_MAX;
    if (!top->connection)
        status = kld_cli_connect(&server, &lazy, &top->connection, err);
    if (!status)
        status = kld_metrics(top->connection, top->text, KLD_METRICS_TEXT_MAX, err);
    sample->at_s = clock_s(CLOCK_MONOTONIC);
    sample->unix_s = clock_s(CLOCK_REALTIME);
    return status ? status : kld_report_read(top->text, &sample->report, err);
}

/* Trying again cannot help, or not before somebody did something. */
static bool is_final(enum kld_status status) {
    return status == KLD_INVALID || status == KLD_FORBIDDEN || status == KLD_UNAUTHENTICATED ||
           status == KLD_UNIMPLEMENTED || status == KLD_NOT_FOUND || status == KLD_TOO_LARGE;
}

static enum kld_status look(struct top *top) {
    struct kld_top_sample *next =
        top->now == &top->samples[0] ? &top->samples[1] : &top->samples[0];
    enum kld_status status = ask(top, next);
    double now_s = clock_s(CLOCK_MONOTONIC);
    if (now_s > top->message_until_s)
        top->message[0] = '\0';
    if (status) {
        if (!top->silent_since_s)
            top->silent_since_s = now_s;
        top->message_until_s = 0;
        snprintf(top->message, sizeof top->message, "no answer for %.0f s, trying again: %s",
                 now_s - top->silent_since_s, kld_cli_printable(top->error.text));
        return status;
    }
    top->before = top->now;
    top->now = next;
    if (top->before && kld_top_restarted(top->before, top->now, top->silent_since_s > 0)) {
        top->before = NULL;
        top->earlier.at_s = 0;
        top->message_until_s = now_s + MESSAGE_S;
        snprintf(top->message, sizeof top->message,
                 "the server was started again: rates begin anew");
    } else if (top->silent_since_s) {
        top->message_until_s = now_s + MESSAGE_S;
        snprintf(top->message, sizeof top->message, "it answers again, after %.0f s",
                 now_s - top->silent_since_s);
    }
    top->silent_since_s = 0;
    if (top->before && (!top->earlier.at_s || next->at_s - top->earlier.at_s > PROCESSES_S))
        top->earlier = *top->before;
    return KLD_OK;
}

/* ---- The terminal -----------------------------------------------------------------------------*/

static void write_all(const char *text, size_t bytes) {
    while (bytes) {
        ssize_t written = write(STDOUT_FILENO, text, bytes);
        if (written < 0 && errno != EINTR)
            return;
        text += written > 0 ? written : 0;
        bytes -= written > 0 ? (size_t)written : 0;
    }
}

static void screen_enter(struct top *top) {
    if (!top->screen)
        return;
    if (top->keys) {
        struct termios raw = top->were;
        raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO); /* signals stay */
        raw.c_cc[VMIN] = 0;
        raw.c_cc[VTIME] = 0;
        tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    }
    write_all(ENTER, strlen(ENTER));
}

static void screen_leave(struct top *top) {
    if (!top->screen)
        return;
    write_all(LEAVE, strlen(LEAVE));
    if (top->keys)
        tcsetattr(STDIN_FILENO, TCSANOW, &top->were);
}

/* Lines are cut at the right and at the bottom; the first is bold. One write a picture. Names of
 * devices, the only text that is not ours, are printable in /metrics. */
static void draw(const char *lines) {
    struct winsize window = {0};
    char *picture = NULL;
    size_t bytes = 0;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) != 0 || !window.ws_col || !window.ws_row)
        window = (struct winsize){.ws_col = 80, .ws_row = 24};
    FILE *out = open_memstream(&picture, &bytes);
    if (!out)
        return;
    fputs("\033[H", out);
    for (int row = 0; *lines && row < window.ws_row; row++) {
        size_t length = strcspn(lines, "\n");
        int shown = length < window.ws_col ? (int)length : window.ws_col;
        fprintf(out, "%s%s%.*s%s\033[K", row ? "\n" : "", row ? "" : "\033[1m", shown, lines,
                row ? "" : "\033[0m");
        lines += length + (lines[length] == '\n');
    }
    fputs("\033[J", out);
    fclose(out);
    write_all(picture, bytes);
    free(picture);
}

static void show(const struct top *top) {
    char *lines = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&lines, &bytes);
    if (!out)
        return;
    if (top->now)
        kld_top_render(out, top->url, top->message, top->before,
                       top->earlier.at_s > 0 ? &top->earlier : NULL, top->now);
    else
        fprintf(out, "kld top  %s\n%s\n", top->url, top->message);
    fclose(out);
    if (top->screen) {
        draw(lines);
    } else {
        int why;
        fputs(lines, stdout);
        (void)kld_cli_flush(&why); /* which main() tells */
    }
    free(lines);
}

/* ---- Waiting ----------------------------------------------------------------------------------*/

/* As if there were no signalfd: stopped until somebody continues us; and not where there is nobody
 * who could (ssh -t), which the kernel knows of SIGTSTP and does not ask of SIGSTOP. */
static void stop_here(struct top *top) {
    sigset_t stop;
    sigemptyset(&stop);
    sigaddset(&stop, SIGTSTP);
    screen_leave(top);
    raise(SIGTSTP);
    sigprocmask(SIG_UNBLOCK, &stop, NULL);
    sigprocmask(SIG_BLOCK, &stop, NULL);
    screen_enter(top);
}

/* True: it is to end. */
static bool take_signal(struct top *top) {
    struct signalfd_siginfo info;
    if (read(top->signals, &info, sizeof info) != (ssize_t)sizeof info)
        return false;
    if (info.ssi_signo == SIGTSTP)
        stop_here(top);
    else if (info.ssi_signo != SIGWINCH)
        return true;
    if (top->screen)
        show(top);
    return false;
}

static bool take_key(const struct top *top) {
    char key = 0;
    return read(STDIN_FILENO, &key, 1) == 1 && (key == 'q' || key == 'Q' || key == 4 /* ^D */);
}

/* Until then keys and signals are heard. True: it is to end. */
static bool wait_until_s(struct top *top, double until_s) {
    for (;;) {
        double left_s = until_s - clock_s(CLOCK_MONOTONIC);
        struct pollfd fds[2] = {{.fd = top->signals, .events = POLLIN},
                                {.fd = top->keys ? STDIN_FILENO : -1, .events = POLLIN}};
        int ready = poll(fds, 2, left_s > 0 ? (int)ceil(left_s * 1e3) : 0);
        if (ready > 0 && fds[0].revents && take_signal(top))
            return true;
        if (ready > 0 && (fds[1].revents & POLLIN) && take_key(top))
            return true;
        if (fds[1].revents & (POLLHUP | POLLERR | POLLNVAL))
            return true; /* the terminal is gone */
        if (left_s <= 0)
            return false;
    }
}

/* ---- The whole --------------------------------------------------------------------------------*/

/* On a screen: until it is told to end. */
static int run_screen(struct top *top) {
    for (;;) {
        double next_s = clock_s(CLOCK_MONOTONIC) + top->options->delay_s;
        enum kld_status status = look(top);
        if (status && is_final(status) && !top->now) {
            screen_leave(top);
            top->screen = false;
            return kld_cli_fail_at(&top->error, &top->options->server, "GET /metrics at ");
        }
        show(top);
        if (wait_until_s(top, next_s))
            return KLD_EXIT_OK;
    }
}

/* Blocks of lines; the first look has nothing to compare with and is not shown. */
static int run_batch(struct top *top) {
    uint64_t shown = 0, most = top->options->once ? 1 : top->options->count;
    bool silent = false;
    for (;;) {
        double next_s = clock_s(CLOCK_MONOTONIC) + top->options->delay_s;
        enum kld_status status = look(top);
        if (status && (!top->now || is_final(status) || top->options->once))
            return kld_cli_fail_at(&top->error, &top->options->server, "GET /metrics at ");
        if (status && !silent)
            fprintf(stderr, "kld: %s\n", top->message);
        silent = status != KLD_OK;
        if (!status && top->before) {
            show(top);
            if (++shown == most || ferror(stdout)) /* which main() tells */
                return KLD_EXIT_OK;
            putchar('\n');
        } else if (!status && top->message[0]) {
            fprintf(stderr, "kld: %s\n", top->message);
        }
        if (wait_until_s(top, next_s))
            return KLD_EXIT_OK;
    }
}

static enum kld_status open_all(struct top *top, struct kld_error *err) {
    const int heard[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGWINCH, SIGTSTP};
    sigset_t mask;
    sigemptyset(&mask);
    /* Lines leave nothing to put in order, and their writer may sleep at a full pipe: what signals
     * do to it, or nohup has them not do, is the system's business. */
    for (size_t i = 0; top->screen && i < sizeof heard / sizeof heard[0]; i++)
        sigaddset(&mask, heard[i]);
    top->keys = top->screen && tcgetattr(STDIN_FILENO, &top->were) == 0;
    top->text = malloc(KLD_METRICS_TEXT_MAX);
    sigprocmask(SIG_BLOCK, &mask, &top->mask_was);
    top->signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    if (!top->text || top->signals < 0)
        return kld_error_set(err, KLD_NO_MEMORY, "no memory for the server's metrics");
    return KLD_OK;
}

static void close_all(struct top *top) {
    screen_leave(top);
    kld_close(top->connection);
    if (top->signals >= 0)
        close(top->signals);
    sigprocmask(SIG_SETMASK, &top->mask_was, NULL);
    free(top->text);
    free(top);
}

static enum kld_status check(const struct top_options *options, const char *url,
                             struct kld_error *err) {
    char shown[KLD_NUMBER_SHOWN_MAX];
    if (!(options->delay_s >= DELAY_S_MIN && options->delay_s <= DELAY_S_MAX))
        return kld_error_set(err, KLD_INVALID, "-d is %s; expected seconds from %g to %g",
                             kld_number_show(options->delay_s, shown), DELAY_S_MIN, DELAY_S_MAX);
    if (strncmp(url, "http", 4) != 0)
        return kld_error_set(err, KLD_INVALID,
                             "kld top reads /metrics: --server http://HOST:PORT (or $KLD_SERVER), "
                             "not %.80s",
                             url);
    return KLD_OK;
}

static int run_top(int argc, char **argv, const struct kld_command *command) {
    struct top_options options = {.delay_s = DELAY_S};
    struct kld_error error = {0};
    const char *positional[KLD_POSITIONAL_MAX];
    enum kld_status status = kld_options_parse(command, argc, argv, &options, positional, &error);
    if (status)
        return status == KLD_CANCELLED ? KLD_EXIT_OK : kld_cli_usage(command, &error);
    struct top *top = calloc(1, sizeof *top);
    if (!top) {
        kld_error_set(&error, KLD_NO_MEMORY, "no memory for what is shown");
        return kld_cli_fail(&error);
    }
    kld_cli_server_shown(&options.server, top->url, sizeof top->url);
    if ((status = check(&options, top->url, &error))) {
        free(top);
        return kld_cli_usage(command, &error);
    }
    top->options = &options;
    top->screen = !options.batch && !options.once && !options.count && isatty(STDOUT_FILENO);
    int code = KLD_EXIT_FAILED;
    if ((status = open_all(top, &error))) {
        top->screen = false;
        code = kld_cli_fail(&error);
    } else {
        screen_enter(top);
        code = top->screen ? run_screen(top) : run_batch(top);
    }
    close_all(top);
    return code;
}

static const struct kld_option top_list[] = {
    {"d", KLD_OPTION_NUMBER, "SECONDS", "between two looks (default 1)",
     offsetof(struct top_options, delay_s), 0},
    {"n", KLD_OPTION_COUNT, "N", "lines, not a screen: N times",
     offsetof(struct top_options, count), 0},
    {"batch", KLD_OPTION_FLAG, NULL, "lines, not a screen: until it is interrupted",
     offsetof(struct top_options, batch), 0},
    {"once", KLD_OPTION_FLAG, NULL, "the same as -n 1", offsetof(struct top_options, once), 0},
    KLD_SERVER_OPTIONS(struct top_options, server),
    KLD_OPTIONS_END,
};

const struct kld_command kld_command_top = {
    .name = "top",
    .arguments = "",
    .summary = "a live view of a server: rates, latencies, clients, devices",
    .details =
        "Reads /metrics over http (with tokens: the right `metrics`). Rates and latencies are of "
        "the\n"
        "time between two looks; p50 and p99 as if values were spread evenly in a bucket of their\n"
        "histogram. roofline: what part of what the device's memory moves at best, where the "
        "server\n"
        "was started with --measure-roofline or --roofline-bytes-per-s. q or Ctrl-C ends it. In a\n"
        "pipe it prints lines. A server that is away is waited for, and so is the first answer on "
        "a\n"
        "screen; otherwise no answer is exit status 3.\n",
    .options = top_list,
    .run = run_top,
};
