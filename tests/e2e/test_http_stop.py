"""The gateway is told to stop while something of HTTP is on its way to or from a worker that does not
answer: it ends by itself, and nothing of it is used after it was freed."""
import os
import re
import signal
import socket
import threading
import time

import pytest

import oip
from conftest import suspend, wait_until
from httplib import probabilities
from oip import INFER, infer

SMALL = {"staging_bytes_max": "4M", "staging_request_bytes_max": "1M", "drain_ms": 300, "http_threads": 3}
POOL = 'kld_pool_bytes{worker="0"}'


def head_of(method, path, data, headers):
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
    return "\r\n".join(lines + [f"{k}: {v}" for k, v in headers.items()] + ["", ""]).encode()


def connect(server):
    host, port = server.address.rsplit(":", 1)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    return connection


def ended_well(server, gateway):
    """By itself, with status 0."""
    told = wait_until(lambda: re.search(rf".*child_pid={gateway} (signal|status)=.*", server.log()), 20,
                      "the end of the gateway").group()
    assert "child exited" in told and "status=0" in told, told


def stop_gateway(server):
    """SIGTERM to the gateway alone."""
    gateway = server.child("gateway")
    os.kill(gateway, signal.SIGTERM)
    ended_well(server, gateway)


@pytest.mark.parametrize("bulk", [False, True])
def test_while_an_upload_is_on_its_way(make_server, bulk):
    server = make_server(**SMALL)
    q = probabilities((1000, 1003), 41)
    infer(server, {"predictions": q, "targets": q})  # the pool has its worker now
    wait_until(lambda: server.metrics()[POOL] == 0, what="a free pool")
    headers, data = oip.body({"predictions": q, "targets": q}) if bulk else ({}, q.tobytes())
    head = head_of("POST", INFER, data, headers) if bulk else \
        head_of("PUT", "/v2/tensors/a?datatype=FP32&shape=1000,1003", data, {})
    worker = server.child("worker")
    with connect(server) as connection:
        connection.sendall(head + data[:1000])
        wait_until(lambda: server.metrics()[POOL] > 0, what="its buffer")
        before = server.metrics()["kld_http_received_bytes_total"]
        suspend(worker)
        try:
            connection.sendall(data[1000:200000])
            wait_until(lambda: server.metrics()["kld_http_received_bytes_total"] > before + 150000,
                       what="a piece on its way")
            stop_gateway(server)
        finally:
            os.kill(worker, signal.SIGCONT)


def test_while_a_reply_waits_for_its_next_piece(make_server):
    server = make_server(**SMALL)
    q = probabilities((1000, 4000), 42)
    headers, data = oip.body({"predictions": q, "targets": q}, {"grad_predictions": {"binary_data": True}})
    worker = server.child("worker")
    with connect(server) as connection:
        connection.sendall(head_of("POST", INFER, data, headers) + data)
        assert connection.recv(1)
        suspend(worker)
        try:
            connection.settimeout(0.5)
            got = 0
            with pytest.raises(TimeoutError):
                while got < q.nbytes:
                    got += len(connection.recv(1 << 20))
            stop_gateway(server)
        finally:
            os.kill(worker, signal.SIGCONT)


def test_a_silent_worker_holds_up_all_at_once(make_server):
    """The pool waits 2 s for a worker that does not answer: once, not for each of those who ask."""
    server = make_server(**SMALL)
    q = probabilities((100, 1000), 43)
    worker, took = server.child("worker"), []

    def put(name):
        begin = time.monotonic()
        status = server.request(f"/v2/tensors/{name}?datatype=FP32&shape=100,1000", q.tobytes(), method="PUT")[0]
        took.append((status, time.monotonic() - begin))
    suspend(worker)
    try:
        askers = [threading.Thread(target=put, args=(name,)) for name in "abcdef"]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
    finally:
        os.kill(worker, signal.SIGCONT)
    assert all(status == 503 and seconds < 5 for status, seconds in took), took
    wait_until(lambda: server.request("/v2/tensors/a?datatype=FP32&shape=100,1000", q.tobytes(),
                                      method="PUT")[0] == 200, what="the worker")


@pytest.mark.parametrize("whole", [False, True], ids=["the gateway", "the server"])
def test_while_a_thousand_are_suspended(make_server, whole):
    """Each is told, and nobody had to be killed."""
    server = make_server(**{**SMALL, "staging_bytes_max": "64M", "http_requests_max": 2000, "drain_ms": 1500,
                            "http_deadline_ms": 60000})
    q = probabilities((2, 3), 44)
    infer(server, {"predictions": q, "targets": q})
    headers, data = oip.body({"predictions": q, "targets": q})
    request = head_of("POST", INFER, data, headers) + data
    worker, gateway = server.child("worker"), server.child("gateway")
    suspend(worker)
    connections = []
    try:
        for _ in range(1000):
            connections.append(connect(server))
            connections[-1].sendall(request)
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1000, 30, "a thousand requests")
        os.kill(server.pid if whole else gateway, signal.SIGTERM)
        answers = {connection.recv(12) for connection in connections}
        assert answers == {b"HTTP/1.1 503"}
    finally:
        os.kill(worker, signal.SIGCONT)
        for connection in connections:
            connection.close()
    ended_well(server, gateway)
    if whole:
        assert server.stop() == 0
        assert not re.search("drain time over|child died", server.log()), server.log()
    else:
        wait_until(lambda: server.request("/v2/health/ready")[0] == 200, what="the next gateway")
        infer(server, {"predictions": q, "targets": q})
