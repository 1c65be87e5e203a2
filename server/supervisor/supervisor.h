/* supervisor.h - the process that a person starts: it holds the listening sockets, starts, watches
 * and restarts the others, and ends them in order. It computes nothing and reads nothing that a
 * client sent. Everything here belongs to its one thread, the libuv loop. */
#ifndef KLD_SERVER_SUPERVISOR_SUPERVISOR_H
#define KLD_SERVER_SUPERVISOR_SUPERVISOR_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <uv.h>

#include "server/config.h"
#include "server/role.h"
#include "server/secrets.h"
#include "server/stats.h"
#include "server/supervisor/notify.h"
#include "server/supervisor/ready_line.h"

/* ---- sockets.c: the listening sockets -------------------------------------------------------- */

#define KLD_ADDRESS_TEXT_MAX 80

struct kld_http_socket {
    int fd;                             /* -1: HTTP is off */
    char address[KLD_ADDRESS_TEXT_MAX]; /* as bound: "127.0.0.1:8080", "[::1]:8080", or "" */
};

struct kld_unix_socket {
    int fd;       /* -1: not open */
    dev_t device; /* with inode: the file that we made, so that we unlink no other */
    ino_t inode;
};

/* flag: for errors. text: ADDR:PORT, [ADDR]:PORT for IPv6, "localhost:PORT"; "" leaves HTTP off.
 * insecure: an address that other machines can reach is allowed; so with tokens, or because the
 * operator says so. */
enum kld_status kld_http_socket_open(const char *flag, const char *text, bool insecure,
                                     struct kld_http_socket *ret_socket, struct kld_error *err);

/* May it be listened on, as far as the text says? */
enum kld_status kld_http_address_check(const char *flag, const char *text, bool insecure,
                                       struct kld_error *err);

/* One that a service manager opened; the same rule about who may reach it. */
enum kld_status kld_http_socket_adopt(const char *flag, int fd, bool insecure,
                                      struct kld_http_socket *ret_socket, struct kld_error *err);

/* The socket of worker `index`: `path` of the first, then path.1, path.2, ... */
enum kld_status kld_unix_socket_name(const char *path, uint32_t index,
                                     char ret_path[KLD_CONFIG_TEXT_MAX], struct kld_error *err);
/* Where the first worker's socket lies if the configuration does not say. */
enum kld_status kld_unix_socket_path(const char *configured, char ret_path[KLD_CONFIG_TEXT_MAX],
                                     struct kld_error *err);
/* Binds and listens at path. A file left by a server that is gone is replaced; a live server there,
 * or something that is no socket, is an error. make_folder: the folder may be made.
 * *lock_waited_ns: for how long the sockets of this start have waited for the folder's lock; 0 at
 * first. */
enum kld_status kld_unix_socket_open(const char *path, uint32_t mode, bool make_folder,
                                     uint64_t *lock_waited_ns, struct kld_unix_socket *ret_socket,
                                     struct kld_error *err);
/* One that a service manager opened, which has to be at `path` and is not removed in the end. */
enum kld_status kld_unix_socket_adopt(int fd, const char *path, struct kld_unix_socket *ret_socket,
                                      struct kld_error *err);
void kld_unix_socket_where(int fd, char ret_path[KLD_CONFIG_TEXT_MAX]);
/* Closes and removes the file, if it is still ours. */
void kld_unix_socket_close(struct kld_unix_socket *socket, const char *path);

struct kld_supervisor;

/* ---- settings.c ------------------------------------------------------------------------------ */

/* Could any start do with them? */
enum kld_status kld_settings_check(const struct kld_config *config,
                                   const struct kld_inherited *inherited, struct kld_error *err);
/* Says in the log, at start, what does nothing: settings where passed sockets decide, and variables
 * that are no settings. config: as it was configured. */
void kld_settings_tell(const struct kld_supervisor *supervisor, const struct kld_config *config,
                       char *const *environment);

/* ---- child.c: one child, over all its lives ---------------------------------------------------
 */

/* Starts in a row that a device may refuse to a child that served before: until then the next one
 * follows within 100 ms, later after the pauses of a child that keeps dying. */
#define KLD_REFUSALS_IN_A_ROW 50

enum kld_child_state {
    KLD_CHILD_STOPPED,  /* not running and not to be started */
    KLD_CHILD_WAITING,  /* the pause before a restart */
    KLD_CHILD_STARTING, /* runs, has not reported */
    KLD_CHILD_READY,    /* runs and serves */
};

/* What a look found, see watchdog.c. */
enum kld_ill {
    KLD_ILL_NOT,
    KLD_ILL_STARTS, /* runs, and has not said that it serves */
    KLD_ILL_SILENT, /* serves, and answers nothing */
    KLD_ILL_STUCK,  /* says so */
};

/* One process of a child. Usually there is one at a time; a worker whose device is lost has its
 * successor while it still goes. Allocated by kld_watched_start(); frees itself once its process
 * has ended and its handles are closed. */
struct kld_life {
    struct kld_watched *child;
    struct kld_life *next; /* all of the child's whose handles are not closed */
    uv_process_t process;
    uv_poll_t control;               /* its descriptor is control_fd */
    bool control_open, control_made; /* it is heard; its handle is to be closed */
    int unheard;                     /* why its control socket was given up, an errno; 0 */
    bool running;                    /* spawned, and not waited for yet: its pid is its own */
    bool asked;     /* to end: once, because a child that is ending may have stopped listening */
    bool stuck;     /* killed for it: once, however long it takes to end */
    uint32_t looks; /* of watchdog.c, since it was succeeded */
    int control_fd; /* our end of the pair; -1 */
    int pidfd; /* of its process; -1: not spawned, or the kernel has none (before 5.3) or no more */
};

struct kld_watched {
    struct kld_supervisor *supervisor; /* constant */
    const char *role;                  /* constant: "worker", "gateway" */
    char name[16];                     /* constant: "worker0", "gateway" */
    uint32_t index;                    /* constant: of the worker; 0 */
    int listen_fd;                     /* constant; the supervisor's */
    int metrics_fd;                    /* the same, or -1 */
    struct kld_stats *stats;           /* constant: its block of the page */
    enum kld_stat restarts;            /* constant: the counter of its restarts */
    enum kld_child_state state;
    struct kld_life *life;  /* the newest; NULL: it ended or is as good as gone */
    struct kld_life *lives; /* all */
    uv_timer_t pause;       /* open from kld_watched_init() on */
    uint64_t ready_ms;      /* uv_now() of its report; 0: has not reported in this life */
    uint64_t died_ms;       /* uv_now() of the last death; 0: none */
    uint64_t pause_ms;      /* before the next restart */
    uint32_t failures;      /* deaths in a row before a first report */
    uint32_t refusals;      /* starts in a row that ended with KLD_UNAVAILABLE */
    bool refused;           /* so did this life's */
    bool ever_ready;
    bool answered;    /* the service manager's question, see watchdog.c, as the next four */
    bool seen_alive;  /* it gave a sign of life since the last look at it */
    bool says_stuck;  /* its newest was that */
    enum kld_ill ill; /* what the last look at this life found ... */
    uint32_t looks;   /* ... and so many in a row, up to that */
    bool level_due;   /* it was not told yet of the log level (reload.c) */
    bool gateway_due; /* nor who the gateway is (introduce.c) */
};

void kld_watched_init(struct kld_watched *child, struct kld_supervisor *supervisor,
                      const char *role, uint32_t index, int listen_fd);
void kld_watched_start(struct kld_watched *child);
/* False: it could not be told, and errno says why; EPIPE: it is not there. fd: goes with it; -1:
 * none. */
bool kld_watched_order(struct kld_watched *child, enum kld_order_kind kind, const char *log_level,
                       int fd);
bool kld_watched_send(struct kld_watched *child, const struct kld_child_order *order, int fd);
/* SIGTERM, once in a life. */
void kld_watched_ask(struct kld_watched *child);
void kld_watched_signal(struct kld_watched *child, int signal_number); /* nothing if not running */
/* All its lives, those that were succeeded, too. */
void kld_watched_kill(struct kld_watched *child);
void kld_life_kill(struct kld_life *life); /* nothing if it has ended */
/* One packet of what it says; false: there was none. Called as soon as there is one; for the
 * fuzzer. */
bool kld_watched_hear(struct kld_life *life);
/* Not started again; a pause is cut short. What runs goes on running. */
void kld_watched_retire(struct kld_watched *child);

/* ---- reload.c ---------------------------------------------------------------------------------
 */

#define KLD_KEPT_TEXT_MAX 400 /* names of settings that a reload could not change */
#define KLD_READINGS_MAX 3    /* under way at a time; uv's pool has four threads */

enum kld_reload_state {
    KLD_RELOAD_IDLE,
    KLD_RELOAD_READING, /* the configuration and its files, on uv's pool */
    KLD_RELOAD_ASKING,  /* the gateway, which checks and takes over */
};

struct kld_reading; /* one look at configuration and files; see reload.c */

struct kld_reload {
    const struct kld_start *start; /* constant; the pool reads it */
    struct kld_config in_use;      /* as parsed at start, with what reloads changed of it */
    enum kld_reload_state state;
    bool wanted;    /* SIGHUP came, or came again, since the last reload began */
    bool repeated;  /* a gateway ended while it was asked; its successor is, and no third one */
    int secrets_fd; /* memfd of what is in use, for each gateway that is started; -1: no HTTP */

    uv_timer_t patience;         /* with files, or a gateway, that do not answer */
    uv_timer_t retell;           /* for workers that could not be told of the log level */
    struct kld_reading *reading; /* while READING */
    uint32_t readings;           /* with those that were given up and are not through */
    struct kld_config next;      /* what was read, from here on */
    int next_fd;
    char kept[KLD_KEPT_TEXT_MAX];
};

/* The files as they are at start, which has to work out. */
enum kld_status kld_reload_open(struct kld_supervisor *supervisor, const struct kld_config *config,
                                const struct kld_start *start, struct kld_error *err);
/* With the loop; before the first SIGHUP. */
void kld_reload_init(struct kld_supervisor *supervisor);
void kld_reload_close(struct kld_supervisor *supervisor);
/* SIGHUP: begins as soon as the server is up and no other reload is under way. */
void kld_reload_want(struct kld_supervisor *supervisor);
/* A child serves; the reload that waited for it may begin. */
void kld_reload_proceed(struct kld_supervisor *supervisor);
void kld_reload_answered(struct kld_supervisor *supervisor, const struct kld_child_report *report);
void kld_reload_gateway_gone(struct kld_supervisor *supervisor);

/* ---- introduce.c ------------------------------------------------------------------------------
 */

void kld_introduce_init(struct kld_supervisor *supervisor); /* with the loop */
/* Called by child.c: it has just been started. Workers are told which process the gateway is. */
void kld_introduce(struct kld_watched *started);

/* ---- hangup.c ---------------------------------------------------------------------------------
 */

struct kld_hangup {
    int fd; /* signalfd of SIGHUP; -1 */
    uv_poll_t poll;
    bool has_terminal; /* had, at start: its end is ours, unless SIGHUP was ignored (nohup) */
};

/* After uv_loop_init(); SIGHUP is blocked. Where it cannot be watched, which is logged, it stays
 * blocked and does nothing. */
void kld_hangup_open(struct kld_supervisor *supervisor, bool ignored);
void kld_hangup_close(struct kld_supervisor *supervisor); /* after the loop */

/* ---- usage.c ----------------------------------------------------------------------------------
 */

/* The process whose start the page has. */
struct kld_seen {
    pid_t pid;      /* 0: none */
    uint64_t ticks; /* when it began, after the machine */
};

/* ---- supervisor.c ------------------------------------------------------------------------------
 */

struct kld_supervisor {
    struct kld_config config; /* unix resolved; backend becomes what the first worker chose, and
                               * device the list of what it found */
    uv_loop_t loop;
    uv_signal_t on_term, on_int, on_child;
    uv_timer_t drain;           /* from SIGTERM to SIGKILL */
    uv_timer_t reaping;         /* as PID 1: looks after children that are not ours */
    uv_timer_t watchdog, stuck; /* see watchdog.c */
    uv_timer_t usage;           /* see usage.c */
    uv_timer_t introduce_again; /* see introduce.c */
    struct kld_seen seen[KLD_PROCESS_WORKER + KLD_DEVICES_MAX]; /* at their places in the page */
    struct kld_notify notify;
    struct kld_ready_line ready_line;
    struct kld_inherited inherited; /* what of it is not -1 was adopted, or will be */
    struct kld_http_socket http, metrics;
    struct kld_unix_socket unix_socket[KLD_DEVICES_MAX]; /* one a worker */
    struct kld_stats_page *page;
    struct kld_stats_fds stats_fds;
    struct kld_watched gateway, worker[KLD_DEVICES_MAX];
    uint32_t workers;        /* those of the array that are open: at first one, then all */
    uint32_t workers_max;    /* how many there will be; 0: the first will say */
    bool alone;              /* the first worker is to report before the others are started */
    bool make_folder;        /* of the sockets, where nobody named it */
    uint64_t lock_waited_ns; /* see kld_unix_socket_open() */
    bool draining;           /* SIGTERM came, or failed */
    bool killing;            /* the drain time is over: nothing is started again */
    bool failed;             /* it could not start: exit status 1 */
    bool settings_wrong;     /* for which no other start can do more: 2 */
    bool announced;
    bool watchdog_due; /* the service manager waits for a sign of life */
    struct kld_reload reload;
    struct kld_hangup hangup;
};

/* Ends the server in order, as a signal asks. Once is enough. */
void kld_supervisor_drain(struct kld_supervisor *supervisor, int signal_number);
/* READY=1, to the service manager. problem: what it is to show beside; NULL: nothing. */
void kld_supervisor_tell_ready(struct kld_supervisor *supervisor, const char *problem);

/* Called by child.c. */
void kld_supervisor_child_ready(struct kld_supervisor *supervisor, struct kld_watched *child,
                                const struct kld_child_report *report);
void kld_supervisor_child_gone(struct kld_supervisor *supervisor, struct kld_watched *child);
/* It cannot start: ends everything, exit status 1. */
void kld_supervisor_fail(struct kld_supervisor *supervisor, const struct kld_watched *child,
                         const char *reason);
/* Should a child that died be started again? */
bool kld_supervisor_wants(const struct kld_supervisor *supervisor, const struct kld_watched *child);

/* ---- watchdog.c -------------------------------------------------------------------------------
 */

void kld_watchdog_start(struct kld_supervisor *supervisor);
/* Called by child.c and supervisor.c: it was started; it serves; it answered. */
void kld_watchdog_started(struct kld_watched *child);
void kld_watchdog_ready(struct kld_watched *child);
void kld_watchdog_answered(struct kld_watched *child, enum kld_alive alive);

/* ---- usage.c ----------------------------------------------------------------------------------
 */

void kld_usage_start(struct kld_supervisor *supervisor);

#endif
