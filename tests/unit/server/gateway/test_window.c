/* test_window.c - for which bodies room is made before they are read (window.h). */
#include "server/gateway/window.h"

#include <sys/socket.h>

#include "tests/unit/unit.h"

static int pair[2];
static int asked_bytes; /* the largest low-water mark */
static int mark;        /* the last one */

/* In the place of libmicrohttpd's and of the kernel's. */
const union MHD_ConnectionInfo *MHD_get_connection_info(struct MHD_Connection *connection,
                                                        enum MHD_ConnectionInfoType type, ...) {
    static union MHD_ConnectionInfo info;
    ck_assert_int_eq(type, MHD_CONNECTION_INFO_CONNECTION_FD);
    info.connect_fd = pair[0];
    return &info;
}

int setsockopt(int fd, int level, int name, const void *value, socklen_t bytes) {
    ck_assert(fd == pair[0] && level == SOL_SOCKET && name == SO_RCVLOWAT && bytes == sizeof mark);
    mark = *(const int *)value;
    asked_bytes = mark > asked_bytes ? mark : asked_bytes;
    return 0;
}

static void expect(int bytes) {
    ck_assert_int_eq(asked_bytes, bytes);
    ck_assert_int_eq(mark, bytes ? 1 : 0); /* who waits for one byte is woken by it */
    asked_bytes = mark = 0;
}

static void take(struct kld_exchange *exchange, size_t more) {
    exchange->taken_bytes += more;
    kld_window_taken(exchange, more);
}

START_TEST(room_is_made_for_what_is_large) {
    static struct kld_exchange exchange;
    exchange.length_bytes = KLD_WINDOW_BYTES;
    kld_window_begin(&exchange);
    expect(0);
    exchange.length_bytes++;
    kld_window_begin(&exchange);
    expect(KLD_WINDOW_BYTES);
}
END_TEST

/* However much it announces: what the kernel holds for it is a part of what it has sent. */
START_TEST(more_room_is_made_once_much_has_been_taken) {
    static struct kld_exchange exchange;
    exchange.length_bytes = UINT64_C(1) << 40;
    take(&exchange, 0);
    take(&exchange, KLD_WINDOW_WIDE_FROM_BYTES - 1);
    expect(0);
    take(&exchange, 2);
    expect(KLD_WINDOW_WIDE_BYTES);
    take(&exchange, 0);
    take(&exchange, KLD_WINDOW_WIDE_FROM_BYTES);
    expect(0);
    ck_assert_uint_ge(KLD_WINDOW_WIDE_FROM_BYTES / KLD_WINDOW_WIDE_BYTES, 8);
}
END_TEST

UNIT_MAIN("server/gateway/window", room_is_made_for_what_is_large,
          more_room_is_made_once_much_has_been_taken)
