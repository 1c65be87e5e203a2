/* test_gateway.c - how many loops a gateway has, and whether they poll, by the CPUs there are. */
#include "server/gateway/gateway.h"

#include "tests/unit/unit.h"

START_TEST(a_loop_for_each_four_cpus) {
    struct kld_config config = {.http_connections_max = 4096};
    static const uint32_t loops[][2] = {{1, 1}, {4, 1}, {7, 1}, {8, 2}, {16, 4}, {256, 4}};
    for (size_t i = 0; i < sizeof loops / sizeof loops[0]; i++)
        ck_assert_uint_eq(kld_gateway_loops(&config, loops[i][0]), loops[i][1]);
    config.http_connections_max = 3;
    ck_assert_uint_eq(kld_gateway_loops(&config, 256), 3);
}
END_TEST

START_TEST(as_many_as_it_is_told) {
    struct kld_config config = {.http_connections_max = 4096, .http_threads = 6};
    ck_assert_uint_eq(kld_gateway_loops(&config, 1), 6);
    ck_assert_uint_eq(kld_gateway_loops(&config, 256), 6);
}
END_TEST

START_TEST(none_polls_with_fewer_than_four_cpus_for_each) {
    ck_assert(!kld_gateway_may_spin(1, 1) && !kld_gateway_may_spin(1, 3));
    ck_assert(kld_gateway_may_spin(1, 4) && kld_gateway_may_spin(1, UINT32_MAX));
    ck_assert(!kld_gateway_may_spin(2, 7) && kld_gateway_may_spin(2, 8));
}
END_TEST

UNIT_MAIN("server/gateway/gateway", a_loop_for_each_four_cpus, as_many_as_it_is_told,
          none_polls_with_fewer_than_four_cpus_for_each)
