/* test_infer.c - what is counted of an infer request for which there is no memory. Memory fails by
 * standing in for malloc, which a sanitizer does itself: there the test lets it succeed. */
#include "server/gateway/infer.h"

#include <stdlib.h>

#include "server/gateway/recent.h"
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
    struct kld_gateway gateway = {
        .common = &common, .config = &config, .page = &page, .stats = &page.common};
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

UNIT_MAIN("server/gateway/infer", a_request_without_memory_leaves_nothing_in_flight)
