/* test_roll.c - all HTTP loops are to turn before the gateway gives a sign of life. */
#include "server/gateway/roll.h"

#include <stddef.h>
#include <string.h>

#include "tests/unit/unit.h"

#define LOOPS 4

static struct kld_gateway gateways[LOOPS];
static struct kld_gateway *const loops[LOOPS] = {&gateways[0], &gateways[1], &gateways[2],
                                                 &gateways[3]};
static uv_thread_t threads[LOOPS];
static struct kld_letter end_letters[LOOPS], held_letter;
static struct kld_roll *roll;
static uv_timer_t patience;
static uv_sem_t holds, let_go;
static int signs;
static struct kld_error err;

static void run_loop(void *user) {
    uv_run(user, UV_RUN_DEFAULT);
    ck_assert_int_eq(uv_loop_close(user), 0);
}

static void closed(struct kld_mail *mail) {}

static void read_end(struct kld_letter *letter) {
    kld_mail_close(&gateways[letter - end_letters].mail, closed);
}

/* As a bug would: this loop does nothing else any more. */
static void read_held(struct kld_letter *letter) {
    uv_sem_post(&holds);
    uv_sem_wait(&let_go);
}

static void all_turn(void *user) {
    ck_assert_ptr_eq(user, &signs);
    signs++;
}

static void too_long(uv_timer_t *timer) { ck_abort_msg("nothing comes of it"); }

static void passed(uv_timer_t *timer) { uv_stop(timer->loop); }

static void pass(uint64_t ms) {
    uv_timer_start(&patience, passed, ms, 0);
    uv_run(&gateways[0].loop, UV_RUN_DEFAULT);
}

static void run_until(int count) {
    uv_timer_start(&patience, too_long, 20000, 0);
    while (signs < count)
        uv_run(&gateways[0].loop, UV_RUN_ONCE);
    uv_timer_stop(&patience);
}

static void begin(uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        ck_assert_int_eq(uv_loop_init(&gateways[i].loop), 0);
        ck_assert_int_eq(kld_mail_open(&gateways[i].mail, &gateways[i].loop, &err), KLD_OK);
        if (i)
            ck_assert_int_eq(uv_thread_create(&threads[i], run_loop, &gateways[i].loop), 0);
    }
    uv_timer_init(&gateways[0].loop, &patience);
    ck_assert_int_eq(kld_roll_open(loops, count, all_turn, &signs, &roll, &err), KLD_OK);
}

/* As the gateway's finish(). */
static void end(uint32_t count) {
    for (uint32_t i = 1; i < count; i++) {
        end_letters[i].read = read_end;
        kld_mail_post(&gateways[i].mail, &end_letters[i]);
        uv_thread_join(&threads[i]);
    }
    kld_mail_close(&gateways[0].mail, closed);
    uv_close((uv_handle_t *)&patience, NULL);
    uv_run(&gateways[0].loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(uv_loop_close(&gateways[0].loop), 0);
    kld_roll_close(roll);
}

START_TEST(one_loop_answers_at_once) {
    begin(1);
    kld_roll_call(roll);
    kld_roll_call(roll);
    ck_assert_int_eq(signs, 2);
    end(1);
}
END_TEST

START_TEST(all_loops_are_to_turn) {
    begin(LOOPS);
    for (int i = 1; i <= 100; i++) {
        kld_roll_call(roll);
        ck_assert_int_lt(signs, i);
        run_until(i);
    }
    end(LOOPS);
}
END_TEST

START_TEST(one_that_hangs_has_no_sign_of_life_given) {
    begin(LOOPS);
    uv_sem_init(&holds, 0);
    uv_sem_init(&let_go, 0);
    held_letter.read = read_held;
    kld_mail_post(&gateways[2].mail, &held_letter);
    uv_sem_wait(&holds);
    for (int i = 0; i < 3; i++) { /* asked again while the first letter is out */
        kld_roll_call(roll);
        pass(50);
        ck_assert_int_eq(signs, 0);
    }
    uv_sem_post(&let_go);
    run_until(1);
    pass(50);
    ck_assert_int_eq(signs, 1); /* for all that was asked */
    kld_roll_call(roll);
    run_until(2);
    end(LOOPS);
}
END_TEST

/* The letters that are out come back before the mail of the first loop is closed. */
START_TEST(the_end_takes_along_what_is_out) {
    begin(LOOPS);
    kld_roll_call(roll);
    end(LOOPS);
    ck_assert_int_eq(signs, 1);
}
END_TEST

UNIT_MAIN("server/gateway/roll", one_loop_answers_at_once, all_loops_are_to_turn,
          one_that_hangs_has_no_sign_of_life_given, the_end_takes_along_what_is_out)
