"""What one caller may hold, and for how long: staging, device memory, stored tensors, places; a worker that
is silent, clients that leave while their request computes, senders that hold much and send little."""
import contextlib
import hashlib
import json
import os
import signal
import socket
import struct
import threading
import time

import pytest

import faillib
import oip
import wire
from conftest import settled, suspend, wait_until
from httplib import POOL, Flat, Pace, fds_of, probabilities, unless_late
from oip import INFER, infer

SMALL = {"staging_bytes_max": "4M", "staging_request_bytes_max": "1M"}
Q = probabilities((2, 8), 1)
HEADERS, DATA = oip.body({"predictions": Q, "targets": Q})


def bearer(name):
    return {"Authorization": f"Bearer word-of-{name}"}


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("".join(f"{name} {hashlib.sha256(f'word-of-{name}'.encode()).hexdigest()} infer,metrics\n"
                            for name in ("one", "two")))
    return str(path)


def connect(server):
    host, port = server.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 60)


def text_of(data, headers, method="POST", path=INFER, length=None):
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length or len(data)}"]
    return "\r\n".join(lines + [f"{k}: {v}" for k, v in headers.items()] + ["", ""]).encode() + data


def metric(server, name, token=None):
    body = server.request("/metrics", None, bearer(token) if token else {})[2].decode()
    return float(next(line for line in body.splitlines() if line.startswith(name + " ")).split()[-1])


# ---- Tokens ----------------------------------------------------------------------------------------------

def test_device_memory_has_a_limit_of_its_own(make_server, tokens):
    """A request that goes piece by piece may be larger than token_bytes_max, which is about the host's memory."""
    server = make_server(tokens=tokens, token_bytes_max="2M", token_buffer_bytes_max="10M", **SMALL)
    for rows, status, named in ((1000, 200, b""), (1500, 413, b"token_buffer_bytes_max")):
        q = probabilities((rows, 1000), 2)
        headers, data = oip.body({"predictions": q, "targets": q})
        got, _, body = server.request(INFER, data, {**headers, **bearer("one")})
        assert got == status and named in body, body
    assert server.request(INFER, DATA, {**HEADERS, **bearer("one")})[0] == 200


def test_one_token_does_not_get_all_staging(make_server, tokens):
    """Slow senders of one token are refused before they hold it all; another token is served meanwhile."""
    server = make_server(tokens=tokens, token_bytes_max="1G", http_slow_ms=120000, **SMALL)
    q = probabilities((100, 1000), 3)  # twice 400 KB: not bulk
    headers, data = oip.body({"predictions": q, "targets": q})
    connections = [connect(server) for _ in range(8)]
    for one in connections:
        one.sendall(text_of(data, {**headers, **bearer("one")})[:-1000])
    # About half of 4 MiB takes two; who is refused early is told when all its body has come.
    wait_until(lambda: metric(server, 'kld_requests_total{front="http",status="throttled"}', "two") >= 5,
               what="refusals")
    got, _, body = server.request(INFER, data, {**headers, **bearer("two")})
    assert got == 200, body
    for one in connections:
        one.sendall(data[-1000:])
    answers = sorted(one.recv(12) for one in connections)
    assert answers[0] == b"HTTP/1.1 200" and answers[-5:] == [b"HTTP/1.1 429"] * 5, answers
    for one in connections:
        one.close()


def test_json_of_one_token_leaves_some_for_others(make_server, tokens):
    """Who sends much of it slowly is refused before he has all that JSON may have; another token's is taken meanwhile."""
    server = make_server(tokens=tokens, http_slow_ms=120000, **SMALL)
    size, connections = 500000, [connect(server) for _ in range(4)]
    data = oip.body({"predictions": Q, "targets": Q}, binary=False)[1].ljust(size)
    for one in connections:
        one.sendall(text_of(data, bearer("one"))[:-1000])
    # Of 1.9 MB he has a half: one, for two are more than that.
    wait_until(lambda: metric(server, 'kld_requests_total{front="http",status="throttled"}', "two") == 3, what="refusals")
    got, _, body = server.request(INFER, data, bearer("two"))
    assert got == 200, body
    answers = []
    for one in connections:
        one.sendall(data[-1000:])
        answers.append(one.recv(65536))
        one.close()
    assert sorted(answer[:12] for answer in answers) == [b"HTTP/1.1 200"] + [b"HTTP/1.1 429"] * 3, answers


def test_json_that_grows_counts_once(make_server, tokens):
    """Of unknown length it moves to ever larger memory: what it has left behind is not its token's any more."""
    server = make_server(tokens=tokens, token_bytes_max="800K", **SMALL)
    data = oip.body({"predictions": Q, "targets": Q}, binary=False)[1].ljust(300000)
    for _ in range(2):
        with oip.Connection(server) as connection:
            parts = (data[at:at + 20000] for at in range(0, len(data), 20000))
            connection.http.request("POST", INFER, parts, bearer("one"), encode_chunked=True)
            reply = connection.http.getresponse()
            assert reply.status == 200, reply.read()
    assert metric(server, "kld_staging_bytes", "two") == 0


def test_stored_tensors_of_one_token(make_server, tokens):
    server = make_server(tokens=tokens, token_tensors_max=2, **SMALL)

    def put(token, name):
        status, _, body = server.heard(f"/v2/tensors/{name}?datatype=FP32&shape=2,8", Q.tobytes(), bearer(token),
                                         "PUT")
        return status, body
    assert put("one", "a")[0] == put("one", "b")[0] == put("two", "a")[0] == 200
    status, body = put("one", "c")
    assert status == 429 and b"token_tensors_max" in body
    assert put("two", "b")[0] == 200
    assert server.request("/v2/tensors/a", headers=bearer("one"), method="DELETE")[0] == 200
    assert put("one", "c")[0] == 200


def test_an_upload_counts_what_it_holds(make_server, tokens):
    server = make_server(tokens=tokens, token_bytes_max="600K", http_requests_max=2, http_slow_ms=120000, **SMALL)
    path, large = "/v2/tensors/a?datatype=FP32&shape=400,400", probabilities((400, 400), 9).tobytes()
    slow = [connect(server) for _ in range(2)]
    # Two pieces of 256 KiB: one request at a time.
    for one in slow:
        one.sendall(text_of(large, bearer("one"), "PUT", path)[:-1])
    status, _, body = server.request(path, large, bearer("one"), "PUT")
    assert status == 429 and b"token_bytes_max" in body
    wait_until(lambda: metric(server, "kld_http_requests_in_flight", "two") == 2, what="two")
    third = connect(server)
    third.sendall(text_of(large, bearer("two"), "PUT", path)[:-1])
    wait_until(lambda: metric(server, "kld_http_requests_in_flight", "two") == 3, what="three")
    status, headers, body = server.request(INFER, DATA, {**HEADERS, **bearer("two")})
    assert status == 503 and headers["Retry-After"] and b"in flight" in body
    for one in [*slow, third]:
        one.close()
    wait_until(lambda: server.request(path, large, bearer("one"), "PUT")[0] == 200, what="a free place")
    wait_until(lambda: metric(server, "kld_staging_bytes", "two") == 0, what="free staging")


def test_who_was_refused_takes_no_place(make_server, tokens):
    """However long the rest of his body takes: it is read and dropped, and others have his place."""
    server = make_server(tokens=tokens, http_requests_max=2, token_requests_max=2)
    refused = [text_of(b"{", {"Inference-Header-Content-Length": "x", **bearer("one")}, length=1000000),
               text_of(b"{", {"Content-Encoding": "br", **bearer("one")}, length=1000000),
               text_of(b"x", bearer("one"), "PUT", "/v2/tensors/a?datatype=FP32&shape=0", 1000000),
               text_of(b"x", bearer("one"), "PUT", "/v2/tensors/a?datatype=FP32&shape=3", 1000000)]
    slow = []
    for count, text in enumerate(refused, 1):
        slow.append(connect(server))
        slow[-1].sendall(text)
        wait_until(lambda: metric(server, "kld_http_requests_in_flight", "two") == count, what="a refusal")
    for token in ("one", "two"):
        status, _, body = server.request(INFER, DATA, {**HEADERS, **bearer(token)})
        assert status == 200, body
        status, _, body = server.heard("/v2/tensors/a?datatype=FP32&shape=2,8", Q.tobytes(), bearer(token), "PUT")
        assert status == 200, body
    for one, status in zip(slow, (400, 415, 400, 400)):
        one.sendall(bytes(999999))
        assert one.recv(12) == b"HTTP/1.1 %d" % status
        one.close()
    wait_until(lambda: metric(server, "kld_http_requests_in_flight", "two") == 0, what="their ends")


# ---- Deadlines --------------------------------------------------------------------------------------------

def test_a_silent_worker_is_not_waited_for_beyond_the_deadline(make_server):
    """Whatever of a request waits for it: making the buffer, filling it, computing."""
    server = make_server(http_deadline_ms=400, keep_buffer_bytes=1, **SMALL)
    q = probabilities((1000, 1003), 4)
    headers, data = oip.body({"predictions": q, "targets": q})
    wait_until(lambda: server.request(INFER, data, headers)[0] == 200, what="an answer in 0.4 s")
    wait_until(lambda: server.metrics()[POOL] == 0, what="a free pool")
    whole = {"infer": text_of(data, headers),
             "upload": text_of(q.tobytes(), {}, "PUT", "/v2/tensors/a?datatype=FP32&shape=1000,1003")}
    worker = server.child("worker")

    def told_after(text, early):
        with connect(server) as connection:
            if early:
                connection.sendall(text[:early])
                wait_until(lambda: server.metrics()[POOL] > 0, what="its buffer")
            suspend(worker)
            try:
                begin = time.monotonic()
                threading.Thread(target=lambda: connection.sendall(text[early:]), daemon=True).start()
                answer = connection.recv(65536)
                took = time.monotonic() - begin
            finally:
                os.kill(worker, signal.SIGCONT)
            assert answer.startswith(b"HTTP/1.1 408") and b"deadline" in answer, answer
        wait_until(lambda: server.metrics()[POOL] == server.metrics()["kld_staging_bytes"] == 0, what="free memory")
        return took
    for name, text in whole.items():
        for early in (0, 2000000):  # before the buffer is there; while it is filled
            took = told_after(text, early)  # the worker stands still until then
            assert took < 20, (name, early, took)
    wait_until(lambda: server.request(INFER, data, headers)[0] == 200, what="an answer in 0.4 s")


def test_a_reply_that_waits_for_its_next_piece_ends(make_server):
    server = make_server(http_deadline_ms=3000, **SMALL)
    q = probabilities((1000, 4000), 5)
    headers, data = oip.body({"predictions": q, "targets": q}, {"grad_predictions": {"binary_data": True}})
    worker = server.child("worker")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.settimeout(20)
        host, port = server.address.rsplit(":", 1)
        connection.connect((host, int(port)))
        connection.sendall(text_of(data, headers))
        first = connection.recv(1000)
        suspend(worker)
        got = len(first)
        try:
            while piece := connection.recv(1 << 20):  # the end, and no time-out
                got += len(piece)
        except ConnectionResetError:
            pass
        finally:
            os.kill(worker, signal.SIGCONT)
        assert first.startswith(b"HTTP/1.1 200") and got < q.nbytes, (first[:12], got)
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == server.metrics()[POOL] == 0, what="free memory")


# ---- Those who leave, those who are slow ------------------------------------------------------------------

def leave(server, reset):
    """90 clients leave while their requests compute; 60 come after them."""
    worker, gateway = server.child("worker"), server.child("gateway")
    before, refused = fds_of(gateway), 'kld_requests_total{front="http",status="busy"}'
    count = server.metrics()[refused] + 24
    connections = [connect(server) for _ in range(90)]
    suspend(worker)
    try:
        for one in connections:
            one.sendall(text_of(DATA, HEADERS))
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 90, what="all of them")
        server.metrics()  # a turn of the gateway later: what goes to the worker at a turn's end is there
        for one in connections:
            if reset:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 0, what="that they have gone")
        wait_until(lambda: fds_of(gateway) <= before + 1, what="closed descriptors")
        # 64 are with the worker, which has not answered them: they count. The others do not any more.
        more = [connect(server) for _ in range(60)]
        for one in more:
            one.sendall(text_of(DATA, HEADERS))
        wait_until(lambda: server.metrics()[refused] == count, what="those that are too many")
    finally:
        os.kill(worker, signal.SIGCONT)
    answers = [one.recv(12) for one in more]
    assert answers.count(b"HTTP/1.1 200") == 36 and answers.count(b"HTTP/1.1 503") == 24
    for one in more:
        one.close()
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="free staging")
    assert server.request(INFER, DATA, HEADERS)[0] == 200


@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_while_its_request_computes(make_server, reset):
    """Is noticed; its place in the worker's queue goes to others, its memory is free when the worker is through. The room
    of the most connections that there were at a time, 3 to 6 MB, the allocator keeps, but no block of it is in use."""
    page = faillib.counting()
    server = make_server(http_requests_max=100, http_threads=1, environment=page and page.environment())
    assert server.request(INFER, DATA, HEADERS)[0] == 200
    leave(server, reset)
    with Flat(server, 8 << 20, page=page):
        for _ in range(3):
            leave(server, reset)


@unless_late
def test_who_holds_much_has_to_send_more(make_server):
    """1 KiB a second is enough for a small request, not for one that holds 1 MiB."""
    server = make_server(http_slow_ms=2000, http_slow_bytes="1K", http_slow_parts=16, **SMALL)
    small, large = probabilities((40, 50), 6), probabilities((100, 1000), 7)
    connections, left = {}, {}
    for name, q in (("small", small), ("large", large)):
        headers, data = oip.body({"predictions": q, "targets": q})
        text = text_of(data, headers)
        connections[name] = connect(server)
        connections[name].sendall(text[:-10000])
        left[name] = text[-10000:]

    def go_on():
        time.sleep(0.25)
        count = pace.due()
        for name, one in connections.items():
            try:
                one.sendall(left[name][:count])
                left[name] = left[name][count:]
            except OSError:
                assert name == "large"
        return pace.seen(server.metrics()["kld_http_slow_total"])
    with Pace(2000, 2000) as pace:
        wait_until(go_on, what="the large one's end")
        for _ in range(4):  # as for a look at the small one that came later
            assert go_on() == 1
        connections["small"].sendall(left["small"])
        pace.look()
        assert connections["small"].recv(12) == b"HTTP/1.1 200"
    for one in connections.values():
        one.close()


class Uploads:
    """A large request that is sent quickly, and one of its kind and a stored tensor at 100 KB a second: enough for the
    pieces of a large request in staging, and not for the 8 MB in the pool behind them."""

    def __init__(self, server, slow_ms):
        self.server, self.cut = server, set()
        q = probabilities((1000, 1000), 8)
        headers, data = oip.body({"predictions": q, "targets": q})
        texts = [text_of(data, headers), text_of(q.tobytes() + q.tobytes(), {}, "PUT",
                                                 "/v2/tensors/a?datatype=FP32&shape=2,1000000")]
        self.quick, *self.slow = self.connections = [connect(server) for _ in range(3)]
        self.left = {one: text for one, text in zip(self.connections, [texts[0], *texts])}
        self.paces = {one: Pace(1000000 if one is self.quick else 100000, slow_ms) for one in self.connections}
        with self:
            for one in self.connections:
                self.send(one, 500000)

            def are_there():
                self.send_due()
                return server.metrics()[POOL] >= 6 * q.nbytes
            wait_until(are_there, what="their buffers")

    def __enter__(self):
        return self

    def __exit__(self, *problem):
        self.paces[self.quick].__exit__(*problem)

    def send(self, one, count):
        try:
            one.sendall(self.left[one][:count])
        except OSError:
            self.cut.add(one)
        self.left[one] = self.left[one][count:]

    def send_due(self):
        for one, pace in self.paces.items():
            self.send(one, pace.due())

    def go_on(self, seconds):
        for _ in range(4 * seconds):
            time.sleep(0.25)
            self.send_due()
        return self.paces[self.quick].seen(self.server.metrics()["kld_http_slow_total"])

    def end(self):
        self.send(self.quick, len(self.left[self.quick]))
        self.paces[self.quick].look()
        assert self.quick.recv(12) == b"HTTP/1.1 200" and self.quick not in self.cut
        self.paces[self.quick].over()
        for one in self.connections:
            one.close()
        wait_until(lambda: self.server.metrics()[POOL] == 0, what="a free pool")


@unless_late
def test_who_holds_a_device_has_to_be_quick(make_server):
    """More than half of it is taken, also once one of the slow ones has been cut off."""
    server = make_server(http_slow_ms=2000, http_slow_bytes="1K", http_slow_parts=16, pool_bytes_max="28M", **SMALL)
    with Uploads(server, 2000) as uploads:
        wait_until(lambda: uploads.go_on(1) == 2, what="the slow ones' end")
        uploads.end()


@unless_late
def test_who_holds_what_nobody_wants_may_be_slow(make_server):
    """Until somebody does: one waits for more than is left, and the slow ones make room for him."""
    server = make_server(http_slow_ms=3000, http_slow_bytes="1K", http_slow_parts=16, pool_bytes_max="64M", **SMALL)
    with Uploads(server, 3000) as uploads:
        assert uploads.go_on(5) == 0 and not uploads.cut
        q, answers = probabilities((1000, 7000), 8), []  # 56 MB
        waits = threading.Thread(target=lambda: answers.append(infer(server, {"predictions": q, "targets": q})))
        waits.start()
        wait_until(lambda: uploads.go_on(1) == 2, 30, "the slow ones' end")
        uploads.end()
        waits.join(60)
        assert len(answers) == 1


def pool_region(server, size):
    """Does a client of the Unix socket get so much of the device's pool?"""
    with wire.Client(server.unix) as client:
        try:
            return client.region_add(wire.POOL, size) is not None
        except wire.Failed as error:
            assert error.status == "no_memory"
            return False


@unless_late
def test_who_holds_what_a_unix_client_is_refused_has_to_be_quick(make_server):
    """Also where it is less than half. What there is not in any case nobody is refused for his sake."""
    server = make_server(http_slow_ms=2000, http_slow_bytes="1K", http_slow_parts=16, pool_bytes_max="64M",
                         client_pool_bytes_max="1G", user_share=100, **SMALL)
    q = probabilities((1000, 1000), 8)
    headers, data = oip.body({"predictions": q, "targets": q})
    text = text_of(data, headers)
    with connect(server) as one, Pace(100000, 2000) as pace:
        one.sendall(text[:500000])

        def is_there():
            one.sendall(bytes(pace.due()))
            return server.metrics()[POOL] >= q.nbytes
        wait_until(is_there, what="its buffer")

        def cut_off(seconds, size):
            begin = time.monotonic()
            while time.monotonic() < begin + seconds and not server.metrics()["kld_http_slow_total"]:
                time.sleep(0.25)
                with contextlib.suppress(OSError):
                    one.sendall(bytes(pace.due()))
                pool_region(server, size)
            return pace.seen(server.metrics()["kld_http_slow_total"]) == 1
        assert not cut_off(5, 65 << 20)
        assert cut_off(30, 60 << 20)
    wait_until(lambda: pool_region(server, 60 << 20), what="room in the pool")


def test_who_reads_a_reply_out_of_a_device_has_to_be_quick(make_server):
    server = make_server(http_slow_ms=1000, http_slow_bytes="1K", http_slow_parts=16, pool_bytes_max="64M", **SMALL)
    q = probabilities((1000, 3000), 8)
    headers, data = oip.body({"predictions": q, "targets": q}, {"grad_predictions": {"binary_data": True}})
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        one.settimeout(20)
        host, port = server.address.rsplit(":", 1)
        one.connect((host, int(port)))
        one.sendall(text_of(data, headers))
        assert one.recv(1000)
        begin = time.monotonic()
        while time.monotonic() < begin + 20 and not server.metrics()["kld_http_slow_total"]:
            time.sleep(0.25)
            with contextlib.suppress(OSError):  # cut off between one look and the next
                one.recv(50000, socket.MSG_WAITALL)
        assert server.metrics()["kld_http_slow_total"] == 1
    wait_until(lambda: server.metrics()[POOL] == 0, what="a free pool")


# ---- Small JSON --------------------------------------------------------------------------------------------

def staged_by(server, size, cut=0):
    """Staging that a request takes whose JSON is filled up to `size` bytes and whose worker does not answer; cut: of which the last bytes
    have not come yet."""
    headers, data = oip.body({"predictions": Q, "targets": Q}, binary=False)
    text = text_of(data.ljust(size), headers)
    worker, before = server.child("worker"), settled(lambda: server.metrics()["kld_staging_bytes"])
    suspend(worker)
    try:
        with connect(server) as one:
            one.sendall(text[:len(text) - cut])
            wait_until(lambda: server.metrics()["kld_staging_bytes"] > before, what="a request with memory")
            staged = settled(lambda: server.metrics()["kld_staging_bytes"]) - before
            os.kill(worker, signal.SIGCONT)
            one.sendall(text[len(text) - cut:])
            assert one.recv(65536).startswith(b"HTTP/1.1 200")
    finally:
        os.kill(worker, signal.SIGCONT)
    return staged


def test_small_json_that_has_come_takes_no_staging(make_server):
    """Of a length that is known; its tensors do. Who dawdles does not keep others out of the one place for it."""
    server = make_server(http_threads=1)
    tensors = staged_by(server, 0)
    assert staged_by(server, 4096) == tensors and staged_by(server, 4097) == tensors + 4160
    assert staged_by(server, 4096, cut=1) == 4096
    text = text_of(oip.body({"predictions": Q, "targets": Q}, binary=False)[1], {})
    with connect(server) as slow:
        slow.sendall(text[:-1])
        wait_until(lambda: server.metrics()["kld_staging_bytes"] > 0, what="a slow request")
        assert staged_by(server, 4096) == tensors
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="free staging")


# ---- Replies that would be compressed ---------------------------------------------------------------------

def test_no_room_to_compress_a_reply_in(make_server):
    """It goes out as it is, and nobody is in the queue for memory afterwards who is not there any more."""
    server = make_server(staging_bytes_max="1M", http_deadline_ms=5000, http_slow_ms=120000)
    rows = {"predictions": [round(0.001 + k / 11325, 4) for k in range(150)], "targets": [0.0067] * 150}
    inputs = [{"name": n, "datatype": "FP32", "shape": [1, 150], "data": row} for n, row in rows.items()]
    text = text_of(json.dumps({"inputs": inputs, "parameters": {"reduction": "none"}}).encode(), {"Accept-Encoding": "gzip"})
    held = []

    def hold(json_bytes, columns):
        """A request that has its staging, and sends no tensor."""
        tensors = [{"name": n, "datatype": "FP32", "shape": [1, columns], "parameters": {"binary_data_size": 4 * columns}}
                   for n in ("predictions", "targets")]
        head = json.dumps({"inputs": tensors}).encode().ljust(json_bytes)
        held.append(connect(server))
        held[-1].sendall(text_of(head, {oip.LENGTH: len(head)}, length=len(head) + 8 * columns))

    with connect(server) as one:
        one.sendall(text[:-1])
        wait_until(lambda: server.metrics()["kld_staging_bytes"] > 0, what="its memory")
        for json_bytes, count in ((4032, 6), (300, 40)):  # as much as there is, then what is left in smaller pieces
            for _ in range(count):
                if server.metrics()["kld_http_requests_waiting"] == 0:
                    hold(json_bytes, 380)
                    time.sleep(0.02)
        wait_until(lambda: server.metrics()["kld_http_requests_waiting"] > 0, what="staging that is full")
        one.sendall(text[-1:])
        answer = one.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200") and b"Content-Encoding" not in answer, answer
    for connection in held:
        connection.close()
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="free staging")
    headers, data = oip.body({"predictions": Q[:1, :2], "targets": Q[:1, :2]}, binary=False)
    assert server.request(INFER, data, headers)[0] == 200


# ---- Pieces that fail -------------------------------------------------------------------------------------

def test_a_piece_that_fails_wakes_who_waits_for_it(make_server):
    """The worker dies while the gateway waits for the pieces of an upload, of a tail, and reads shared memory."""
    server = make_server(**SMALL)
    q = probabilities((1000, 1003), 8)
    headers, data = oip.body({"predictions": q, "targets": q})
    for text in (text_of(data, headers),
                 text_of(q.tobytes(), {}, "PUT", "/v2/tensors/a?datatype=FP32&shape=1000,1003")):
        worker = server.child("worker")
        wait_until(lambda: server.request("/v2/health/ready")[0] == 200, what="a worker")
        with connect(server) as connection:
            connection.sendall(text[:100000])
            wait_until(lambda: server.metrics()[POOL] > 0, what="its buffer")
            suspend(worker)
            threading.Thread(target=lambda: connection.sendall(text[100000:]), daemon=True).start()
            time.sleep(0.2)  # all pieces are on their way, and nothing is read any more
            begin = time.monotonic()
            os.kill(worker, signal.SIGKILL)
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 503") and b"Retry-After" in answer, answer
            assert time.monotonic() - begin < 10
        wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="free staging")
    wait_until(lambda: server.request(INFER, DATA, HEADERS)[0] == 200, what="a worker")
