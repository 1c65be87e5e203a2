/* test_infer.c - what is counted of an infer request for which there is no memory, and where that
 * comes from; and what is counted of staging for its token. Memory fails by standing in for malloc,
 * which a sanitizer does itself: there the tests let it succeed. */
#include "server/gateway/infer.h"

#include <pthread.h>
#include <stdlib.h>

#include "server/gateway/auth.h"
#include "server/gateway/gateway.h"
#include "server/gateway/recent.h"
#include "server/gateway/staging.h"
#include "server/log.h"
#include "tests/unit/unit.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FAILS 0
#else
#define FAILS 1
#endif

static bool failing;

#if FAILS
void *__libc_malloc(size_t bytes);
void *malloc(size_t bytes) {
    return failing && bytes == sizeof(struct kld_infer) ? NULL : __libc_malloc(bytes);
}
#endif

START_TEST(a_request_without_memory_leaves_nothing_in_flight) {
    static struct kld_config config;
    static struct kld_stats_page page;
    struct kld_gateway_common common = {.recent = kld_recent_open(), .draining = true};
    static struct kld_infer_spares none;
    struct kld_gateway gateway = {.common = &common,
                                  .config = &config,
                                  .page = &page,
                                  .stats = &page.common,
                                  .spares = &none};
    struct kld_caller caller = {.name = ""};
    struct kld_exchange exchange = {.gateway = &gateway, .caller = &caller};
    failing = true;
    kld_infer_begin(&exchange);
    failing = false;
    ck_assert(exchange.replied);
    ck_assert_int_eq(exchange.state == NULL, FAILS);
    ck_assert_uint_eq(common.infers, 1); /* until its reply was sent */
    ck_assert_uint_eq(common.held, 0);
    kld_infer_end(&exchange);
    ck_assert_uint_eq(common.infers, 0);
    ck_assert_uint_eq(common.held, 0);
    MHD_destroy_response(exchange.response);
    kld_recent_close(common.recent);
}
END_TEST

static atomic_bool asking;

static void *ask_for_staging(void *user) {
    struct kld_infer *infer = user;
    struct kld_error ignored;
    uint64_t offset;
    enum kld_status status = KLD_BUSY;
    while (atomic_load(&asking) && (status == KLD_BUSY || status == KLD_THROTTLED))
        status = kld_infer_alloc(infer, 64, false, &offset, &ignored);
    return NULL;
}

/* Another loop has the other half of what his token may have. */
START_TEST(staging_that_nobody_got_is_nobodys) {
    static struct kld_infer infer;
    struct kld_config config = {.staging_bytes_max = 1 << 20, .token_bytes_max = 100};
    struct kld_gateway gateway = {.config = &config};
    struct kld_exchange exchange = {.gateway = &gateway};
    struct kld_error error;
    pthread_t other;
    uint64_t small = 0, offset;
    unsigned rights;
    char tokens[] = "a 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b infer\n";
    ck_assert_int_eq(kld_auth_open(&config, tokens, &gateway.auth, &error), KLD_OK);
    ck_assert_int_eq(kld_staging_open(1 << 20, NULL, &gateway.staging, &error), KLD_OK);
    ck_assert_int_eq(kld_auth_find(gateway.auth, "Bearer secret", &infer.caller, &rights, &error),
                     KLD_OK);
    infer.gateway = &gateway;
    infer.exchange = &exchange;
    ck_assert_int_eq(kld_infer_alloc(&infer, 101, false, &offset, &error), KLD_TOO_LARGE);
    while (kld_staging_alloc(gateway.staging, 64, &small, &error) == KLD_OK)
        ;
    atomic_store(&asking, true);
    ck_assert_int_eq(pthread_create(&other, NULL, ask_for_staging, &infer), 0);
    for (int i = 0; i < 200000; i++) {
        ck_assert_int_eq(kld_auth_take_bytes(gateway.auth, infer.caller, 100, &error), KLD_OK);
        kld_auth_give_bytes(infer.caller, 100);
    }
    atomic_store(&asking, false);
    pthread_join(other, NULL);
    kld_staging_leave(gateway.staging, &infer.waiter.turn);
    kld_staging_free(gateway.staging, small);
    ck_assert_int_eq(kld_infer_alloc(&infer, 64, false, &offset, &error), KLD_OK);
    ck_assert_uint_eq(infer.caller->bytes, 64);
    ck_assert_int_eq(kld_auth_take_bytes(gateway.auth, infer.caller, 36, &error), KLD_OK);
    kld_infer_give(&infer, offset, 64);
    ck_assert_uint_eq(infer.caller->bytes, 36);
    kld_staging_close(gateway.staging);
    kld_auth_close(gateway.auth);
}
END_TEST

#if FAILS
static unsigned spares_of(const struct kld_gateway *gateway) {
    unsigned count = 0;
    for (struct kld_infer *infer = gateway->spares->first; infer; infer = infer->next_spare)
        count++;
    return count;
}

START_TEST(requests_take_what_is_there_from_the_start) {
    static struct kld_config config;
    static struct kld_stats_page page;
    static struct kld_exchange exchange[KLD_INFER_SPARES + 1];
    struct kld_gateway_common common = {.recent = kld_recent_open(), .draining = true};
    struct kld_gateway gateway = {
        .common = &common, .config = &config, .page = &page, .stats = &page.common};
    struct kld_caller caller = {.name = ""};
    struct kld_error error;
    kld_log_set_level("error");
    ck_assert_int_eq(kld_infer_spares_open(&gateway, &error), KLD_OK);
    ck_assert_uint_eq(spares_of(&gateway), KLD_INFER_SPARES);
    for (unsigned i = 0; i <= KLD_INFER_SPARES; i++) {
        exchange[i] = (struct kld_exchange){.gateway = &gateway, .caller = &caller};
        failing = i < KLD_INFER_SPARES; /* the last is allocated */
        kld_infer_begin(&exchange[i]);
        ck_assert_ptr_nonnull(exchange[i].state);
    }
    ck_assert_uint_eq(spares_of(&gateway), 0);
    for (unsigned i = 0; i <= KLD_INFER_SPARES; i++) {
        kld_infer_free(exchange[i].state);
        MHD_destroy_response(exchange[i].response);
    }
    ck_assert_uint_eq(spares_of(&gateway), KLD_INFER_SPARES);
    free(gateway.spares);
    kld_recent_close(common.recent);
}
END_TEST

UNIT_MAIN("server/gateway/infer", a_request_without_memory_leaves_nothing_in_flight,
          staging_that_nobody_got_is_nobodys, requests_take_what_is_there_from_the_start)
#else
UNIT_MAIN("server/gateway/infer", a_request_without_memory_leaves_nothing_in_flight,
          staging_that_nobody_got_is_nobodys)
#endif
