"""Refusals that come while far more than 64 MiB are still to be sent: whoever is known gets his reply, with its Retry-After,
on a connection that goes on; a stranger gets no more dropped than before."""
import hashlib
import http.client
import json
import socket
import time

import numpy as np
import pytest

import oip
from conftest import wait_until
from httplib import POOL
from oip import INFER
from pythonlib import import_kld

kld = import_kld()
ROWS, CLASSES = 100, 1 << 18  # of FP32: 100 MiB a tensor
BLOCK = bytes(1 << 20)
BODY = 2 * ROWS * CLASSES * 4
SMALL = {"staging_bytes_max": "4M", "staging_request_bytes_max": "1M"}
Q = np.full((2, 8), 0.125, "<f4")


def head_of(parameters=None, rows=ROWS):
    inputs = [{"name": name, "shape": [rows, CLASSES], "datatype": "FP32",
               "parameters": {"binary_data_size": rows * CLASSES * 4}} for name in ("predictions", "targets")]
    return json.dumps({"inputs": inputs, **({"parameters": parameters} if parameters else {})}).encode()


def bearer(name):
    return {"Authorization": f"Bearer word-of-{name}"}


class Sender:
    """A connection on which nothing is read before all of a body is sent, as tritonclient does it."""

    def __init__(self, server):
        self.http = http.client.HTTPConnection(server.address, timeout=60)

    def begin(self, head, path=INFER, method="POST", headers=(), size=BODY):
        self.left = size
        self.http.putrequest(method, path)
        for name, value in {oip.LENGTH: len(head), "Content-Length": len(head) + size, **dict(headers)}.items():
            self.http.putheader(name, str(value))
        self.http.endheaders(head)

    def send(self, size):
        end = self.left - size
        while self.left > end:
            self.http.send(BLOCK[:self.left - end])
            self.left -= min(len(BLOCK), self.left - end)

    def finish(self):
        """-> (status, headers, the error's text)."""
        self.send(self.left)
        reply = self.http.getresponse()
        body = reply.read()
        assert reply.headers.get("Connection", "").lower() != "close"
        return reply.status, reply.headers, json.loads(body)["error"]

    def serves(self, headers=()):
        more, data = oip.body({"predictions": Q, "targets": Q})
        self.http.request("POST", INFER, data, {**more, **dict(headers)})
        reply = self.http.getresponse()
        assert reply.status == 200 and "outputs" in json.loads(reply.read())
        self.http.close()


@pytest.fixture(scope="module")
def server(backend):
    from conftest import Server, end_well
    one = Server(backend=backend, pool_bytes_max="128M", http_deadline_ms=1500, **SMALL)
    yield one
    end_well(one)


@pytest.mark.parametrize("head, path, status, text", [
    (head_of({"reduction": "avg"}), INFER, 400, "avg"),
    (b'{"inputs": [}', INFER, 400, "JSON"),
    (b"{}".ljust(17 << 20), INFER, 413, "json_bytes_max"),
    (b"{}", "/v2/models/another/infer", 404, "model"),
    (b"{}", "/v2/repository/index", 413, "65536"),
], ids=["parameter", "json", "json_bytes_max", "model", "small"])
def test_what_is_wrong_is_said_behind_the_body(server, head, path, status, text):
    sender = Sender(server)
    sender.begin(head, path)
    got, _, error = sender.finish()
    assert got == status and text in error, (got, error)
    sender.serves()


def test_chunks_without_a_length(server):
    head = head_of({"reduction": "avg"})
    sender = Sender(server)
    sender.http.request("POST", INFER, iter([head] + [BLOCK] * 200), {oip.LENGTH: len(head)}, encode_chunked=True)
    reply = sender.http.getresponse()
    assert reply.status == 400 and "avg" in json.loads(reply.read())["error"]
    sender.serves()


def test_a_tensor_that_is_not_stored(server):
    sender = Sender(server)
    sender.begin(b"", f"/v2/tensors/a?datatype=FP32&shape={ROWS},{CLASSES}", "PUT", size=BODY)
    got, _, error = sender.finish()
    assert got == 400 and str(BODY) in error
    sender.serves()


def test_a_pool_that_stays_full(server):
    """More than 64 MiB come behind the refusal, over a socket and through libkld, which says what the server said."""
    rows = 40  # two tensors of 40 MiB, which do not fit beside the 60 MB
    path = "/v2/tensors/full"
    assert server.request(path + "?datatype=FP32&shape=15,1000000", bytes(60000000), method="PUT")[0] == 200
    try:
        sender = Sender(server)
        sender.begin(head_of(rows=rows), size=2 * rows * CLASSES * 4)
        got, headers, error = sender.finish()
        assert got == 503 and headers["Retry-After"] and "memory pool" in error, (got, error)
        sender.serves()
        with kld.connect(server.http) as connection:
            q = np.full((rows, CLASSES), 1 / CLASSES, "<f4")
            with pytest.raises(kld.KldError, match="memory pool") as told:
                connection.kl_div(q, q, timeout=10)  # tried again until then
            assert "lost" not in str(told.value)
    finally:
        server.request(path, method="DELETE")


def test_a_tensor_for_which_there_is_no_room(server):
    """libkld gets it with the first try; a connection that just ends it would try again until its time is up."""
    with kld.connect(server.http) as connection:
        q = np.full((ROWS, CLASSES), 1 / CLASSES, "<f4")
        with pytest.raises(kld.KldError, match="pool") as told:
            connection.kl_div(q, q, timeout=20)
        assert "lost" not in str(told.value)


def test_a_worker_that_is_killed_in_mid_upload(make_server):
    server = make_server(**SMALL)
    sender = Sender(server)
    sender.begin(head_of())
    sender.send(BODY // 4)
    wait_until(lambda: server.metrics()[POOL] > 0, what="its buffer")
    worker = server.child("worker")
    server.kill_child("worker")
    assert server.child("worker") != worker
    begin = time.monotonic()
    got, headers, error = sender.finish()
    assert got == 503 and headers["Retry-After"] and "lost" in error, (got, error)
    assert time.monotonic() - begin < 20
    wait_until(lambda: server.request("/v2/health/ready")[0] == 200, what="a worker")
    sender.serves()


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"one {hashlib.sha256(b'word-of-one').hexdigest()} infer,metrics\n")
    return str(path)


def test_what_a_token_may_not_have_and_who_has_none(make_server, tokens):
    server = make_server(tokens=tokens, token_requests_max=1, http_requests_max=2, http_wait_ms=50, **SMALL)
    in_flight = "kld_http_requests_in_flight"

    def count():
        lines = server.request("/metrics", None, bearer("one"))[2].decode().splitlines()
        return int(next(line for line in lines if line.startswith(in_flight + " ")).split()[-1])
    holder, throttled = Sender(server), Sender(server)
    holder.begin(head_of(rows=1), headers=bearer("one"), size=2 * CLASSES * 4)
    wait_until(lambda: count() == 1, what="the first")
    throttled.begin(head_of(), headers=bearer("one"))
    got, headers, error = throttled.finish()
    assert got == 429 and headers["Retry-After"] and "token_requests_max" in error, (got, error)
    holder.send(holder.left)
    assert holder.http.getresponse().status == 200
    throttled.serves(bearer("one"))
    # Who is not known is told at once, and no more is read.
    stranger = Sender(server)
    stranger.begin(head_of(), headers=bearer("nobody"))
    reply = stranger.http.getresponse()
    assert reply.status == 401 and reply.headers["Connection"].lower() == "close"
    stranger.http.close()
    endless = Sender(server)
    endless.http.putrequest("POST", INFER)
    endless.http.putheader("Transfer-Encoding", "chunked")
    endless.http.endheaders()
    with pytest.raises(OSError):
        for sent in range(200):
            endless.http.send(b"%x\r\n" % len(BLOCK) + BLOCK + b"\r\n")
    assert 60 < sent < 100
    endless.http.close()


def test_more_requests_than_there_may_be(make_server):
    """A large one waits for its turn like a small one, and is told when there is none."""
    server = make_server(http_requests_max=1, http_wait_ms=400, **SMALL)
    holder, large = Sender(server), Sender(server)
    holder.begin(head_of(rows=1), size=2 * CLASSES * 4)
    wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1, what="the first")
    large.begin(head_of())
    begin = time.monotonic()
    got, headers, error = large.finish()
    assert got == 503 and headers["Retry-After"] and "in flight" in error, (got, error)
    assert time.monotonic() - begin > 0.2
    large.begin(head_of())
    holder.send(holder.left)
    assert holder.http.getresponse().status == 200
    large.send(large.left)
    assert large.http.getresponse().status == 200


def test_who_was_refused_may_be_as_slow_as_any(make_server):
    """He holds nothing any more; who sends next to nothing is cut off all the same."""
    server = make_server(http_slow_ms=1000, http_slow_bytes="1K", http_slow_parts=16, **SMALL)
    q = np.full((100, 1000), 1e-3, "<f4")
    headers, data = oip.body({"predictions": q, "targets": q}, None, {"reduction": "sum"})
    held = int(headers[oip.LENGTH]) + q.nbytes  # half of it, and nothing behind
    text = ["POST " + INFER + " HTTP/1.1", "Host: localhost", f"Content-Length: {len(data) + 100000}",
            *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    host, port = server.address.rsplit(":", 1)
    one = socket.create_connection((host, int(port)), 60)
    one.sendall("\r\n".join(text).encode() + data[:held])
    wait_until(lambda: server.metrics()["kld_staging_bytes"] > 700000, what="its staging")
    one.sendall(data[held:] + b"x")
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="its refusal")
    for _ in range(10):  # 2.5 s of 4 KiB a second
        time.sleep(0.25)
        one.sendall(bytes(1000))
    assert server.metrics()["kld_http_slow_total"] == 0
    wait_until(lambda: server.metrics()["kld_http_slow_total"] == 1, what="its end")
    one.close()
