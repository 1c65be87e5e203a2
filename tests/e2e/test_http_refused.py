"""Refusals that come while far more than 64 MiB are still to be sent: whoever is known gets his reply, with its Retry-After,
on a connection that goes on; a stranger gets no more dropped than before. Where nothing says how much is still to come
the reply does not wait for the end."""
import hashlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import time

import numpy as np
import pytest

import oip
from conftest import SILENT, suspend, wait_until
from httplib import POOL, Pace, certificates, socket_mib, tls_flags, unless_late
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

    def send_what_goes(self):
        """What the socket has room for."""
        self.http.sock.settimeout(0.2)
        try:
            while self.left:
                self.left -= self.http.sock.send(BLOCK[:self.left])
        except TimeoutError:
            pass
        self.http.sock.settimeout(60)

    def finish(self):
        """-> (status, headers, the error's text)."""
        self.send(self.left)
        reply = self.http.getresponse()
        body = reply.read()
        assert reply.headers.get("Connection", "").lower() != "close"
        return reply.status, reply.headers, json.loads(body)["error"]

    def serves(self, headers=()):
        more, data = oip.body({"predictions": Q, "targets": Q})

        def answer():
            self.http.request("POST", INFER, data, {**more, **dict(headers)})
            reply = self.http.getresponse()
            body = reply.read()
            return reply.status != 408 and (reply.status, body)  # the deadline of the impatient one
        status, body = wait_until(answer, what="an answer in time")
        assert status == 200 and "outputs" in json.loads(body), body
        self.http.close()


@pytest.fixture(scope="module")
def server(backend):
    from conftest import Server, end_well
    one = Server(backend=backend, pool_bytes_max="128M", **SMALL)
    yield one
    end_well(one)


@pytest.fixture(scope="module")
def impatient(backend):
    """Where nobody waits for room for long; on a busy machine that is also too short for what there is room for."""
    from conftest import Server, end_well
    one = Server(backend=backend, pool_bytes_max="128M", http_deadline_ms=1500, **SMALL)
    yield one
    end_well(one)


@pytest.mark.parametrize("head, path, status, text", [
    (head_of({"reduction": "avg"}), INFER, 400, "avg"),
    (b'{"inputs": [}', INFER, 400, "JSON"),
    (b"{}".ljust(17 << 20), INFER, 413, "json_bytes_max"),
    (b"{}", "/v2/models/another/infer", 404, "model"),
    (b"{}", "/v2/repository/index", 413, "4096 bytes"),
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


def test_a_pool_that_stays_full(impatient):
    """More than 64 MiB come behind the refusal, over a socket and through libkld, which says what the server said."""
    rows = 40  # two tensors of 40 MiB, which do not fit beside the 60 MB
    path = "/v2/tensors/full"
    wait_until(lambda: impatient.heard(path + "?datatype=FP32&shape=15,1000000", bytes(60000000), method="PUT")[0] == 200,
               what="a tensor that is stored in time")
    try:
        sender = Sender(impatient)

        def answer():
            sender.begin(head_of(rows=rows), size=2 * rows * CLASSES * 4)
            got = sender.finish()
            return got[0] != 408 and SILENT not in got[2].encode() and got
        got, headers, error = wait_until(answer, what="what is said of the pool")
        assert got == 503 and headers["Retry-After"] and "memory pool" in error, (got, error)
        sender.serves()
        with kld.connect(impatient.http) as connection:
            q = np.full((rows, CLASSES), 1 / CLASSES, "<f4")
            with pytest.raises(kld.KldError, match="memory pool") as told:
                connection.kl_div(q, q, timeout=10)  # tried again until then
            assert "lost" not in str(told.value)
    finally:
        impatient.request(path, method="DELETE")


def test_a_tensor_for_which_there_is_no_room(impatient):
    """libkld gets it with the first try; a connection that just ends it would try again until its time is up."""
    with kld.connect(impatient.http) as connection:
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


def test_what_has_all_arrived_is_dropped_without_a_rest(make_server):
    """The gateway looks again and again whether bytes still come, and where none does it rests: not while it drops some that
    have come already."""
    server = make_server(http_slow_ms=1000, **SMALL)
    gateway = server.child("gateway")
    for _ in range(5):  # how much the socket has room for is the kernel's business
        sender = Sender(server)
        sender.begin(head_of({"divergence": "no_such"}))
        sender.send(BODY - (24 << 20))
        suspend(gateway)
        try:
            sender.send_what_goes()
        finally:
            os.kill(gateway, signal.SIGCONT)
        got, _, error = sender.finish()
        assert got == 400 and "no_such" in error, (got, error)
        sender.serves()


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"one {hashlib.sha256(b'word-of-one').hexdigest()} infer,metrics\n")
    return str(path)


def test_what_a_token_may_not_have_and_who_has_none(make_server, tokens):
    server = make_server(tokens=tokens, token_requests_max=1, http_requests_max=2, http_wait_ms=50,
                         http_threads=1, **SMALL)  # several may count a request until after its reply
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


def test_more_requests_than_there_may_be(make_server):
    """A large one waits for its turn like a small one, and is told when there is none."""
    def both(wait_ms):
        server = make_server(http_requests_max=1, http_wait_ms=wait_ms, **SMALL)
        holder, large = Sender(server), Sender(server)
        holder.begin(head_of(rows=1), size=2 * CLASSES * 4)
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1, what="the first")
        begin = time.monotonic()
        large.begin(head_of())
        return holder, large, begin
    first, large, begin = both(2000)
    got, headers, error = large.finish()
    assert got == 503 and headers["Retry-After"] and "in flight" in error, (got, error)
    assert time.monotonic() - begin > 1
    first.http.close()
    holder, large, _ = both(60000)
    holder.send(holder.left)
    assert holder.http.getresponse().status == 200
    large.send(large.left)
    assert large.http.getresponse().status == 200


@unless_late
def test_who_was_refused_may_be_as_slow_as_any(make_server):
    """He holds nothing any more; who sends next to nothing is cut off all the same."""
    server = make_server(http_slow_ms=1500, http_slow_bytes="1K", http_slow_parts=16, **SMALL)
    q = np.full((100, 1000), 1e-3, "<f4")
    headers, data = oip.body({"predictions": q, "targets": q}, None, {"reduction": "sum"})
    held = int(headers[oip.LENGTH]) + q.nbytes  # half of it, and nothing behind
    text = ["POST " + INFER + " HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked",
            *(f"{name}: {value}" for name, value in headers.items()), "", f"{len(data) + 100000:x}", ""]
    host, port = server.address.rsplit(":", 1)
    one = socket.create_connection((host, int(port)), 60)
    one.sendall("\r\n".join(text).encode() + data[:held])
    wait_until(lambda: server.metrics()["kld_staging_bytes"] > 700000, what="its staging")
    one.sendall(data[held:] + b"x")
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="its refusal")
    with Pace(4000, 1500) as pace:
        for _ in range(14):  # 3.5 s, or more
            time.sleep(0.25)
            one.sendall(bytes(pace.due()))
        assert pace.seen(server.metrics()["kld_http_slow_total"]) == 0
    wait_until(lambda: server.metrics()["kld_http_slow_total"] == 1, what="its end")
    one.close()


# ---- Bodies that no length announces ----------------------------------------------------------------------

CHUNK = b"%x\r\n" % len(BLOCK) + BLOCK + b"\r\n"
WRONG = json.dumps({"inputs": [], "parameters": {"reduction": "avg"}}).encode()
UNKNOWN = {"stranger": (INFER, bearer("nobody"), b"", 401), "method": ("/metrics", bearer("one"), b"", 405),
           "no right": ("/v2/systemsharedmemory/unregister", bearer("one"), b"", 403),
           "no route": ("/v2/nothing", bearer("one"), b"", 404),
           "small": ("/v2/repository/index", bearer("one"), b"", 413),
           "json": (INFER, {**bearer("one"), oip.LENGTH: len(WRONG)}, WRONG, 400),
           "body_bytes_max": (INFER, {**bearer("one"), oip.LENGTH: len(head_of())}, head_of(), 413)}


class Chunks:
    """A connection on which a body goes on in chunks of 1 MiB, behind a good request whose reply is not read before."""

    def __init__(self, server, name, context=None):
        path, headers, begin, self.status = UNKNOWN[name]
        host, port = server.address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), 60)
        if context:
            self.socket = context.wrap_socket(self.socket, server_hostname="localhost")
        more, data = oip.body({"predictions": Q, "targets": Q})
        self.head(INFER, {**more, **bearer("one"), "Content-Length": len(data)})
        self.socket.sendall(data)
        self.head(path, {**headers, "Transfer-Encoding": "chunked"})
        if begin:
            self.socket.sendall(b"%x\r\n" % len(begin) + begin + b"\r\n")

    def head(self, path, headers):
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def send(self, most):
        """-> how many were sent before the connection took no more."""
        for sent in range(most):
            try:
                self.socket.sendall(CHUNK)
            except OSError:
                return sent
        return most

    def replies(self):
        """All that come until the server ends the connection in order; a reset fails."""
        found = []
        with self.socket.makefile("rb") as stream:
            while line := stream.readline():
                status, headers = int(line.split()[1]), http.client.parse_headers(stream)
                found.append((status, headers, json.loads(stream.read(int(headers["Content-Length"])))))
        self.socket.close()
        return found


@pytest.fixture(scope="module")
def limited(backend, tmp_path_factory):
    from conftest import Server, end_well
    path = tmp_path_factory.mktemp("limited") / "tokens"
    path.write_text(f"one {hashlib.sha256(b'word-of-one').hexdigest()} infer,metrics\n")
    one = Server(backend=backend, tokens=path, body_bytes_max="8M", pool_bytes_max="1G")
    yield one
    end_well(one)


def said_in_the_end(chunks):
    (first, _, answer), (status, headers, told) = chunks.replies()
    assert first == 200 and "outputs" in answer
    assert status == chunks.status and told["error"] and headers["KLD-Status"] and headers["Date"], (headers, told)
    assert headers["Content-Type"] == "application/json" and headers["Connection"].lower() == "close"
    return headers, told["error"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_refusal_comes_in_the_middle_of_an_endless_body(limited, name):
    """To who reads while he sends, as curl does, and to who has sent 60 MiB and reads then. The next one is served."""
    reader = Chunks(limited, name)
    assert reader.send(45) == 45
    headers, error = said_in_the_end(reader)
    assert (headers["WWW-Authenticate"] == "Bearer") == (reader.status == 401)
    assert (headers["Allow"] or "").startswith("GET") == (reader.status == 405)
    assert {"small": "4096 bytes", "json": "avg", "body_bytes_max": "body_bytes_max"}.get(name, "") in error
    sender = Chunks(limited, name)
    assert sender.send(60) == 60
    sender.socket.shutdown(socket.SHUT_WR)
    assert said_in_the_end(sender)[1] == error
    Sender(limited).serves(bearer("one"))


@pytest.mark.parametrize("path, status", [(INFER, 401), ("/v2/health/ready", 405)])
def test_curl_is_told_in_the_middle(limited, path, status):
    """It reads while it sends, and sends no more then."""
    command = ["curl", "-s", "-X", "POST", "-T", "-", "-H", "Expect:", "-w", " %{http_code} %{size_upload}"]
    with subprocess.Popen(["head", "-c", "300000000", "/dev/zero"], stdout=subprocess.PIPE) as zeros:
        told = subprocess.run([*command, limited.http + path], stdin=zeros.stdout, capture_output=True, text=True,
                              timeout=60)
        zeros.stdout.close()
    body, code, sent = told.stdout.rsplit(" ", 2)
    assert told.returncode == 0 and int(code) == status and "error" in json.loads(body), told
    assert 32 << 20 <= int(sent) < 100 << 20, told


def test_an_endless_body_has_an_end(limited):
    """Who does not read is cut off behind 64 MiB."""
    before = limited.metrics(bearer("one"))['kld_http_replies_total{code="401"}']
    endless = Chunks(limited, "stranger")
    assert 60 < endless.send(200) <= 64 + socket_mib() + 4
    endless.socket.close()
    assert limited.metrics(bearer("one"))['kld_http_replies_total{code="401"}'] == before + 1


def test_an_endless_body_over_tls(make_server, certificates, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"one {hashlib.sha256(b'word-of-one').hexdigest()} infer,metrics\n")
    server = make_server(tokens=tokens, body_bytes_max="8M", **tls_flags(certificates))
    context = ssl.create_default_context(cafile=certificates / "ca.crt")
    for name in ("stranger", "json", "body_bytes_max"):
        chunks = Chunks(server, name, context)
        assert chunks.send(45) == 45
        said_in_the_end(chunks)
