"""Connections that the server ends while their clients still send: the replies that a client has not read yet reach it,
because what it sends is read and dropped until it ends the connection, or a limit is met."""
import contextlib
import errno
import hashlib
import re
import socket
import ssl
import time

import pytest

import oip
from conftest import Server, end_well, wait_until
from httplib import Flat, Late, Pace, certificates, fds_of, probabilities, socket_mib, tls_flags, unless_late
from oip import INFER, LENGTH

MIB = 1 << 20
PARTING = "kld_http_parting"
BROKEN = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n"  # nobody knows where it ends


def post(*lines):
    return "\r\n".join([f"POST {INFER} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


def bearer(name):
    return f"Authorization: Bearer word-of-{name}"


# What is refused before its body is read: what comes before that, and the status.
REFUSED = {
    "coding": (BROKEN, 501),
    "lengths": (post("Content-Length: 5", "Content-Length: 6"), 400),
    "body_bytes_max": (post("Content-Length: 100000000000", bearer("one")), 413),
    "stranger": (post("Content-Length: 100000000", bearer("nobody")), 401),
    "continue": (post("Content-Length: 8388608", "Expect: 100-continue", bearer("nobody")), 401),
    "chunks": (post("Transfer-Encoding: chunked", bearer("one")) + b"5\r\nabcdefgh\r\n", 400),
    "head": (post("A: " + "a" * 40000), 431),
    "nonsense": (b"nonsense\r\n\r\n", None),
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text(f"one {hashlib.sha256(b'word-of-one').hexdigest()} infer,metrics\n")
    return path


def connect(server, context=None, room=16384):
    host, port = server.address.rsplit(":", 1)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)  # replies wait at the server's end
    connection.settimeout(60)
    connection.connect((host, int(port)))
    return context.wrap_socket(connection, server_hostname="localhost") if context else connection


def good_request():
    """Its reply has 400 KB."""
    q, p = probabilities((50, 1000), 1), probabilities((50, 1000), 2)
    headers, data = oip.body({"predictions": q, "targets": p},
                             {n: {"binary_data": True} for n in ("grad_predictions", "grad_targets")})
    return post(f"{LENGTH}: {headers[LENGTH]}", f"Content-Length: {len(data)}", bearer("one")) + data


def read_slowly(connection):
    """All there is until the server ends the connection in order; a reset fails."""
    text = b""
    while got := connection.recv(20000):
        text += got
        time.sleep(0.002)
    return text


def replies_in(text):
    """[(status, bytes of the body)] of whole replies."""
    found = []
    while text:
        head, _, text = text.partition(b"\r\n\r\n")
        size = int(re.search(rb"\r\nContent-Length: (\d+)", head).group(1))
        assert len(text) >= size, (head, size, len(text))
        found.append((int(head.split()[1]), size))
        text = text[size:]
    return found


def ask_both(server, refused, context=None):
    """A good request and one that is refused, with 8 MiB behind it, are sent whole before anything is read."""
    with connect(server, context) as connection:
        connection.sendall(good_request() + refused)
        for _ in range(32):
            connection.sendall(bytes(MIB // 4))
        time.sleep(0.1)
        return replies_in(read_slowly(connection))


@pytest.fixture(scope="module")
def server(backend, tokens):
    one = Server(backend=backend, tokens=tokens, http_parting_ms=20000)
    yield one
    end_well(one)


@pytest.mark.parametrize("name", REFUSED)
def test_replies_before_a_refusal_and_the_refusal_arrive(server, name):
    refused, status = REFUSED[name]
    replies = ask_both(server, refused)
    assert replies[0][0] == 200 and replies[0][1] > 400000, replies
    # What MHD takes for no HTTP of any version it answers or not; the reply before is there.
    assert replies[1:] == [] if status is None else [reply[0] for reply in replies[1:]] == [status], replies


def test_a_client_that_says_close_and_goes_on(server):
    """What it sends behind its last request is nobody's; the reply is whole."""
    request = good_request().replace(b"Host: localhost\r\n", b"Host: localhost\r\nConnection: close\r\n")
    with connect(server) as connection:
        connection.sendall(request)
        for _ in range(16):
            connection.sendall(bytes(MIB // 4))
        assert [status for status, _ in replies_in(read_slowly(connection))] == [200]


def test_over_tls(make_server, tokens, certificates):
    server = make_server(tokens=tokens, **tls_flags(certificates))
    context = ssl.create_default_context(cafile=certificates / "ca.crt")
    for name in ("coding", "body_bytes_max", "chunks"):
        refused, status = REFUSED[name]
        assert [reply[0] for reply in ask_both(server, refused, context)] == [200, status]


def refuse(server):
    """A connection that was refused and that its client does not end; what it was told is read."""
    connection = connect(server, room=65536)
    connection.sendall(BROKEN)
    assert b" 501 " in connection.recv(65536)
    return connection


def part(server, count, ms):
    """So many, of which the gateway knows. ms: so long it waits for one that is silent."""
    begin, connections = time.monotonic(), [refuse(server) for _ in range(count)]

    def all_part():
        if server.metrics()[PARTING] == count:
            return True
        if time.monotonic() - begin > ms / 2000:
            raise Late("before all were seen the first may have been closed")
        return False
    wait_until(all_part, what="their parting")
    return connections


def sent_until_cut(connection, piece=bytes(MIB), pause=0, most=200):
    """How many pieces it took before the server reset the connection."""
    for sent in range(most):
        try:
            connection.sendall(piece)
        except OSError as problem:
            assert problem.errno in (errno.ECONNRESET, errno.EPIPE)
            return sent
        time.sleep(pause)
    return most


def test_who_never_closes_is_closed(make_server):
    """And leaves no descriptor behind. Once more, with more time, where some are closed before all have been seen."""
    for ms in (3000, 30000):
        server, most = make_server(http_parting_ms=ms, http_slow_ms=120000), 0
        with Flat(server):
            gateway = server.child("gateway")
            before, begin = fds_of(gateway), time.monotonic()
            connections = [refuse(server) for _ in range(20)]
            while most < 20 and time.monotonic() < begin + ms / 1000:
                most = max(most, min(server.metrics()[PARTING], fds_of(gateway) - before))
            wait_until(lambda: server.metrics()[PARTING] == 0, 60, "their end")
            assert ms / 1000 - 0.2 < time.monotonic() - begin
            for one in connections:
                assert sent_until_cut(one, b"x", 0.01) <= 10
                one.close()
        if most == 20:
            break
    assert most == 20


def test_who_goes_on_sending_is_closed_in_time(make_server):
    server = make_server(http_parting_ms=1500)
    begin = time.monotonic()
    connection = refuse(server)
    assert sent_until_cut(connection, bytes(20000), 0.05, 1200) < 1200
    assert 1.3 < time.monotonic() - begin < 60
    assert server.metrics()[PARTING] == 0


@unless_late
def test_who_is_silent_or_slow_is_closed_before_that(make_server):
    server = make_server(http_slow_ms=2000, http_slow_bytes="10K")
    silent, slow, quick = part(server, 3, 2000)

    def is_only_one_left():
        time.sleep(0.1)
        quick.sendall(bytes(pace.due()))
        with contextlib.suppress(OSError):
            slow.sendall(b"x")
        return pace.seen(server.metrics()[PARTING]) <= 1
    with Pace(40000, 2000) as pace:
        wait_until(is_only_one_left, what="the end of the two")
        assert pace.seen(server.metrics()[PARTING]) == 1  # the quick one
    assert sent_until_cut(silent, b"x", 0.01) <= 10 and sent_until_cut(slow, b"x", 0.01) <= 10
    quick.close()
    wait_until(lambda: server.metrics()[PARTING] == 0, what="its end")


def test_no_more_is_dropped_than_of_any_refused_body(make_server):
    server = make_server()
    connection = refuse(server)
    assert 60 < sent_until_cut(connection) <= 64 + socket_mib() + 4
    assert server.metrics()[PARTING] == 0


def test_the_oldest_gives_way(make_server):
    """On two loops, which share the number."""
    server = make_server(http_parting_max=6, http_threads=2)
    connections = [refuse(server) for _ in range(30)]
    wait_until(lambda: 3 <= server.metrics()[PARTING] <= 6, what="the newest")
    assert sent_until_cut(connections[0], b"x", 0.01) <= 10
    connections[-1].sendall(b"x")
    time.sleep(0.1)
    connections[-1].sendall(b"x")
    for one in connections:
        one.close()
    wait_until(lambda: server.metrics()[PARTING] == 0, what="their end")


def test_an_idle_connection_is_just_closed(make_server):
    server = make_server(http_idle_ms=1000, http_slow_ms=500)
    with connect(server) as connection:
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in connection.recv(4096)
        assert connection.recv(1) == b""
        assert server.metrics()[PARTING] == 0


def test_not_at_all_where_that_is_said(make_server):
    server = make_server(http_parting_ms=0)
    connection = refuse(server)
    assert server.metrics()[PARTING] == 0 and sent_until_cut(connection, b"x", 0.01) <= 10


def test_the_end_of_the_server_waits_for_none(make_server):
    server = make_server(http_threads=2, http_parting_ms=60000, http_slow_ms=120000, drain_ms=60000)
    connections = part(server, 8, 120000)
    begin = time.monotonic()
    assert server.stop() == 0 and time.monotonic() - begin < 30
    assert all(sent_until_cut(one, b"x", 0.01) <= 10 for one in connections)
