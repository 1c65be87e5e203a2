/* window.c - see window.h.
 *
 * A connection begins with a small window, and the kernel widens it only for who reads more at a
 * time than MHD does: sender and receiver would take turns. Where the sender is the faster of the
 * two the window is full whatever its size, and the kernel opens it by a sixteenth at a time: a
 * small one at each read of MHD's, and to tell the sender so, and to send for him, is done by our
 * thread and costs more than to read. */
#include "server/gateway/window.h"

#include <sys/socket.h>

/* A low-water mark makes room for itself, half of what tcp_rmem allows at most, and the room stays
 * when the mark goes. */
static void widen(const struct kld_exchange *exchange, int bytes) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(exchange->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    int none = 1;
    if (!info || setsockopt(info->connect_fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes) != 0)
        return;
    setsockopt(info->connect_fd, SOL_SOCKET, SO_RCVLOWAT, &none, sizeof none);
}

void kld_window_begin(const struct kld_exchange *exchange) {
    if (exchange->length_bytes > KLD_WINDOW_BYTES)
        widen(exchange, KLD_WINDOW_BYTES);
}

void kld_window_taken(const struct kld_exchange *exchange, size_t more) {
    uint64_t taken = exchange->taken_bytes;
    if (taken >= KLD_WINDOW_WIDE_FROM_BYTES && taken - more < KLD_WINDOW_WIDE_FROM_BYTES)
        widen(exchange, KLD_WINDOW_WIDE_BYTES);
}
