"""What has gone wrong in servers of this kind, tried against this one. Memory and descriptors of gateway and worker
are the same before and after; the file of bad input has the rest."""
import contextlib
import gzip
import json
import os
import pathlib
import socket
import threading
import time

import numpy as np
import pytest

import faillib
import oip
from conftest import wait_until
from httplib import PREFIX, Flat, Late, Shared, close, in_region, is_sanitized, probabilities, register
from httplib import unless_late, unregister
from oip import INFER, LENGTH, infer

Q, P = probabilities((2, 3), 1), probabilities((2, 3), 2)
WIDE = ",".join(f'"k{i}":1' for i in range(100000)).encode()
LARGE = (b"[" * 1000000, b'{"a":' * 200000, b'{"inputs":' + b"[" * 500000, b"{" + WIDE + b"}",
         b'{"inputs":[' + b"{}," * 100000 + b"{}]}", b'{"inputs":[],' + b'"inputs":[],' * 50000 + b'"id":"1"}',
         b'{"id":"' + b"\\u0000" * 100000 + b'"}', b'{"id":"' + b"\\ud800" * 10 + b'"}')


def post_all(server, bodies):
    for body in bodies:
        status, _, reply = server.request(INFER, body)
        assert status in (400, 413) and len(json.loads(reply)["error"]) < 1000


def warm_up(server):
    """What an allocator keeps: an arena for each thread of the pool, as large as one JSON of a megabyte became in it. Many
    at once, so that each of the threads has had one, and no test is let grow for that."""
    for _ in range(2):
        threads = [threading.Thread(target=post_all, args=(server, LARGE)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def server(backend):
    from conftest import SANITIZER, Server
    one = Server(backend=backend, shm_prefix=PREFIX, body_bytes_max="64M", staging_bytes_max="8M",
                 staging_request_bytes_max="2M", http_slow_ms=1000, keep_buffer_ms=20)
    warm_up(one)
    yield one
    status, log = one.stop(), one.log()
    one.remove()
    assert status == 0 and not SANITIZER.search(log), log


@pytest.fixture(autouse=True)
def flat(server):
    """Twice the test would cost no more than once: what it needs at most has been taken before."""
    big = probabilities((400, 1000), 3)
    headers, data = oip.body({"predictions": big, "targets": big})
    for _ in range(2):
        server.request(INFER, gzip.compress(data, 1), {**headers, "Content-Encoding": "gzip"})
    with Flat(server):
        yield
        truth = oip.expected(Q, P)["loss"][0]
        assert abs(infer(server, {"predictions": Q, "targets": P})[1]["loss"][0] - truth) < 1e-6


def connect(server):
    host, port = server.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 60)


def head(size=None, more=""):
    length = "Transfer-Encoding: chunked" if size is None else f"Content-Length: {size}"
    return f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n{more}\r\n".encode()


def status_of(connection):
    reply = b""
    while b"\r\n\r\n" not in reply:
        got = connection.recv(65536)
        if not got:
            break
        reply += got
    return int(reply.split()[1]) if reply else 0


def test_a_million_chunks_of_one_byte(server):
    """Each costs its sender six bytes, and us no more than a byte of body."""
    q = probabilities((250, 500), 4)
    headers, data = oip.body({"predictions": q, "targets": q})
    assert len(data) > 1_000_000
    sent = bytearray()
    for byte in data:
        sent += b"1\r\n%c\r\n" % byte
    with connect(server) as connection:
        connection.sendall(head(more=f"{LENGTH}: {headers[LENGTH]}\r\n") + bytes(sent) + b"0\r\n\r\n")
        assert status_of(connection) == 200


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@unless_late
def test_a_connection_that_cannot_go_on_costs_nothing(make_server):
    """A chunk's head that fits no buffer: neither is the loop kept turning, nor anybody else kept waiting."""
    server = make_server(http_slow_ms=4000, drain_ms=300, keep_buffer_ms=20)
    infer(server, {"predictions": Q, "targets": P})
    gateway = server.child("gateway")
    with Flat(server), connect(server) as connection:
        connection.sendall(head() + b"5;" + b"a" * 200000)
        time.sleep(0.3)
        before = cpu_seconds(gateway)
        time.sleep(1)
        assert cpu_seconds(gateway) - before < 0.4 or is_sanitized()  # it would be a second
        begin = time.monotonic()
        for _ in range(20):
            infer(server, {"predictions": Q, "targets": P})
        if time.monotonic() - begin > 10:
            raise Late("nobody had a turn")


@pytest.mark.parametrize("chunks", [b"fffffffffffffffff\r\n", b"-1\r\n", b"x\r\n", b"5;" + b"a" * 200000,
                                    b"0" * 100000, b"7fffffffffffffff\r\nabc", b"2\r\nabc\r\n0\r\n\r\n",
                                    b"0\r\n" + b"A: b\r\n" * 100000], ids=range(8))
def test_chunks_that_lie(server, chunks):
    with connect(server) as connection:
        try:
            connection.sendall(head() + chunks)
            connection.shutdown(socket.SHUT_WR)
            assert status_of(connection) in (0, 400, 413, 431)
        except OSError:
            pass


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"], ids=["", "continue"])
@pytest.mark.parametrize("ends", [False, True], ids=["", "ends"])
@pytest.mark.parametrize("chunk, counted", [(b"x\r\n", {"invalid": 1, "not_http": 1}), (b"5\r\nabc", {"cancelled": 1, "left": 1})])
def test_how_a_body_that_breaks_off_is_counted(make_server, chunk, counted, ends, expect):
    """As what its sender got wrong, where it is that, also of one who leaves at once; else as a client that left."""
    server = make_server()

    def counts():
        metrics = server.metrics()
        return {"invalid": metrics['kld_requests_total{front="http",status="invalid"}'],
                "cancelled": metrics['kld_requests_total{front="http",status="cancelled"}'],
                "left": metrics["kld_requests_detached_total"],
                "not_http": metrics['kld_rejected_total{front="http",reason="not_http"}']}

    before = counts()
    with connect(server) as connection:
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status_of(connection) == 200
        connection.sendall(head(more=expect) + (b"" if expect else b"2\r\n{ \r\n"))
        assert not expect or status_of(connection) == 100
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1)
        connection.sendall(chunk)
        if ends or "left" in counted:
            connection.shutdown(socket.SHUT_WR)
        assert status_of(connection) == (0 if "left" in counted else 400)
    wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 0)
    assert {name: value - before[name] for name, value in counts().items() if value != before[name]} == counted


def test_header_lengths_that_lie(make_server):
    """Of the body, and of the JSON in it; the last of the first kind end with their connection. No block of malloc()
    stays, of some hundred of them."""
    page = faillib.counting()
    server = make_server(body_bytes_max="64M", staging_request_bytes_max="2M", http_threads=1, keep_buffer_ms=20,
                         environment=page and page.environment())
    headers, data = oip.body({"predictions": Q, "targets": P})
    json_bytes, size = int(headers[LENGTH]), len(data)
    of_json = [0, 1, json_bytes - 1, json_bytes + 1, size, size + 1, 2 ** 31, 2 ** 32 + json_bytes, 2 ** 53, 2 ** 63 - 1,
               2 ** 64 - 1, 2 ** 64 + json_bytes, "-1", "+5", "0x10", "5, 5", " ", "1e3", "9" * 400]
    of_body = ["-1", "+5", "0x10", "5, 6", "5 6", "1e3", 2 ** 64 + size, "9" * 400, 2 ** 63 - 1, 2 ** 40, size - 1, 2 << 20,
               8 << 20]

    def once():
        for value in of_json:
            with oip.Connection(server) as connection:
                status, _, reply = connection.ask("POST", INFER, data, {LENGTH: str(value)})
                assert status in (400, 413) and json.loads(reply)["error"], (value, status, reply)
        for value in of_body:
            with connect(server) as connection, contextlib.suppress(OSError):
                connection.sendall(head(value, f"{LENGTH}: {json_bytes}\r\n") + data)
                connection.shutdown(socket.SHUT_WR)
                assert status_of(connection) in (0, 400, 413), value
    for _ in range(3):
        once()
    with Flat(server, page=page):
        for _ in range(4 if is_sanitized() else 60):
            once()
    assert infer(server, {"predictions": Q, "targets": P})


def answers(server, text):
    """All that comes until the connection ends."""
    reply = b""
    with connect(server) as connection:
        try:
            connection.sendall(text)
            connection.shutdown(socket.SHUT_WR)
            while got := connection.recv(65536):
                reply += got
        except ConnectionResetError:
            pass
    return reply


HIDDEN = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n"
SIZE = len(HIDDEN)


FRAMINGS = [
    f"Content-Length: {SIZE}\r\nTransfer-Encoding: chunked\r\n", f"Transfer-Encoding: chunked\r\nContent-Length: {SIZE}\r\n",
    f"Content-Length: 0\r\nContent-Length: {SIZE}\r\n", "Transfer-Encoding: xchunked\r\n",
    f"Content-Length : {SIZE}\r\n", f"Content-Length\t: {SIZE}\r\n", f"Content-Length:\r\n {SIZE}\r\n",
    f"A: b\r\n Content-Length: {SIZE}\r\n", f"Content-Length:\r\n\t{SIZE}\r\nA: b\r\n", f"Content-Leng: {SIZE}\r\n th\r\n",
    "Transfer-Encoding : chunked\r\n", "Transfer-Encoding:\r\n chunked\r\n", "Transfer-Encod: chunked\r\n ing\r\n",
    f"Transfer-Encoding : chunked\r\nContent-Length: {SIZE}\r\n", "Transfer-Encoding:\r\n chunked\r\nContent-Length: 0\r\n",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", f"A: b\rContent-Length: {SIZE}\r\n",
    "Content-Length: +5\r\n", "Content-Length: 0x5\r\n", "Transfer-Encoding: chunked, identity\r\n",
    "Content-Length: 5, 6\r\n",
    *(f"{line}\r\n{length}\r\n" for length in (f"Content-Length: {SIZE}", "Transfer-Encoding: chunked")
      for line in (":", ": x", ":x:y", ":\t", "\0", "\0Z: y", "\0 :", "A: b\0", "A: b\0c", "A:\0", "A: \0 b",
                   "A: b\0\0\0\0"))]


def test_requests_hidden_in_others(server):
    """Whatever a proxy before us thinks of these, none of them makes us see two requests: the body is the hidden one,
    or that is behind a last chunk. Where the body is said to be two bytes the second request is seen."""
    for lines in FRAMINGS:
        for before in (b"", b"0\r\n\r\n"):
            head = f"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode()
            reply = answers(server, head + before + HIDDEN)
            assert reply.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 ")) and b'"extensions"' not in reply, (lines, reply)
    old = b"POST /v2/repository/index HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    reply = answers(server, old + HIDDEN)
    assert b" 400 " in reply.split(b"\r\n")[0] and b'"extensions"' not in reply, reply
    head = b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
    assert b'"extensions"' in answers(server, head + HIDDEN)


LIVE = "GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n"
CUT = [f"{LIVE}{line}\r\n\r\n" for line in (":", ": y", "\0", "\0Z: y", "A: b\0", "A: b\0\0", "A: b\0\r\nC: d")] + [
    f"{LIVE}{line}\r\n" for line in (":", ": y", "\0", "\0Z: y")] + [
    f"GET /v2/health/live HTTP/1.{minor}\r\n{line}\r\n{HIDDEN.decode()}" for minor in (0, 1)
    for line in (":", "\0", "\0A: b")] + [
    f"{first} HTTP/1.1\r\nHost: localhost\r\n\r\n" for first in (
        "GET\0 /v2/health/live", "GET\0X /v2/health/live", "GET \0 /v2/health/live", "GET /v2/health/live\0",
        "GET /v2/health/live\0/x", "GET /v2/health/live\0?a=b", "GET /v2/health/live?a\0b",
        "GET /v2/health/live?\0", "GET /v2/%68ealth/live\0/x",
        "GET http://localhost/v2/health/live\0/x", "GET  /v2/health/live\0")] + [
    f"{LIVE}A: b\n\r\n", f"{LIVE}A: b\nC: d\r\n\r\n", f"{LIVE}\n", LIVE.replace("\r\n", "\n") + "\r\n",
    "GET /v2/health/live HTTP/1.1\nHost: localhost\n:\n\n", "GET /v2/health/live HTTP/1.1\nHost: localhost\n\0\n\n"]


def test_what_cuts_a_head_short(server):
    """A NUL, or a line without a name, ends a text, or the whole head, for MHD 0.9.75 and not for who passed it on: an
    answer to that, and nothing that came behind is a request."""
    for text in CUT:
        reply = answers(server, text.encode() + HIDDEN)
        assert reply.startswith(b"HTTP/1.1 400 ") and reply.count(b"HTTP/1.1") == 1, (text, reply)
        assert b'"extensions"' not in reply and b"\r\nConnection: close\r\n" in reply, (text, reply)


LEGAL = [
    LIVE, f"\r\n{LIVE}", LIVE.replace("Host: ", "Host:"), f"{LIVE}Empty:\r\n", f"{LIVE}Empty: \t \r\n",
    f"{LIVE}A: b \t \r\nC:  d\r\n",
    f"{LIVE}A: b  \r\n", f"{LIVE}A: :b:\r\n", f"{LIVE}A: \x80\xff\r\n", f"{LIVE}Cookie: a=b; c\r\nCookie:\r\nD: e\r\n",
    f"{LIVE}Expect: 100-continue\r\n", f"{LIVE}Connection: keep-alive\r\nA: b\r\n", f"{LIVE}A: {'b' * 20000}\r\n",
    LIVE + "".join(f"A{i}: {'b' * i}\r\n" for i in range(150)), LIVE.replace("/live", "/live?"),
    LIVE.replace("/live", "/live?a=b&c&&d=%41+e&="),
    LIVE.replace("/live", "/l%69ve?a=%00&b=%"), LIVE.replace("/v2", "http://localhost/v2"), LIVE.replace("GET /", "GET   /"),
    f"GET /v2/health/live HTTP/1.0\r\nConnection: keep-alive\r\n{'A: b' * 20}\r\n",
    "POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 2\r\n"]


def test_odd_heads_that_are_whole(server):
    """Each is answered, and so is what is behind it on the connection: at once, in pieces, and behind a body of chunks."""
    chunked = b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" \
              b"2\r\n{}\r\n0\r\n\r\n"
    for text in LEGAL:
        for ends in ("\r\n", "\n"):
            whole = f"{text}\r\n".replace("\r\n", ends).encode("latin1") + (b"{}" if text.startswith("POST") else b"")
            reply = answers(server, chunked + whole + whole + HIDDEN)
            assert reply.replace(b"HTTP/1.1 100 Continue", b"").count(b"HTTP/1.1 200 OK") == 4, (text, reply)
            assert b'"extensions"' in reply, (text, reply)
            with connect(server) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                step = max(1, len(whole) // 40)
                for at in range(0, len(whole), step):
                    connection.sendall(whole[at:at + step])
                    time.sleep(0.0005)
                connection.sendall(HIDDEN)
                reply = b""
                while b'"extensions"' not in reply and (got := connection.recv(65536)):
                    reply += got
                assert reply.count(b"HTTP/1.1 200 OK") == 2, (text, reply)
    for text in (b"GET /v2/health/live HTTP/1.0\r\n\r\n", b"GET /v2/health/live HTTP/1.0\n\n"):
        assert answers(server, text).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("trailer", ["A: b\r\n", ": x\r\n", "A: b\r\n: x\r\n", "A: b\r\n\0\r\n", "A:\r\n", "A: b\n"])
def test_nothing_behind_a_trailer_is_a_request(server, trailer):
    """Of it MHD 0.9.75 says less than of a head: whether it ended where its sender meant is not known."""
    for rest in (HIDDEN, b"\r\n" + HIDDEN):
        reply = answers(server, head() + f"2\r\n{{}}\r\n0\r\n{trailer}".encode() + rest)
        assert b'"extensions"' not in reply and reply.count(b"HTTP/1.1") <= 1, reply
    reply = answers(server, f"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
                            f"2\r\n{{}}\r\n0\r\n{trailer}\r\n".encode())
    assert reply.startswith(b"HTTP/1.1 200 ") and b"\r\nConnection: close\r\n" in reply, reply


@pytest.mark.parametrize("length, status", [("abc", 400), ("-1", 400), ("+10", 400), ("0x10", 400), ("1 2", 400),
                                            ("9" * 23, 413), (str(1 << 64), 413)])
def test_a_length_that_is_no_number(server, length, status):
    """MHD's own answer, and the end of the connection: no byte behind is a request. MHD 0.9.75 writes its head twice, of
    which the second is where the text should begin, and asks nobody in between; a version that writes it once is right."""
    head = f"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()
    heads = answers(server, head + HIDDEN).split(b"HTTP/1.1 ")
    assert heads[0] == b"" and len(heads) in (2, 3), heads
    for one in heads[1:]:
        assert one.startswith(b"%d " % status) and b"\r\nConnection: close\r\n" in one, heads
    assert heads[-1].endswith(b"</html>") and b'"extensions"' not in heads[-1]


def test_headers_in_several_lines(server):
    """Wherever in memory their name ends; and no header that has one line is taken for such a one."""
    for pad in range(8):
        more = "".join(f"X-{'p' * pad}{i}: {'v' * i}\r\n" for i in range(40))
        whole = f"GET /v2 HTTP/1.1\r\nHost: localhost\r\n{more}Empty:\r\nBlanks: \t \r\nA:b\r\n"
        assert answers(server, f"{whole}\r\n".encode()).startswith(b"HTTP/1.1 200 ")
        for fold in (" b\r\n", "\tb\r\n", " \r\n", " b\r\n c\r\nD: e\r\n"):
            assert answers(server, f"{whole}{fold}\r\n".encode()).startswith(b"HTTP/1.1 400 "), (pad, fold)


def test_bombs_of_every_kind(server):
    """JSON, tail and chunks that unpack to gigabytes: refused for what they become, at the cost of a piece."""
    bomb = gzip.compress(b" " * (1 << 28), 9)
    q = probabilities((400, 1000), 5)
    headers, data = oip.body({"predictions": q, "targets": q})
    tail = gzip.compress(data, 1) + gzip.compress(b"\0" * (1 << 28), 9)
    twice = gzip.compress(bomb, 9)
    for body, more in ((bomb, {}), (tail, headers), (twice, {}), (gzip.compress(b'{"a":' * (1 << 22)), {})):
        status, _, reply = server.request(INFER, body, {**more, "Content-Encoding": "gzip"})
        assert status in (400, 413) and json.loads(reply)["error"]


def test_json_deep_wide_and_duplicated(server):
    """Ten times; to keep the tree of one of them once would show."""
    post_all(server, LARGE * 10)


def test_little_json_leaves_nothing(server):
    """20,000 times, of which a third are answered; to keep 256 bytes of each would show."""
    def pair(data, **more):
        tensors = [{"name": name, "shape": [1, 2], "datatype": "FP32", "data": data} for name in ("predictions", "targets")]
        return json.dumps({"inputs": tensors, **more}).encode()
    bodies = [(b"[", 400), (b'{"inputs":[{}]}', 400), (b'{"inputs":[],"inputs":[]}', 400), (b"", 400),
              (b'{"id":"\\ud800"}', 400), (pair([0.5, "x"]), 400), (pair([0.5, 0.5], parameters={"reduction": "avg"}), 400),
              (pair([0.5, 0.5], id="of a caller"), 200), (pair([[0.5, 0.5]], outputs=[{"name": "grad_targets"}]), 200),
              (pair([0.5, 0.5], parameters={"scale": 2}), 200)]
    with oip.Connection(server) as connection:
        for body, status in bodies * 2000:
            assert connection.ask("POST", INFER, body)[0] == status


@pytest.mark.parametrize("shape", [[2 ** 31, 2 ** 31], [2 ** 32, 2 ** 32], [2 ** 53 - 1] * 8, [2 ** 52 + 1, 2 ** 12],
                                   [3037000500, 3037000500], [2 ** 40, 2], [2 ** 20, 2 ** 20]])
def test_sizes_that_wrap(server, shape):
    """Products and sums of these are small, or negative, in 32 or 64 bits."""
    size = int(np.prod(np.array(shape, dtype=object))) * 4
    for said in (size % 2 ** 64, size % 2 ** 32, 0, 24, 2 ** 53 - 1):
        tensors = [{"name": name, "shape": shape, "datatype": "FP32", "parameters": {"binary_data_size": said}}
                   for name in ("predictions", "targets")]
        text = json.dumps({"inputs": tensors}).encode()
        status, _, reply = server.request(INFER, text + b"\0" * 48, {LENGTH: str(len(text))})
        assert status in (400, 413), reply


KEYS = ["/", "//x", "../x", "/..", "/.", "/kld-test-/../../etc/passwd", "/kld-staging", "kld-staging",
        "/dev/shm" + PREFIX + "a", "/memfd:kld-staging", "", "\x00", PREFIX + "a/b", PREFIX + "\x00",
        "/sem.kld-test-x", "/kld-stats"]


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_shared_memory(server, key):
    status, reply = server.json("/v2/systemsharedmemory/region/r/register", {"key": key, "byte_size": 1})
    assert status in (400, 403, 404), reply
    assert "/dev" not in reply["error"]
    assert server.json("/v2/systemsharedmemory/status") == (200, [])


def memfds_of(pid):
    """Names of the memory that a process holds and that is in no folder."""
    links = []
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of a connection that has ended meanwhile
            links.append(os.readlink(entry))
    return {link.removeprefix("/memfd:").removesuffix(" (deleted)") for link in links if link.startswith("/memfd:")}


def test_keys_where_all_of_shared_memory_may_be_registered(make_server):
    """It is not the prefix that keeps callers in this folder, nor them from what the server has for itself."""
    server = make_server(shm_prefix="/")

    def register_key(key):
        return server.json("/v2/systemsharedmemory/region/r/register", {"key": key, "byte_size": 1})
    link, pipe = (f"{PREFIX}{os.getpid()}-{what}" for what in ("link", "pipe"))
    try:
        os.symlink(f"/proc/{server.child('gateway')}/exe", f"/dev/shm{link}")
        os.mkfifo(f"/dev/shm{pipe}")
        with Flat(server):
            for key in ("/", "//x", "/..", "/.", "//", "/../shm/x", "/a/b", "/./x", "/dev/shm" + PREFIX + "a",
                        "/kld-test-/../x"):
                assert register_key(key) == (400, {"error": "the key is not the name of shared memory"}), key
            assert register_key("x")[0] == register_key("../x")[0] == 403
            own = memfds_of(server.child("gateway"))
            assert {"kld-staging", "kld-stats"} <= own, own
            for name in sorted(own):
                for key in (f"/{name}", f"/memfd:{name}", f"/memfd:{name} (deleted)"):
                    assert register_key(key)[0] == 404, key
            assert register_key(link)[0] in (400, 403)
            assert register_key(pipe) == (400, {"error": "the key is not shared memory"})
    finally:
        for key in (link, pipe):
            pathlib.Path(f"/dev/shm{key}").unlink(missing_ok=True)
    assert server.json("/v2/systemsharedmemory/status") == (200, [])
    with Shared(4096) as shared:  # what is there can be had
        assert register(server, "r", shared, 4096) == (200, None)


def test_a_region_changed_under_its_users(server):
    """Registered again, unregistered, cut and made longer while requests read and write it."""
    shape = (200, 500)
    size = 400000
    stop, problems, statuses = threading.Event(), [], set()
    with Shared(3 * size) as shared:
        shared.map[:size] = shared.map[size:2 * size] = probabilities(shape, 6).tobytes()
        request = {"inputs": [in_region("predictions", shape, 0), in_region("targets", shape, size)],
                   "outputs": [{"name": "loss"},
                               {k: v for k, v in in_region("grad_predictions", shape, 2 * size).items()
                                if k in ("name", "parameters")}]}

        def ask():
            try:
                while not stop.is_set():
                    statuses.add(server.json(INFER, request)[0])
            except Exception as problem:  # noqa: BLE001 - told below
                problems.append(problem)
        askers = [threading.Thread(target=ask) for _ in range(3)]
        for asker in askers:
            asker.start()
        end = time.monotonic() + 3
        while time.monotonic() < end:
            register(server, "r", shared, 3 * size)
            time.sleep(0.02)
            os.ftruncate(shared.fd, size)
            time.sleep(0.01)
            os.ftruncate(shared.fd, 3 * size)
            unregister(server, "r")
        stop.set()
        for asker in askers:
            asker.join()
        assert not problems and 200 in statuses and statuses <= {200, 400, 404}, (problems, statuses)
        os.ftruncate(shared.fd, 3 * size)
        unregister(server)


def test_the_same_bytes_in_and_out(server):
    """By one name and by two."""
    with Shared(4096) as shared:
        shared.map[:24] = shared.map[64:88] = Q.tobytes()
        register(server, "r", shared, 4096)
        status, reply = server.json("/v2/systemsharedmemory/region/s/register",
                                    {"key": shared.key, "offset": 0, "byte_size": 4096})
        assert status == 200
        for region in ("r", "s"):
            output = {"name": "grad_predictions", "parameters": {
                "shared_memory_region": region, "shared_memory_offset": 0, "shared_memory_byte_size": 24}}
            status, reply = server.json(INFER, {"inputs": [in_region("predictions", (2, 3), 0),
                                                           in_region("targets", (2, 3), 64)], "outputs": [output]})
            assert status == 200, reply
            close(np.frombuffer(shared.map[:24], "<f4").reshape(2, 3),
                  oip.expected(Q, Q)["grad_predictions"], "FP32")
            shared.map[:24] = Q.tobytes()
        unregister(server)


@pytest.mark.parametrize("second", ["r", "s", "t"])
def test_bytes_that_two_results_or_a_result_and_an_input_would_share(server, second):
    """One of them was lost without a word where the region had two names: s begins where r does, t 32 bytes behind."""
    with Shared(4096) as shared:
        shared.map[:24] = shared.map[64:88] = Q.tobytes()
        before = shared.map[:]
        at = {"r": 0, "s": 0, "t": 32}[second]
        for name, offset in {"r": 0, "s": 0, "t": 32}.items():
            assert register(server, name, shared, 4096 - offset, offset)[0] == 200

        def output(name, region, offset, size):
            return {"name": name, "parameters": {"shared_memory_region": region, "shared_memory_offset": offset,
                                                 "shared_memory_byte_size": size}}

        def ask(*outputs):
            return server.json(INFER, {"inputs": [in_region("predictions", (2, 3), 0), in_region("targets", (2, 3), 64)],
                                       "outputs": list(outputs)})

        loss = output("loss", "r", 128, 4)
        for outputs, what in (((loss, output("grad_predictions", second, 128 - at, 24)), "overlaps"),
                              ((loss, output("grad_predictions", second, 112 - at, 24)), "overlaps"),
                              ((loss, output("grad_predictions", second, 64 - at, 24)), "grad_predictions overlaps targets"),
                              ((loss, output("grad_targets", second, 68 - at, 24)), "grad_targets overlaps targets"),
                              ((output("loss", second, 64 - at, 4),), "loss overlaps targets")):
            status, reply = ask(*outputs)
            assert status == 400 and what in reply["error"], (what, reply)
            assert "an output may only be written exactly over" in reply["error"]
            assert shared.map[:] == before
        status, reply = ask(loss, output("grad_predictions", second, 160 - at, 24),
                            output("grad_targets", second, 64 - at, 24))  # beside, and over its own
        assert status == 200, reply
        truth = oip.expected(Q, Q)
        for name, begin in (("grad_predictions", 160), ("grad_targets", 64)):
            close(np.frombuffer(shared.map[begin:begin + 24], "<f4").reshape(2, 3), truth[name], "FP32")
        unregister(server)


def test_clients_that_leave_at_any_byte(server):
    """Mid-head, mid-upload, mid-kernel, mid-reply; a reset instead of an end every second time."""
    q = probabilities((200, 1000), 7)
    headers, data = oip.body({"predictions": q, "targets": q}, {"grad_predictions": {"binary_data": True}})
    whole = head(len(data), f"{LENGTH}: {headers[LENGTH]}\r\n") + data
    for i, end in enumerate([0, 1, 20, 100, 300, 5000, len(whole) // 2, len(whole) - 1] + [len(whole)] * 8):
        connection = connect(server)
        if i % 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.sendall(whole[:end])
        if i > 11:
            connection.recv(1 << (i - 8))
        connection.close()
