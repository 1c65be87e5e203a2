/* test_infer.c - what is counted of an infer request for which there is no memory, and where that
 * comes from. Memory fails by standing in for malloc, which a sanitizer does itself: there the
 * tests let it succeed. */
#include "server/gateway/infer.h"

#include <stdlib.h>

#include "server/gateway/recent.h"
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
          requests_take_what_is_there_from_the_start)
#else
UNIT_MAIN("server/gateway/infer", a_request_without_memory_leaves_nothing_in_flight)
#endif
