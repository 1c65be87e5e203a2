/* test_usage.c - when the processes began, by a clock that somebody sets meanwhile. */
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "server/supervisor/supervisor.h"
#include "tests/unit/unit.h"

static struct kld_supervisor supervisor;
static struct kld_stats_page page;
static time_t ahead_s;

/* In libc's place. */
int clock_gettime(clockid_t clock, struct timespec *ret_now) {
    int result = (int)syscall(SYS_clock_gettime, clock, ret_now);
    if (clock == CLOCK_REALTIME)
        ret_now->tv_sec += ahead_s;
    return result;
}

static uint64_t started_ms(enum kld_process place) {
    return atomic_load(&page.process[place].started_ms);
}

static void look(void) {
    uv_timer_set_repeat(&supervisor.usage, 1);
    uv_timer_again(&supervisor.usage);
    uv_run(&supervisor.loop, UV_RUN_ONCE);
}

static pid_t fork_waiting(void) {
    pid_t pid = fork();
    if (pid == 0)
        for (;;)
            pause();
    return pid;
}

static void end(pid_t pid) {
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

START_TEST(a_clock_that_is_set_is_no_restart) {
    struct kld_life life = {.process.pid = fork_waiting()};
    struct timespec now;
    supervisor.page = &page;
    supervisor.gateway.life = &life;
    ck_assert_int_eq(uv_loop_init(&supervisor.loop), 0);
    kld_usage_start(&supervisor);
    look();
    uint64_t own_ms = started_ms(KLD_PROCESS_SUPERVISOR);
    uint64_t gateway_ms = started_ms(KLD_PROCESS_GATEWAY);
    clock_gettime(CLOCK_REALTIME, &now);
    ck_assert_uint_le(own_ms, (uint64_t)now.tv_sec * 1000 + 1000);
    ck_assert_uint_gt(own_ms + 60000, (uint64_t)now.tv_sec * 1000);

    ahead_s = 3600;
    look();
    ck_assert_uint_eq(started_ms(KLD_PROCESS_SUPERVISOR), own_ms);
    ck_assert_uint_eq(started_ms(KLD_PROCESS_GATEWAY), gateway_ms);

    end(life.process.pid); /* it does not run: not there, and by the new clock once it does */
    look();
    ck_assert_uint_eq(started_ms(KLD_PROCESS_GATEWAY), 0);
    life.process.pid = fork_waiting();
    look();
    ck_assert_uint_gt(started_ms(KLD_PROCESS_GATEWAY), gateway_ms + 3500000);
    ck_assert_uint_eq(started_ms(KLD_PROCESS_SUPERVISOR), own_ms);
    end(life.process.pid);
    uv_close((uv_handle_t *)&supervisor.usage, NULL);
    uv_run(&supervisor.loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(uv_loop_close(&supervisor.loop), 0);
}
END_TEST

UNIT_MAIN("server/supervisor/usage", a_clock_that_is_set_is_no_restart)
