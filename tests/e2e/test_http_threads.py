"""Several HTTP loops: each has its share of the connections, and what callers keep is the same on all."""
import json
import os
import pathlib
import re
import signal
import socket
import threading

import numpy as np
import pytest

import oip
from conftest import suspend, wait_until
from httplib import Shared, close, fds_of, is_sanitized, probabilities, register, unregister
from oip import INFER

LOOPS = 3


def connect(server):
    host, port = server.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 60)


def watched(gateway):
    """How many descriptors each epoll instance of a process watches."""
    found = []
    for entry in pathlib.Path(f"/proc/{gateway}/fdinfo").iterdir():
        try:
            found.append(entry.read_text().count("tfd:"))
        except FileNotFoundError:
            pass
    return sorted(found)[-LOOPS:]


def ask_all(server, request, clients=24, times=10):
    """The answers to a request of many connections at a time."""
    answers, errors = [], []

    def client():
        try:
            with oip.Connection(server) as connection:
                answers.extend(connection.ask("POST", INFER, *request) for _ in range(times))
        except Exception as error:  # noqa: BLE001 - told below
            errors.append(error)
    clients = [threading.Thread(target=client) for _ in range(clients)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    assert not errors, errors[0]
    return answers


@pytest.fixture
def server(make_server):
    return make_server(http_threads=LOOPS, shm_prefix="/kld-test-", http_deadline_ms=0)


def test_each_loop_has_its_share(server):
    gateway = server.child("gateway")
    wait_until(lambda: server.log().count("worker connected") == LOOPS, what="every loop's link")
    open_before = fds_of(gateway)
    connections = [connect(server) for _ in range(30 * LOOPS)]
    wait_until(lambda: server.metrics()["kld_http_connections"] == len(connections) + 1, what="all of them")
    assert all(30 <= count <= 32 for count in watched(gateway)), watched(gateway)
    for one in connections:
        one.close()
    wait_until(lambda: fds_of(gateway) <= open_before + 1, what="closed descriptors")


def test_answers_are_the_same_on_all(server):
    q, p = probabilities((7, 33), 1), probabilities((7, 33), 2)
    truth = oip.expected(q, p)
    headers, data = oip.body({"predictions": q, "targets": p}, {"loss": {"binary_data": True},
                                                                 "grad_predictions": {"binary_data": True}})
    answers = ask_all(server, (data, headers))
    assert len(answers) == 240
    bodies = {body for _, _, body in answers}
    assert {status for status, _, _ in answers} == {200} and len(bodies) == 1
    outputs = oip.parse(answers[0][1], answers[0][2])[1]
    close(outputs["loss"], np.reshape(truth["loss"], (1,)), "FP32")
    statistics = server.json("/v2/models/kl_div/stats")[1]["model_stats"][0]
    assert statistics["inference_count"] == 240

    def nothing_is_left():  # the last answer may be there before its loop has counted it
        metrics = server.metrics()
        return metrics["kld_http_requests_in_flight"] == metrics["kld_staging_bytes"] == 0
    wait_until(nothing_is_left, what="the end of the last request")


def test_what_one_connection_stores_all_can_use(server):
    q, p = probabilities((300, 100), 3), probabilities((300, 100), 4)
    status = server.heard("/v2/tensors/teacher?datatype=FP32&shape=300,100", p.tobytes(), method="PUT")[0]
    assert status == 200
    with Shared(q.nbytes) as shared:
        shared.map[:q.nbytes] = q.tobytes()
        assert register(server, "student", shared, q.nbytes)[0] == 200
        request = json.dumps({"inputs": [
            {"name": "predictions", "shape": [300, 100], "datatype": "FP32",
             "parameters": {"shared_memory_region": "student", "shared_memory_byte_size": q.nbytes}},
            {"name": "targets", "shape": [300, 100], "datatype": "FP32",
             "parameters": {"stored_tensor": "teacher"}}]}).encode()
        answers = ask_all(server, (request, {}))
        assert {status for status, _, _ in answers} == {200}, answers[0]
        assert len({body for _, _, body in answers}) == 1
        assert unregister(server) == 200
    assert server.request("/v2/tensors/teacher", method="DELETE")[0] == 200


def test_the_limits_are_for_all_loops_together(make_server):
    server = make_server(http_threads=LOOPS, http_requests_max=2, http_connections_max=7)
    worker = server.child("worker")
    q = probabilities((2, 8), 5)
    headers, data = oip.body({"predictions": q, "targets": q})
    head = [f"POST {INFER} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
    text = "\r\n".join(head + [f"{k}: {v}" for k, v in headers.items()] + ["", ""]).encode() + data
    suspend(worker)
    try:
        connections = [connect(server) for _ in range(6)]
        for one in connections:
            one.sendall(text)
        # Two are computed; the other four are refused, whichever loop they came to.
        wait_until(lambda: server.metrics()['kld_requests_total{front="http",status="busy"}'] == 4,
                   what="four that are refused")
    finally:
        os.kill(worker, signal.SIGCONT)
    answers = sorted(one.recv(12) for one in connections)
    assert answers == [b"HTTP/1.1 200"] * 2 + [b"HTTP/1.1 503"] * 4
    # Six of seven connections are taken: the seventh is, the eighth waits for another to go.
    waiting = [connect(server) for _ in range(2)]
    for one in waiting:
        one.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert waiting[0].recv(12) == b"HTTP/1.1 200"
    waiting[1].settimeout(0.3)
    with pytest.raises(TimeoutError):
        waiting[1].recv(12)
    connections.pop().close()
    waiting[1].settimeout(20)
    assert waiting[1].recv(12) == b"HTTP/1.1 200"
    for one in connections + waiting:
        one.close()


def test_stop_while_connections_of_all_loops_wait(make_server):
    server = make_server(http_threads=LOOPS, http_requests_max=200, drain_ms=300)
    worker, gateway = server.child("worker"), server.child("gateway")
    q = probabilities((2, 8), 6)
    headers, data = oip.body({"predictions": q, "targets": q})
    head = [f"POST {INFER} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
    text = "\r\n".join(head + [f"{k}: {v}" for k, v in headers.items()] + ["", ""]).encode() + data
    connections = [connect(server) for _ in range(120)]
    suspend(worker)
    try:
        for one in connections:
            one.sendall(text)
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 120, what="all of them")
        os.kill(gateway, signal.SIGTERM)
        answers = {one.recv(12) for one in connections}
    finally:
        os.kill(worker, signal.SIGCONT)
    assert answers == {b"HTTP/1.1 503"}
    for one in connections:
        one.close()
    told = wait_until(lambda: [line for line in server.log().splitlines() if f"child_pid={gateway} status=" in line],
                      20, "the end of the gateway")
    assert "status=0" in told[0], told


@pytest.mark.parametrize("own", [None, "glibc.malloc.arena_max=8"])
def test_memory_of_connections_in_large_pages(make_server, own):
    server = make_server(environment={"GLIBC_TUNABLES": own} if own else None)

    def setting(role):
        # As glibc reads it, before 2.39, it puts a NUL in the place of each colon.
        text = pathlib.Path(f"/proc/{server.child(role)}/environ").read_text().replace("\0", ":")
        return re.findall(r"\bGLIBC_TUNABLES=(glibc\.[^:]*(?::glibc\.[^:]*)*)", text)
    assert setting("gateway") == [own or "glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=128"]
    assert setting("worker") == ([own] if own else [])
    modes = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not is_sanitized() and modes.is_file() and "[madvise]" in modes.read_text():
        heap = pathlib.Path(f"/proc/{server.child('gateway')}/smaps").read_text().split("[heap]")[1]
        assert (" hg" in heap.split("VmFlags:")[1].splitlines()[0]) == (own is None)
