/* test_child.c - the pause before a child's next start, and a worker that is succeeded while it
 * still goes. The supervisor starts /proc/self/exe: here that is this program, whose main() then
 * plays the child that its index names. */
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/log.h"
#include "server/supervisor/supervisor.h"
#include "tests/unit/unit.h"

/* Of its first life each says that it serves; then: */
enum part {
    REFUSED, /* ends; each later life is refused the device */
    DIES,    /* ends, and so does each later life, without a word */
    LOSES,   /* loses the device and lingers, whoever asks it to end; its successor serves */
    BABBLES, /* says what no child says, in packets of any size */
    SILENT,  /* closes its control socket */
    REPEATS, /* says the same again, and that it cannot start */
    WELL,    /* gives signs of life; each later life does so too, here and below */
    HANGS,   /* gives none */
    STANDS,  /* says that its threads stand still */
    STOOD,   /* says so once, then that it is well */
    LATE,    /* does not say that it serves, and hangs; a later life does */
    LINGERS, /* as LOSES, and its successors give signs of life */
    DAWDLES, /* ends before it would be too late, and so does each later life */
    SLOW,    /* serves after longer than it may be silent then, and gives signs of life */
};

#define DAWDLERS_STUCK_MS 5000 /* of which a start may take two fifths */
#define SLOW_START_MS 1500

static struct kld_supervisor supervisor;
static uv_timer_t patience;
static struct kld_error err;

static void answer(enum part part, bool first) {
    struct pollfd poll_fd = {.fd = KLD_FD_CONTROL, .events = POLLIN};
    struct kld_child_order order;
    int fd;
    poll(&poll_fd, 1, -1);
    if (kld_child_hear(KLD_FD_CONTROL, &order, &fd) == KLD_HEARD_ORDER && part != HANGS)
        kld_child_alive_send(KLD_FD_CONTROL, part == STANDS || (part == STOOD && first)
                                                 ? KLD_ALIVE_STUCK
                                                 : KLD_ALIVE);
}

static int play(enum part part) {
    struct kld_stats_page *page;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (kld_stats_attach(KLD_FD_STATS, KLD_FD_STATE, &page, &err) != KLD_OK)
        return 3;
    uint64_t life = atomic_fetch_add(&page->common.value[KLD_STAT_gateway_restarts_total], 1);
    while (part == LATE && life == 0)
        pause();
    if (part == SLOW)
        usleep(SLOW_START_MS * 1000);
    if (part == DAWDLES)
        usleep(3 * DAWDLERS_STUCK_MS / 5 * 1000);
    else if (life == 0 || part == LOSES || part >= WELL)
        kld_child_report_send(KLD_OK, "cpu", 1, "");
    else if (part == REFUSED)
        kld_child_report_send(life % 2 ? KLD_BUSY : KLD_UNAVAILABLE, "", 0,
                              "the device is not yet to be had");
    if (life == 0 && (part == LOSES || part == LINGERS)) {
        signal(SIGTERM, SIG_IGN);
        kld_child_report_send(KLD_DEVICE_LOST, "cpu", 0, "the device is lost");
    }
    while (part == LINGERS && life == 0)
        pause();
    if (part == BABBLES) {
        char nonsense[4096];
        memset(nonsense, 'x', sizeof nonsense); /* texts without an end, numbers that are none */
        (void)!send(KLD_FD_CONTROL, nonsense, sizeof(struct kld_child_report), MSG_NOSIGNAL);
        (void)!send(KLD_FD_CONTROL, nonsense, 1, MSG_NOSIGNAL);
        (void)!send(KLD_FD_CONTROL, nonsense, sizeof nonsense, MSG_NOSIGNAL);
    }
    if (part == SILENT)
        close(KLD_FD_CONTROL);
    if (part == REPEATS && life == 0) {
        usleep(20000);
        kld_child_report_send(KLD_OK, "cpu", 1, "");
        kld_child_report_send(KLD_UNAVAILABLE, "", 0, "the device is not yet to be had");
    }
    for (bool first = true; part >= WELL && part != DAWDLES; first = false)
        answer(part, first);
    while (part == LOSES || part == SILENT || part == REPEATS || (part == BABBLES && life == 0))
        pause();
    return 1;
}

static void too_long(uv_timer_t *timer) { ck_abort_msg("nothing comes of it"); }

static void begin(void) {
    enum kld_config_action action;
    char *no_environment[] = {NULL};
    ck_assert_int_eq(kld_log_init("supervisor", "error", "text", &err), KLD_OK);
    ck_assert_int_eq(kld_config_parse(0, NULL, no_environment, &supervisor.config, &action, &err),
                     KLD_OK);
    ck_assert_int_eq(kld_stats_create(&supervisor.page, &supervisor.stats_fds, &err), KLD_OK);
    supervisor.announced = true;
    uv_loop_init(&supervisor.loop);
    uv_timer_init(&supervisor.loop, &patience);
    uv_timer_start(&patience, too_long, 30000, 0);
}

static struct kld_watched *start(enum part part) {
    struct kld_watched *child = &supervisor.worker[part];
    begin();
    kld_watched_init(child, &supervisor, "worker", part, open("/dev/null", O_RDWR | O_CLOEXEC));
    kld_watched_start(child);
    return child;
}

static uint64_t restarts_of(const struct kld_watched *child) {
    return atomic_load(&child->stats->value[KLD_STAT_worker_restarts_total]);
}

/* Until so many restarts; the longest of the pauses before them. */
static uint64_t longest_pause(struct kld_watched *child, uint64_t restarts) {
    uint64_t longest = 0;
    while (restarts_of(child) < restarts) {
        uv_run(&supervisor.loop, UV_RUN_ONCE);
        uint64_t due = uv_timer_get_due_in(&child->pause);
        if (child->state == KLD_CHILD_WAITING && due > longest)
            longest = due;
    }
    return longest;
}

START_TEST(one_that_is_refused_asks_again_soon) {
    struct kld_watched *child = start(REFUSED);
    uint64_t longest = longest_pause(child, 6);
    ck_assert_uint_gt(longest, 0);
    ck_assert_uint_le(longest, 100);
    child->refusals = KLD_REFUSALS_IN_A_ROW; /* but not for ever */
    ck_assert_uint_gt(longest_pause(child, 9), 100);
}
END_TEST

START_TEST(no_pause_is_longer_than_configured) {
    struct kld_watched *child = start(REFUSED);
    supervisor.config.restart_ms_max = 20;
    ck_assert_uint_le(longest_pause(child, 6), 20);
}
END_TEST

START_TEST(one_that_dies_waits_longer_each_time) {
    struct kld_watched *child = start(DIES);
    ck_assert_uint_gt(longest_pause(child, 4), 150);
}
END_TEST

START_TEST(a_lost_device_has_its_successor_at_once) {
    struct kld_watched *child = start(LOSES);
    while (restarts_of(child) < 1 || child->state != KLD_CHILD_READY)
        uv_run(&supervisor.loop, UV_RUN_ONCE);
    ck_assert_ptr_nonnull(child->lives->next); /* which has not ended */
    ck_assert_ptr_eq(child->life, child->lives);
    ck_assert_int_eq(uv_process_kill(&child->lives->next->process, 0), 0);
}
END_TEST

/* As at the end of its time, or a second ^C. */
START_TEST(all_lives_end_with_the_server) {
    struct kld_watched *child = start(LOSES);
    while (restarts_of(child) < 1 || child->state != KLD_CHILD_READY)
        uv_run(&supervisor.loop, UV_RUN_ONCE);
    pid_t lost = child->lives->next->process.pid;
    supervisor.workers = LOSES + 1; /* those before it are not there */
    supervisor.config.drain_ms = 0;
    supervisor.notify.fd = -1;
    uv_timer_init(&supervisor.loop, &supervisor.drain);
    supervisor.drain.data = &supervisor;
    kld_supervisor_drain(&supervisor, SIGTERM);
    uv_run(&supervisor.loop, UV_RUN_DEFAULT);
    ck_assert_ptr_null(child->lives);
    ck_assert_int_eq(kill(lost, 0), -1);
}
END_TEST

static void nothing(uv_timer_t *timer) {}

/* It reads what strangers send, and has no device: its word starts no other beside it. */
START_TEST(a_gateway_has_no_device_to_lose) {
    uv_timer_t while_it_lies;
    struct kld_watched *child = &supervisor.gateway;
    begin();
    supervisor.reload.secrets_fd = -1;
    kld_watched_init(child, &supervisor, "gateway", LOSES, open("/dev/null", O_RDWR | O_CLOEXEC));
    kld_watched_start(child);
    while (child->state != KLD_CHILD_READY)
        uv_run(&supervisor.loop, UV_RUN_ONCE);
    uv_timer_init(&supervisor.loop, &while_it_lies);
    uv_timer_start(&while_it_lies, nothing, 500, 0);
    while (uv_is_active((uv_handle_t *)&while_it_lies))
        uv_run(&supervisor.loop, UV_RUN_ONCE);
    ck_assert_int_eq(child->state, KLD_CHILD_READY);
    ck_assert_ptr_null(child->lives->next);
}
END_TEST

START_TEST(what_no_child_says_is_not_taken_for_a_report) {
    struct kld_watched *child = start(BABBLES);
    child->ever_ready = true; /* or the server ends, which is right, too */
    while (child->state != KLD_CHILD_READY)
        uv_run(&supervisor.loop, UV_RUN_ONCE);
    ck_assert_uint_le(longest_pause(child, 1), 100); /* nor is who says it left as he is */
    ck_assert(!supervisor.failed && !supervisor.draining);
}
END_TEST

START_TEST(who_serves_need_not_say_so_again) {
    uv_timer_t while_it_repeats;
    struct kld_watched *child = start(REPEATS);
    while (child->state != KLD_CHILD_READY)
        uv_run(&supervisor.loop, UV_RUN_ONCE);
    uint64_t ready_ms = child->ready_ms;
    uv_timer_init(&supervisor.loop, &while_it_repeats);
    uv_timer_start(&while_it_repeats, nothing, 200, 0);
    while (uv_is_active((uv_handle_t *)&while_it_repeats))
        uv_run(&supervisor.loop, UV_RUN_ONCE);
    ck_assert_int_eq(child->state, KLD_CHILD_READY);
    ck_assert_uint_eq(child->ready_ms, ready_ms); /* nor is it taken for a younger one */
    ck_assert_uint_eq(restarts_of(child), 0);
}
END_TEST

/* It has ended for all that anybody can tell, and without this for ever serves unheard. */
START_TEST(one_that_closes_its_control_socket_is_replaced) {
    struct kld_watched *child = start(SILENT);
    ck_assert_uint_le(longest_pause(child, 1), 100);
    ck_assert(!supervisor.failed && !supervisor.draining);
}
END_TEST

/* As it is when libuv has waited for the child and has not said so yet. */
START_TEST(who_has_the_number_of_a_child_is_not_signalled) {
    struct kld_watched *child = start(WELL);
    while (child->state != KLD_CHILD_READY)
        uv_run(&supervisor.loop, UV_RUN_ONCE);
    UNIT_NEEDS(child->life->pidfd >= 0, "descriptors of processes (Linux 5.3)");
    pid_t own = child->life->process.pid, stranger = fork();
    while (stranger == 0)
        pause();
    child->life->process.pid = stranger;
    kld_watched_signal(child, SIGKILL);
    kld_watched_kill(child);
    siginfo_t ended;
    ck_assert_int_eq(waitid(P_PID, (id_t)own, &ended, WEXITED | WNOWAIT), 0);
    child->life->process.pid = own;
    ck_assert_int_eq(waitpid(stranger, NULL, WNOHANG), 0);
    kill(stranger, SIGKILL);
    ck_assert_int_eq(waitpid(stranger, NULL, 0), stranger);
    longest_pause(child, 1);
}
END_TEST

#define STUCK_MS 400 /* five looks, 100 ms apart */
#define WELL_STUCK_MS                                                                              \
    800 /* of one that is to give signs of life also where the machine is busy                     \
         */

static uint64_t start_ms; /* of whom watch() watches; 0: any */

static struct kld_watched *watch(enum part part, uint64_t stuck_ms) {
    struct kld_watched *child = start(part);
    supervisor.workers = part + 1; /* those before it are not there */
    supervisor.config.stuck_ms = stuck_ms;
    supervisor.config.start_ms = start_ms;
    kld_watchdog_start(&supervisor);
    while (child->state != KLD_CHILD_READY)
        uv_run(&supervisor.loop, UV_RUN_ONCE);
    return child;
}

static void pass(uint64_t ms) {
    uv_timer_t timer;
    uv_timer_init(&supervisor.loop, &timer);
    uv_timer_start(&timer, nothing, ms, 0);
    while (uv_is_active((uv_handle_t *)&timer))
        uv_run(&supervisor.loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(&supervisor.loop, UV_RUN_NOWAIT);
}

static uint64_t stuck_of(const struct kld_watched *child) {
    return atomic_load(&child->stats->value[KLD_STAT_worker_stuck_total]);
}

START_TEST(one_that_gives_no_sign_of_life_is_replaced) {
    struct kld_watched *child = watch(HANGS, STUCK_MS);
    pass(STUCK_MS / 2);
    ck_assert_uint_eq(stuck_of(child), 0);
    longest_pause(child, 1);
    ck_assert_uint_eq(stuck_of(child), 1);
    ck_assert(!supervisor.failed && !supervisor.draining);
}
END_TEST

START_TEST(one_that_says_twice_that_it_is_stuck_is_replaced) {
    struct kld_watched *child = watch(STANDS, 3 * STUCK_MS);
    longest_pause(child, 1);
    ck_assert_uint_eq(stuck_of(child), 1);
}
END_TEST

/* Its successor is well, and stays. */
START_TEST(a_lost_one_that_does_not_end_is_killed) {
    struct kld_watched *child = watch(LINGERS, STUCK_MS);
    while (restarts_of(child) < 1 || child->state != KLD_CHILD_READY)
        uv_run(&supervisor.loop, UV_RUN_ONCE);
    ck_assert_ptr_nonnull(child->lives->next);
    while (child->lives->next)
        uv_run(&supervisor.loop, UV_RUN_ONCE);
    pass(STUCK_MS);
    ck_assert_int_eq(child->state, KLD_CHILD_READY);
    ck_assert_uint_eq(restarts_of(child), 1);
    ck_assert_uint_eq(stuck_of(child), 0);
}
END_TEST

/* Nor are those that were silent because nobody asked, and whose answers nobody read. */
START_TEST(one_that_is_well_is_not_replaced) {
    struct kld_watched *child = watch(WELL, WELL_STUCK_MS);
    for (int i = 0; i < 2; i++) {
        pass(WELL_STUCK_MS / 2);
        usleep(3 * WELL_STUCK_MS / 2 * 1000);
    }
    pass(WELL_STUCK_MS);
    ck_assert_int_eq(child->state, KLD_CHILD_READY);
    ck_assert_uint_eq(stuck_of(child) + restarts_of(child), 0);
}
END_TEST

START_TEST(one_that_was_stuck_once_is_not_replaced) {
    struct kld_watched *child = watch(STOOD, STUCK_MS);
    pass(2 * STUCK_MS);
    ck_assert_uint_eq(stuck_of(child) + restarts_of(child), 0);
}
END_TEST

START_TEST(nobody_is_looked_at_where_that_is_not_wanted) {
    struct kld_watched *child = watch(STANDS, 0);
    pass(2 * STUCK_MS);
    ck_assert_uint_eq(stuck_of(child) + restarts_of(child), 0);
}
END_TEST

START_TEST(a_gateway_that_gives_no_sign_of_life_is_replaced) {
    struct kld_watched *child = &supervisor.gateway;
    begin();
    supervisor.reload.secrets_fd = -1;
    supervisor.config.stuck_ms = STUCK_MS;
    kld_watched_init(child, &supervisor, "gateway", HANGS, open("/dev/null", O_RDWR | O_CLOEXEC));
    kld_watched_start(child);
    kld_watchdog_start(&supervisor);
    pid_t first = child->life->process.pid;
    while (child->state != KLD_CHILD_READY || child->life->process.pid == first)
        uv_run(&supervisor.loop, UV_RUN_ONCE);
    ck_assert_uint_eq(atomic_load(&child->stats->value[KLD_STAT_gateway_stuck_total]), 1);
    ck_assert(!supervisor.failed && !supervisor.draining);
}
END_TEST

START_TEST(one_that_does_not_say_that_it_serves_is_replaced) {
    char text[4096] = "";
    start_ms = 1500; /* which the later life has, too */
    FILE *log = tmpfile();
    ck_assert(log && dup2(fileno(log), STDERR_FILENO) == STDERR_FILENO);
    struct kld_watched *child = watch(LATE, STUCK_MS);
    ck_assert_int_ge(pread(fileno(log), text, sizeof text - 1, 0), 0);
    ck_assert_ptr_nonnull(strstr(text, " start_ms=1500 ")); /* which to raise */
    ck_assert_uint_eq(stuck_of(child), 1);
    ck_assert_uint_eq(restarts_of(child), 1);
    ck_assert(!supervisor.failed && !supervisor.draining);
}
END_TEST

static void serves_late(uint64_t longest_start_ms) {
    start_ms = longest_start_ms;
    struct kld_watched *child = watch(SLOW, WELL_STUCK_MS);
    pass(2 * WELL_STUCK_MS);
    ck_assert_int_eq(child->state, KLD_CHILD_READY);
    ck_assert_uint_eq(stuck_of(child) + restarts_of(child), 0);
}

/* The driver takes its time: longer than a loop may stand still, where that is to be noticed soon.
 */
START_TEST(a_start_may_take_longer_than_a_sign_of_life) { serves_late(60000); }
END_TEST

START_TEST(a_start_may_take_any_time_where_that_is_wanted) { serves_late(0); }
END_TEST

/* Each has all of the time. */
START_TEST(one_that_starts_is_not_taken_for_the_one_before_it) {
    struct kld_watched *child = start(DAWDLES);
    supervisor.workers = DAWDLES + 1;
    supervisor.config.stuck_ms = DAWDLERS_STUCK_MS;
    supervisor.config.start_ms = 1; /* less than it may be silent */
    kld_watchdog_start(&supervisor);
    longest_pause(child, 2);
    ck_assert_uint_eq(stuck_of(child), 0);
}
END_TEST

int main(int argc, char **argv) {
    if (argc > 2 && strncmp(argv[1], "--role=", 7) == 0)
        return play((enum part)strtoul(argv[2] + strlen("--index="), NULL, 10));
    const TTest *const tests[] = {one_that_is_refused_asks_again_soon,
                                  no_pause_is_longer_than_configured,
                                  one_that_dies_waits_longer_each_time,
                                  a_lost_device_has_its_successor_at_once,
                                  all_lives_end_with_the_server,
                                  a_lost_one_that_does_not_end_is_killed,
                                  a_gateway_has_no_device_to_lose,
                                  what_no_child_says_is_not_taken_for_a_report,
                                  who_serves_need_not_say_so_again,
                                  one_that_closes_its_control_socket_is_replaced,
                                  who_has_the_number_of_a_child_is_not_signalled,
                                  one_that_gives_no_sign_of_life_is_replaced,
                                  one_that_says_twice_that_it_is_stuck_is_replaced,
                                  one_that_is_well_is_not_replaced,
                                  one_that_was_stuck_once_is_not_replaced,
                                  a_gateway_that_gives_no_sign_of_life_is_replaced,
                                  one_that_does_not_say_that_it_serves_is_replaced,
                                  a_start_may_take_longer_than_a_sign_of_life,
                                  a_start_may_take_any_time_where_that_is_wanted,
                                  one_that_starts_is_not_taken_for_the_one_before_it,
                                  nobody_is_looked_at_where_that_is_not_wanted};
    return unit_run("server/supervisor/child", tests, sizeof tests / sizeof tests[0]);
}
