"""HTTP requests larger than their share of staging: they go piece by piece into the device's pool. Memory
stays bounded, full staging makes callers wait, and whatever breaks off leaves nothing."""
import gzip
import json
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

import oip
import wire
from conftest import suspend, wait_until
from httplib import (POOL, PREFIX, Flat, Late, Shared, close, fds_of, in_region, is_sanitized, memory_of, probabilities,
                     register, unless_late)
from oip import INFER, Connection, infer

SMALL = {"staging_bytes_max": "4M", "staging_request_bytes_max": "1M"}


@pytest.fixture(scope="module")
def server(backend):
    from conftest import SANITIZER, Server
    one = Server(backend=backend, shm_prefix=PREFIX, **SMALL)
    yield one
    wait_until(lambda: one.metrics()["kld_staging_bytes"] == 0 and one.metrics()[POOL] == 0,
               what="free memory")
    status, log = one.stop(), one.log()
    one.remove()
    assert status == 0 and not SANITIZER.search(log), log


@pytest.fixture(scope="module")
def roomy(backend):
    """The same request here lies in staging as a whole."""
    from conftest import Server
    one = Server(backend=backend)
    yield one
    one.stop()
    one.remove()


ASKED = {name: {"binary_data": True} for name in ("loss", "row_loss", "grad_predictions", "grad_targets")}
KEPT = 'kld_pool_kept_bytes{worker="0"}'
SHAPE = (1000, 1003)


@pytest.mark.parametrize("shape", [SHAPE, (3, 200000), (70000, 5)])
@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2"])
def test_bit_identical_to_a_request_in_staging(server, roomy, shape, dtype):
    inputs = {"predictions": probabilities(shape, 1).astype(dtype), "targets": probabilities(shape, 2).astype("<f4"),
              "row_weights": np.linspace(0.5, 1.5, shape[0], dtype="<f4"),
              "row_mask": np.arange(shape[0]) % 3 != 0}
    (_, here), (_, there) = (infer(one, inputs, ASKED, {"reduction": "rowmean"}) for one in (server, roomy))
    for name in ASKED:
        assert here[name].tobytes() == there[name].tobytes(), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("piece", [1000, 65536, 10 ** 9])
def test_in_any_pieces(server, piece, packed):
    q, p = probabilities(SHAPE, 3), probabilities(SHAPE, 4)
    headers, data = oip.body({"predictions": q, "targets": p}, {"grad_predictions": {"binary_data": True}})
    if packed:
        data, headers = gzip.compress(data, 1), {**headers, "Content-Encoding": "gzip"}
    with Connection(server) as connection:
        for _ in range(2):
            connection.http.request("POST", INFER, (data[at:at + piece] for at in range(0, len(data), piece)),
                                    headers, encode_chunked=True)
            reply = connection.http.getresponse()
            body = reply.read()
            assert reply.status == 200, body[:500]
            close(oip.parse(reply.headers, body)[1]["grad_predictions"],
                  oip.expected(q, p)["grad_predictions"], "FP32")


def test_json_behind_a_request_in_pieces(make_server):
    """Larger than its share, but nothing of it travels in pieces: what the memory of another request's pieces still
    says is nothing to it."""
    server = make_server(staging_request_bytes_max="1M", http_threads=1)
    q, p = probabilities((100, 3000), 3), probabilities((100, 3000), 4)
    gradient, loss = {"grad_predictions": {"binary_data": True}}, oip.expected(q, p)["loss"]
    before = server.child("gateway")
    with Connection(server) as connection:
        for outputs, binary in ((gradient, True), (None, False)) * 3:
            headers, data = oip.body({"predictions": q, "targets": p}, outputs, None, binary)
            status, reply_headers, reply = connection.ask("POST", INFER, data, headers)
            assert status == 200, reply[:500]
            if not outputs:
                close(oip.parse(reply_headers, reply)[1]["loss"], loss, "FP32")
    assert server.child("gateway") == before


def test_shared_memory_both_ways(server):
    q, p = probabilities(SHAPE, 5), probabilities(SHAPE, 6)
    size = q.nbytes
    with Shared(4 * size) as shared:
        shared.map[:size], shared.map[size:2 * size] = q.tobytes(), p.tobytes()
        assert register(server, "r", shared, 4 * size)[0] == 200
        outputs = [{k: v for k, v in in_region(name, SHAPE, at).items() if k in ("name", "parameters")}
                   for name, at in (("grad_predictions", 2 * size), ("grad_targets", 3 * size))]
        request = {"inputs": [in_region("predictions", SHAPE, 0), in_region("targets", SHAPE, size)],
                   "outputs": [{"name": "loss"}, *outputs]}
        status, reply = server.json(INFER, request)
        assert status == 200, reply
        truth = oip.expected(q, p)
        for name, at in (("grad_predictions", 2 * size), ("grad_targets", 3 * size)):
            close(np.frombuffer(shared.map[at:at + size], "<f4").reshape(SHAPE), truth[name], "FP32")
        assert abs(reply["outputs"][0]["data"][0] - truth["loss"][0]) < 1e-6
        os.ftruncate(shared.fd, 3 * size)
        status, reply = server.json(INFER, request)
        assert status == 400 and "shorter" in reply["error"]
        assert server.request("/v2/systemsharedmemory/unregister", b"", method="POST")[0] == 200


def post_repeated(server, headers, head, block, count):
    """head, then block count times; -> the reply's JSON."""
    with Connection(server, timeout=280) as connection:
        http = connection.http
        http.putrequest("POST", INFER)
        http.putheader("Content-Length", str(len(head) + count * len(block)))
        for name, value in headers.items():
            http.putheader(name, value)
        http.endheaders(head)
        for _ in range(count):
            http.send(block)
        reply = http.getresponse()
        body = reply.read()
        assert reply.status == 200, body
        return json.loads(body)


def uniform(rows, classes):
    """A request of two FP32 tensors of which each row is uniform."""
    inputs = [{"name": name, "shape": [rows, classes], "datatype": "FP32",
               "parameters": {"binary_data_size": rows * classes * 4}} for name in ("predictions", "targets")]
    head = json.dumps({"inputs": inputs}).encode()
    return {oip.LENGTH: str(len(head))}, head


def test_the_gateway_stays_small(make_server):
    """400 MB through 4 MB of staging."""
    server = make_server(**SMALL)
    infer(server, {"predictions": probabilities(SHAPE, 7), "targets": probabilities(SHAPE, 8)})
    gateway = server.child("gateway")
    before = memory_of(gateway)["peak"]
    headers, head = uniform(50000, 1000)
    block = np.full((1000, 1000), 1e-3, "<f4").tobytes()
    reply = post_repeated(server, headers, head, block, 100)
    assert reply["outputs"][0]["data"] == [0]
    if not is_sanitized():
        assert memory_of(gateway)["peak"] < before + (8 << 20)


# ---- Full staging ---------------------------------------------------------------------------------

def ask(server, replies, data, headers):
    replies.append(server.request(INFER, data, headers))


def warm_up(server, data, headers):
    """The first request of a server may take longer than a short deadline gives it."""
    wait_until(lambda: server.request(INFER, data, headers)[0] == 200, what="an answer in time")


def test_full_staging_makes_callers_wait(make_server):
    """Their bytes are not read meanwhile; all are served when there is room again."""
    server = make_server(staging_bytes_max="1M", staging_request_bytes_max="512K")
    q, p = probabilities((100, 500), 9), probabilities((100, 500), 10)
    headers, data = oip.body({"predictions": q, "targets": p})
    infer(server, {"predictions": q, "targets": p})
    worker, replies = server.child("worker"), []
    suspend(worker)
    askers = [threading.Thread(target=ask, args=(server, replies, data, headers)) for _ in range(8)]
    try:
        for asker in askers:
            asker.start()
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 8, what="eight requests")
        time.sleep(0.2)
        assert not replies
        assert server.metrics()["kld_staging_bytes"] <= 1 << 20
    finally:
        os.kill(worker, signal.SIGCONT)
    for asker in askers:
        asker.join()
    assert [reply[0] for reply in replies] == [200] * 8
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="free staging")


@pytest.mark.parametrize("binary", [True, False])
def test_full_staging_at_the_deadline(make_server, binary):
    """503 with Retry-After for who waited too long, while the one before him is still computed."""
    server = make_server(staging_bytes_max="512K", staging_request_bytes_max="256K", http_deadline_ms=1500)
    q, p = probabilities((10, 100), 11), probabilities((10, 100), 12)
    headers, data = oip.body({"predictions": q, "targets": p})
    warm_up(server, data, headers)
    large = probabilities((100, 300), 13)
    headers, data = oip.body({"predictions": large, "targets": large})
    worker, first, late = server.child("worker"), [], []
    suspend(worker)
    try:
        askers = [threading.Thread(target=ask, args=(server, first, data, headers)) for _ in range(2)]
        for asker in askers:
            asker.start()
        wait_until(lambda: server.metrics()["kld_staging_bytes"] > 450000, what="full staging")
        half = probabilities((100, 100), 14)
        headers, data = oip.body({"predictions": half, "targets": half}, None, None, binary)
        begin = time.monotonic()
        ask(server, late, data, headers)
        assert late[0][0] == 503 and late[0][1]["Retry-After"] and b"staging" in late[0][2], late
        assert 1.4 < time.monotonic() - begin < 20
    finally:
        os.kill(worker, signal.SIGCONT)
    for asker in askers:
        asker.join()
    assert all(reply[0] in (200, 408) for reply in first)


def test_a_deadline_behind_one_who_waits_longer(make_server):
    server = make_server(staging_bytes_max="512K", staging_request_bytes_max="256K")
    large, half = probabilities((100, 300), 13), probabilities((100, 100), 14)
    infer(server, {"predictions": half, "targets": half})
    headers, data = oip.body({"predictions": large, "targets": large})
    worker, replies, late = server.child("worker"), [], []
    suspend(worker)
    try:
        askers = [threading.Thread(target=ask, args=(server, replies, data, headers)) for _ in range(3)]
        for asker in askers:
            asker.start()
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 3, what="one who waits")
        wait_until(lambda: server.metrics()["kld_staging_bytes"] > 450000, what="full staging")
        headers, data = oip.body({"predictions": half, "targets": half}, None, {"timeout": 200000})
        begin = time.monotonic()
        ask(server, late, data, headers)
        assert late[0][0] == 503 and b"staging" in late[0][2] and 0.1 < time.monotonic() - begin < 20
    finally:
        os.kill(worker, signal.SIGCONT)
    for asker in askers:
        asker.join()
    assert [reply[0] for reply in replies] == [200] * 3


def head_of(headers, data):
    lines = [f"POST {INFER} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
    return "\r\n".join(lines + [f"{k}: {v}" for k, v in headers.items()] + ["", ""]).encode()


def filled(server, q):
    """Two connections that hold nearly all of 640 KiB and send no more."""
    headers, data = oip.body({"predictions": q, "targets": q})
    host, port = server.address.rsplit(":", 1)
    head = head_of(headers, data)
    connections = [socket.create_connection((host, int(port)), 60) for _ in range(2)]
    for one in connections:
        one.sendall(head + data[:-1])
    wait_until(lambda: server.metrics()["kld_staging_bytes"] > 480000, what="full staging")
    return connections


# Who holds it and sends no more is not sent away meanwhile, however long the test takes.
FULL = {"staging_bytes_max": "640K", "staging_request_bytes_max": "320K", "http_slow_ms": 120000}


def test_who_waits_and_leaves_is_noticed_behind_unread_bytes(make_server):
    """A body that waits for staging lies in the socket, where the end of the connection is behind it."""
    server = make_server(http_deadline_ms=60000, **FULL)
    q = probabilities((100, 300), 24)
    first, second = filled(server, q)
    headers, data = oip.body({"predictions": q, "targets": q})
    host, port = server.address.rsplit(":", 1)
    head = head_of(headers, data)
    third = socket.create_connection((host, int(port)), 60)
    third.sendall(head + data[:50000])  # no more than the socket takes: else the end comes behind what is not sent
    wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 3, what="the third")
    time.sleep(1)
    assert server.metrics()["kld_http_requests_in_flight"] == 3  # for it is there
    third.close()
    wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 2, what="the end of the third")
    for one in (first, second):
        one.sendall(data[-1:])
        assert one.recv(12) == b"HTTP/1.1 200"
        one.close()


def test_nobody_overtakes_those_who_wait(make_server):
    """However little a newcomer wants, and whichever loop he came to."""
    server = make_server(http_threads=2, **FULL)
    large, small = probabilities((100, 300), 24), probabilities((20, 50), 25)
    first, second = filled(server, large)
    replies, asked = [], []

    def asker(q):
        headers, data = oip.body({"predictions": q, "targets": q})
        asked.append(threading.Thread(target=ask, args=(server, replies, data, headers)))
        asked[-1].start()
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 2 + len(asked), what="one who waits")
    asker(large)
    time.sleep(0.1)
    held = server.metrics()["kld_staging_bytes"]
    for _ in range(4):
        asker(small)
    time.sleep(0.3)
    assert not replies and server.metrics()["kld_staging_bytes"] < held + 4 * 1000  # JSON alone
    first.close()
    for one in asked:
        one.join()
    assert [reply[0] for reply in replies] == [200] * 5
    second.close()
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="free staging")


def held_by_uploads(server, count, size):
    """Uploads that began and send no more; each holds its pieces."""
    host, port = server.address.rsplit(":", 1)
    connections = [socket.create_connection((host, int(port)), 60) for _ in range(count)]
    for i, one in enumerate(connections):
        one.sendall(f"PUT /v2/tensors/t{i}?datatype=FP32&shape=1,{size // 4} HTTP/1.1\r\nHost: localhost\r\n"
                    f"Content-Length: {size}\r\n\r\n".encode() + bytes(1000))
    wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == count, what="the uploads")
    wait_until(lambda: server.metrics()["kld_staging_bytes"] > 12 << 20, what="full staging")
    return connections


def chunked(data, piece):
    for i in range(0, len(data), piece):
        yield data[i:i + piece]


@pytest.mark.parametrize("how", ["binary", "json", "chunked"])
def test_little_json_waits_for_large_memory(make_server, how):
    """That its own JSON is all there is among the small ranges does not mean that it would wait for itself."""
    server = make_server(staging_bytes_max="16M", http_slow_ms=120000)
    q, replies = probabilities((1, 25000), 31).round(3), []
    headers, data = oip.body({"predictions": q, "targets": q}, None, None, how == "binary")
    uploads = held_by_uploads(server, 4, 16000000)

    def post():
        replies.append(server.request(INFER, chunked(data, 8192) if how == "chunked" else data, headers))
    asker = threading.Thread(target=post)
    asker.start()
    wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 5, what="the request")
    time.sleep(0.3)
    assert not replies
    for one in uploads:
        one.close()
    asker.join()
    assert replies[0][0] == 200, replies
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="free staging")


def test_large_json_together(make_server):
    """Bodies whose JSON, all of it together, fills staging: they go one after the other, not all at once never."""
    server = make_server(staging_bytes_max="16M", http_deadline_ms=20000)
    q, replies = np.full((1, 500000), 0.5, "<f4"), []
    headers, data = oip.body({"predictions": q, "targets": q}, None, None, False)
    assert 4 << 20 < len(data) < 6 << 20
    askers = [threading.Thread(target=ask, args=(server, replies, data, headers)) for _ in range(4)]
    begin = time.monotonic()
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert [reply[0] for reply in replies] == [200] * 4, [reply[2][:200] for reply in replies]
    assert time.monotonic() - begin < 18 or is_sanitized()
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="free staging")


@pytest.mark.parametrize("leave", [True, False])
def test_an_upload_waits_for_staging(make_server, leave):
    server = make_server(http_deadline_ms=20000 if leave else 600, **FULL)
    first, second = filled(server, probabilities((100, 300), 26))
    replies, q = [], probabilities((250, 200), 27)
    path = "/v2/tensors/a?datatype=FP32&shape=250,200"
    begin = time.monotonic()
    put = threading.Thread(target=lambda: replies.append(server.request(path, q.tobytes(), method="PUT")))
    put.start()
    wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 3 or replies and not leave, what="the upload")
    if leave:
        time.sleep(0.2)
        assert not replies
        first.close()
    put.join()
    status, headers, body = replies[0]
    if leave:
        assert status == 200, body
        assert server.request("/v2/tensors/a", method="DELETE")[0] == 200
    else:
        assert status == 503 and headers["Retry-After"] and b"staging" in body
        assert 0.5 < time.monotonic() - begin < 60
        assert server.json("/v2/tensors") == (200, [])
    first.close()
    second.close()
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == server.metrics()[POOL] == 0, what="free memory")


@unless_late
def test_a_deadline_is_one_moment(make_server):
    """What a request waited for before does not give it more time for what it waits for next: 4 s, and not 6."""
    server = make_server(**FULL)
    connections = filled(server, probabilities((100, 300), 28))
    q, replies = probabilities((80, 80), 29, "<f8").round(3), []
    headers, data = oip.body({"predictions": q, "targets": q}, None, {"timeout": 4000000}, False)
    worker = server.child("worker")
    suspend(worker)
    begin = time.monotonic()
    try:
        asker = threading.Thread(target=ask, args=(server, replies, data, headers))
        asker.start()
        wait_until(lambda: server.metrics()["kld_http_received_bytes_total"] > 565000, what="the request")
        time.sleep(2)
        for one in connections:
            one.close()
        asker.join()
        took = time.monotonic() - begin
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="free staging")
    if replies[0][0] != 408 or took > 5.9:
        raise Late(replies, took)
    assert took > 3.9


# ---- What breaks off ------------------------------------------------------------------------------

def clean(server, base):
    metrics = server.metrics()
    return metrics["kld_staging_bytes"] == metrics[POOL] == \
        metrics["kld_http_requests_in_flight"] == 0 and fds_of(server.child("gateway")) <= base + 1


def test_clients_that_leave(make_server):
    """In the middle of the upload, of the kernel, of the reply."""
    server = make_server(**SMALL)
    q, p = probabilities(SHAPE, 15), probabilities(SHAPE, 16)
    headers, data = oip.body({"predictions": q, "targets": p}, {"grad_predictions": {"binary_data": True}})
    host, port = server.address.rsplit(":", 1)
    head = head_of(headers, data)

    def leave():
        for part, taken in [(0.1, 0), (0.5, 0), (0.99, 0), (1, 0), (1, 1), (1, 100000)]:
            with socket.create_connection((host, int(port)), 60) as connection:
                connection.sendall(head + data[:int(part * len(data))])
                if taken:
                    assert connection.recv(taken)
    leave()
    with Flat(server):
        for _ in range(3):
            leave()
    infer(server, {"predictions": q, "targets": p})


def test_a_worker_lost_in_the_middle_of_an_upload(make_server):
    """What was uploaded is gone with it: 503, ask again; and then it works."""
    server = make_server(**SMALL)
    q, p = probabilities(SHAPE, 17), probabilities(SHAPE, 18)
    headers, data = oip.body({"predictions": q, "targets": p}, {"grad_predictions": {"binary_data": True}})
    infer(server, {"predictions": q, "targets": p})
    base, refused = fds_of(server.child("gateway")), 0
    for part in (0.1, 0.6, 1):
        with Connection(server) as connection:
            http = connection.http
            http.putrequest("POST", INFER)
            http.putheader("Content-Length", str(len(data)))
            for name, value in headers.items():
                http.putheader(name, value)
            http.endheaders()
            cut = int(part * len(data)) - 1000
            http.send(data[:cut])
            wait_until(lambda: server.metrics()[POOL] > 0, what="the upload")
            server.kill_child("worker")
            try:
                http.send(data[cut:])
            except OSError:
                pass
            reply = http.getresponse()
            body = reply.read()
            if reply.status == 200:  # on a busy machine no byte had gone to that worker, and the next one has them all
                close(oip.parse(reply.headers, body)[1]["grad_predictions"], oip.expected(q, p)["grad_predictions"], "FP32")
            else:
                assert reply.status == 503 and reply.headers["Retry-After"] and json.loads(body)["error"], body
                refused += 1
        assert server.child("worker")  # the next one: from now on readiness is not the last one's
        wait_until(lambda: server.request("/v2/health/ready")[0] == 200, what="the next worker")
        _, got = infer(server, {"predictions": q, "targets": p})
        close(got["loss"], oip.expected(q, p)["loss"], "FP32")
    assert refused
    wait_until(lambda: clean(server, base), 20, "a clean server")


def test_more_than_the_pool_has(make_server):
    server = make_server(pool_bytes_max="4M", **SMALL)
    q = probabilities(SHAPE, 19)
    headers, data = oip.body({"predictions": q, "targets": q})
    status, reply_headers, body = server.request(INFER, data, headers)
    assert status == 413 and "pool_bytes_max" in json.loads(body)["error"], body
    close(infer(server, {"predictions": q[:90], "targets": q[:90]})[1]["loss"], np.zeros(1), "FP32")


def test_a_full_pool_makes_callers_wait(make_server):
    """Until a buffer is dropped; at the deadline 503."""
    server = make_server(pool_bytes_max="10M", http_deadline_ms=20000, **SMALL)
    q, replies = probabilities((1000, 800), 32), []
    headers, data = oip.body({"predictions": q, "targets": q})
    path = "/v2/tensors/a?datatype=FP32&shape=2000,1000"
    assert server.heard(path, bytes(8000000), method="PUT")[0] == 200
    late, late_data = oip.body({"predictions": q, "targets": q}, None, {"timeout": 500000})
    begin = time.monotonic()
    status, reply_headers, body = server.request(INFER, late_data, late)
    assert status == 503 and reply_headers["Retry-After"] and b"pool was in use" in body, body
    assert 0.4 < time.monotonic() - begin < 15
    askers = [threading.Thread(target=ask, args=(server, replies, data, headers)) for _ in range(3)]
    for asker in askers:
        asker.start()
    time.sleep(0.5)
    assert not replies
    assert server.request("/v2/tensors/a", method="DELETE")[0] == 200
    for asker in askers:
        asker.join()
    assert [reply[0] for reply in replies] == [200] * 3, [reply[2][:200] for reply in replies]
    wait_until(lambda: server.metrics()[POOL] == 0, what="a free pool")


def test_who_never_fits_is_in_nobodys_way(make_server):
    """He is told so at once, also where others wait for room."""
    server = make_server(pool_bytes_max="10M", http_deadline_ms=20000, **SMALL)
    q, large, replies = probabilities((1000, 800), 32), probabilities((2000, 800), 33), []
    headers, data = oip.body({"predictions": q, "targets": q})
    assert server.heard("/v2/tensors/a?datatype=FP32&shape=2000,1000", bytes(8000000), method="PUT")[0] == 200
    askers = [threading.Thread(target=ask, args=(server, replies, data, headers)) for _ in range(2)]
    askers[0].start()
    wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1, what="who waits")
    time.sleep(0.5)
    large_headers, large_data = oip.body({"predictions": large, "targets": large})
    status, _, body = server.request(INFER, large_data, large_headers)
    assert status == 413 and b"pool_bytes_max" in body and not replies, body
    askers[1].start()
    time.sleep(0.2)
    assert not replies and server.request("/v2/tensors/a", method="DELETE")[0] == 200
    for asker in askers:
        asker.join()
    assert [reply[0] for reply in replies] == [200] * 2


def test_what_is_kept_is_in_nobodys_way(make_server):
    """A buffer that was used is kept for a moment; who needs another size gets its memory."""
    server = make_server(pool_bytes_max="10M", keep_buffer_ms=60000, http_deadline_ms=3000, **SMALL)
    q = probabilities((280, 1000), 30)
    infer(server, {"predictions": q, "targets": q})  # 2.2 MB
    wait_until(lambda: server.metrics()[KEPT] > 2e6, what="a buffer that is kept")
    for rows in (500, 2400):
        q = probabilities((rows, 1000), 31)
        status, _, body = server.heard(f"/v2/tensors/a?datatype=FP32&shape={rows},1000", q.tobytes(), method="PUT")
        assert status == 200, body
        assert server.request("/v2/tensors/a", method="DELETE")[0] == 200
    wait_until(lambda: server.metrics()[POOL] == server.metrics()[KEPT], what="a pool that is free but for what is kept")


def pool_region(server, size):
    """Status of a client of the Unix socket that wants so much of the device's pool; 0: it got it."""
    with wire.Client(server.unix) as client:
        try:
            client.region_add(3, size)
            return 0
        except wire.Failed as error:
            return error.status


def test_what_is_kept_refuses_no_unix_client(make_server):
    """He waits for it; but not for what will not come, be it that it is no help or that the gateway hangs."""
    server = make_server(pool_bytes_max="64M", client_pool_bytes_max="1G", keep_buffer_ms=60000, user_share=100, **SMALL)
    q, gateway = probabilities((1000, 1000), 33), server.child("gateway")

    def keeps():
        infer(server, {"predictions": q, "targets": q})  # 8 MB
        wait_until(lambda: server.metrics()[KEPT] or not server.metrics()[POOL], what="a buffer that is kept")

    def has_room():
        """A busy gateway may need longer than the worker waits for it; at once nobody is refused."""
        begin = time.monotonic()
        status = pool_region(server, 60 << 20)
        assert status == 0 or time.monotonic() - begin > 0.9, status
        return status == 0
    for _ in range(3):
        keeps()
        wait_until(has_room, what="room in the pool")
    keeps()
    assert pool_region(server, 65 << 20) == "no_memory"
    suspend(gateway)
    try:
        assert pool_region(server, 60 << 20) in (0, "no_memory")
    finally:
        os.kill(gateway, signal.SIGCONT)
    wait_until(lambda: server.metrics()[POOL] == server.metrics()[KEPT], what="a pool that is free but for what is kept")


def test_a_deadline_of_a_bulk_request(make_server):
    server = make_server(http_deadline_ms=2500, **SMALL)
    q = probabilities(SHAPE, 20)
    warm_up(server, *reversed(oip.body({"predictions": q, "targets": q})))
    headers, data = oip.body({"predictions": q, "targets": q}, None, {"timeout": 1500000})
    received = server.metrics()["kld_http_received_bytes_total"]
    base, worker = fds_of(server.child("gateway")), server.child("worker")
    with Connection(server) as connection:
        connection.http.putrequest("POST", INFER)
        connection.http.putheader("Content-Length", str(len(data)))
        for name, value in headers.items():
            connection.http.putheader(name, value)
        connection.http.endheaders(data[:-1])
        wait_until(lambda: server.metrics()["kld_http_received_bytes_total"] >= received + 2 * q.nbytes,
                   what="the upload")
        time.sleep(0.1)
        suspend(worker)
        try:
            connection.http.send(data[-1:])
            status = connection.http.getresponse().status
        finally:
            os.kill(worker, signal.SIGCONT)
    assert status == 408
    wait_until(lambda: clean(server, base), 20, "a clean server")


def test_stop_in_the_middle(make_server):
    server = make_server(drain_ms=300, **SMALL)
    q = probabilities(SHAPE, 21)
    headers, data = oip.body({"predictions": q, "targets": q})
    with Connection(server) as connection:
        connection.http.putrequest("POST", INFER)
        connection.http.putheader("Content-Length", str(len(data)))
        for name, value in headers.items():
            connection.http.putheader(name, value)
        connection.http.endheaders(data[:len(data) // 2])
        wait_until(lambda: server.metrics()[POOL] > 0, what="the upload")
        assert server.stop() == 0


def test_several_devices(make_server):
    """Each has a pool; requests take turns, or go where they are told to."""
    server = make_server(device="0,0", **SMALL)
    q, p = probabilities(SHAPE, 22), probabilities(SHAPE, 23)
    for device in (0, 1, 1, None, None):
        _, got = infer(server, {"predictions": q, "targets": p}, None,
                       None if device is None else {"device": device})
        close(got["loss"], oip.expected(q, p)["loss"], "FP32")
    metrics = server.metrics()
    ran = [metrics[f'kld_requests_total{{front="unix",worker="{i}",status="ok"}}'] for i in range(2)]
    assert sum(ran) >= 5 and ran[0] >= 2 and ran[1] >= 3
