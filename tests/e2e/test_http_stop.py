"""The gateway is told to stop while something of HTTP is on its way to or from a worker that does not
answer: it ends by itself, and nothing of it is used after it was freed."""
import contextlib
import hashlib
import os
import pathlib
import re
import signal
import socket
import threading
import time

import pytest

import faillib
import oip
from conftest import children_of, settled, suspend, wait_until
from httplib import POOL, PREFIX, Flat, Late, fds_of, is_sanitized, memory_of, probabilities, unless_late
from oip import INFER, infer

SMALL = {"staging_bytes_max": "4M", "staging_request_bytes_max": "1M", "drain_ms": 300, "http_threads": 3}


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


@pytest.mark.parametrize("connected", [False, True])
def test_a_silent_worker_holds_up_all_at_once(make_server, connected):
    """The pool waits worker_wait_ms for a worker that does not answer: once, not for each of those who ask."""
    server = make_server(**SMALL, worker_wait_ms=2000)
    q = probabilities((100, 1000), 43)
    worker, took = server.child("worker"), []

    def put(name):
        begin = time.monotonic()
        status, _, said = server.request(f"/v2/tensors/{name}?datatype=FP32&shape=100,1000", q.tobytes(), method="PUT")
        took.append((status, said, time.monotonic() - begin))
    if connected:  # the thread that asks the worker
        assert server.heard("/v2/tensors/first?datatype=FP32&shape=2,2", bytes(16), method="PUT")[0] == 200
    suspend(worker)
    try:
        askers = [threading.Thread(target=put, args=(name,)) for name in "abcdefghijkl"]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
    finally:
        os.kill(worker, signal.SIGCONT)
    assert all(status == 503 and seconds < 20 for status, _, seconds in took), took  # one behind another: 24
    assert all(b"the worker is not ready; try again" in said for _, said, _ in took), took
    wait_until(lambda: server.request("/v2/tensors/a?datatype=FP32&shape=100,1000", q.tobytes(),
                                      method="PUT")[0] == 200, what="the worker")


def test_a_worker_that_stands_still_for_a_while_is_waited_for(make_server):
    """As a busy host may let it: for less than worker_wait_ms, to greet the thread that asks and to make the buffer."""
    server = make_server(**SMALL)
    q = probabilities((100, 1000), 43)
    for name in "ab":
        replies, worker = [], server.child("worker")
        asker = threading.Thread(target=lambda: replies.append(server.request(
            f"/v2/tensors/{name}?datatype=FP32&shape=100,1000", q.tobytes(), method="PUT")[0]))
        suspend(worker)
        try:
            asker.start()
            asker.join(2.5)
        finally:
            os.kill(worker, signal.SIGCONT)
        asker.join()
        assert replies == [200], name


def reply_on(connection, request=b""):
    """(status line, headers) of the next reply, whose body is read, too."""
    connection.sendall(request)
    with connection.makefile("rb", buffering=0) as file:
        status, headers = file.readline().decode(), {}
        while (line := file.readline().decode().strip()):
            name, value = line.split(": ", 1)
            headers[name.lower()] = value
        left = int(headers["content-length"])
        while left:
            left -= len(file.read(left))
    return status.split()[1], headers


@pytest.mark.parametrize("whole", [False, True])
def test_replies_of_a_drain_are_the_last_of_their_connections(make_server, whole):
    """A connection that was kept would be closed unannounced, whatever its client just sends."""
    server = make_server(**{**SMALL, "drain_ms": 30000})
    q = probabilities((2, 3), 45)
    headers, data = oip.body({"predictions": q, "targets": q})
    request = head_of("POST", INFER, data, headers) + data
    live, ready = (head_of("GET", f"/v2/health/{which}", b"", {}) for which in ("live", "ready"))
    with contextlib.ExitStack() as stack:
        busy, *others = (stack.enter_context(connect(server)) for _ in range(5))
        for connection in [busy, *others]:  # each is kept
            assert "connection" not in reply_on(connection, request)[1]
        worker, gateway = server.child("worker"), server.child("gateway")
        suspend(worker)
        try:
            busy.sendall(request)
            wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1, what="a request in flight")
            os.kill(server.pid if whole else gateway, signal.SIGTERM)
            wait_until(lambda: "gateway: draining" in server.log(), what="the drain")
            for connection, asked, status in zip(others, (live, ready, request, b"GET /nowhere" + live[15:]),
                                                 ("200", "503", "503", "404")):
                got, said = reply_on(connection, asked)
                assert (got, said.get("connection")) == (status, "close"), (got, said)
                assert connection.recv(1) == b""
        finally:
            os.kill(worker, signal.SIGCONT)
        got, said = reply_on(busy)
        assert (got, said.get("connection")) == ("200", "close"), (got, said)
    ended_well(server, gateway)


class Thousand:
    """Requests on a connection each, none of which is answered while the worker is suspended."""
    FLAGS = {**SMALL, "staging_bytes_max": "64M", "http_requests_max": 2000, "token_requests_max": 2000,
             "drain_ms": 1500, "http_deadline_ms": 60000}
    Q = probabilities((2, 3), 44)

    def __init__(self, server, more=None):
        headers, data = oip.body({"predictions": self.Q, "targets": self.Q})
        self.server, self.more, self.connections = server, more, []
        self.request = head_of("POST", INFER, data, {**headers, **(more or {})}) + data
        assert server.request(INFER, data, {**headers, **(more or {})})[0] == 200

    def __enter__(self):
        self.worker = self.server.child("worker")
        suspend(self.worker)
        try:
            for _ in range(1000):
                self.connections.append(connect(self.server))
                self.connections[-1].sendall(self.request)
            wait_until(lambda: self.server.metrics(self.more)["kld_http_requests_in_flight"] == 1000, 30,
                       "a thousand requests")
        except BaseException:
            self.__exit__()
            raise
        return self

    def answers(self):
        """None of one that was reset."""
        found = set()
        for connection in self.connections:
            try:
                found.add(connection.recv(12))
            except ConnectionResetError:
                found.add(None)
        return found

    def __exit__(self, *ignored):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker, signal.SIGCONT)
        for connection in self.connections:
            connection.close()
        self.connections = []


def exists(pid):
    return pathlib.Path(f"/proc/{pid}").exists()


def ours_in_shm():
    """Names of shared memory that no test and none of its clients gave."""
    return {name for name in os.listdir("/dev/shm") if "kld" in name and not name.startswith(PREFIX[1:])}


@unless_late
def test_the_server_stops_while_a_thousand_are_suspended(make_server):
    """Each is told, nobody had to be killed, and nothing is left: no process, no file, no shared memory."""
    server, shm = make_server(**Thousand.FLAGS), ours_in_shm()
    folder, roles = server.folder, {"server": server.pid, **children_of(server.pid)}
    assert set(roles) == {"server", "gateway", "worker"} and "kld.sock" in os.listdir(folder)
    with Thousand(server) as thousand:
        os.kill(server.pid, signal.SIGTERM)
        answers = thousand.answers()
    assert server.stop() == 0
    if "drain time over" in server.log():  # 5 s beyond drain_ms: without a processor for so long
        raise Late
    assert answers == {b"HTTP/1.1 503"}
    ended_well(server, roles["gateway"])
    assert "child died" not in server.log(), server.log()
    assert not [role for role, pid in roles.items() if exists(pid)]
    assert os.listdir(folder) == ["log"] and ours_in_shm() <= shm
    with pytest.raises(ConnectionRefusedError):
        connect(server)


def test_a_gateway_stops_while_a_thousand_are_suspended(make_server):
    """Each is told, the next gateway serves, and who outlives it keeps nothing: not its staging, not a descriptor."""
    page = faillib.counting()
    server = make_server(environment=page and page.environment(), **Thousand.FLAGS)
    gateways, held, pids, first = [], [], (server.pid, server.child("worker")), None

    def fds():
        return {pid: fds_of(pid) for pid in pids}
    for _ in range(4):
        with Thousand(server) as thousand:
            gateways.append(server.child("gateway"))
            os.kill(gateways[-1], signal.SIGTERM)
            assert thousand.answers() == {b"HTTP/1.1 503"}
        ended_well(server, gateways[-1])
        wait_until(lambda: server.child("gateway") not in gateways and server.request("/v2/health/ready")[0] == 200,
                   what="the next gateway")
        infer(server, {"predictions": Thousand.Q, "targets": Thousand.Q})
        wait_until(lambda: server.metrics()[POOL] == 0 and server.metrics()["kld_staging_bytes"] == 0, what="rest")
        first = first or settled(fds)
        wait_until(lambda: fds() == first, what=f"no more descriptors than {first}")
        held.append({pid: (memory_of(pid), page.read(role)["blocks"] if page else 0)
                     for role, pid in zip(("supervisor", "worker"), pids)})
    assert thousand.worker == pids[1]
    assert not [pid for pid in gateways if exists(pid)]
    for pid in held[0]:  # the first one takes what an allocator keeps
        memory, blocks = zip(*(each[pid] for each in held))
        assert blocks[-1] <= blocks[0] + 2, blocks
        for kind in ("own", "shared"):
            assert is_sanitized() or memory[-1][kind] - memory[0][kind] < 2 << 20, (kind, memory)


def test_a_reload_while_a_thousand_are_suspended(make_server, tmp_path):
    """All are answered, by the same gateway, and it keeps nothing of them."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"one {hashlib.sha256(b'word-of-one').hexdigest()} infer,metrics\n")
    page, one = faillib.counting(), {"Authorization": "Bearer word-of-one"}
    server = make_server(tokens=tokens, environment=page and page.environment(), **Thousand.FLAGS)

    def once():
        before = server.log().count("supervisor: reloaded")
        with Thousand(server, one) as thousand:
            os.kill(server.pid, signal.SIGHUP)
            wait_until(lambda: server.log().count("supervisor: reloaded") > before, 30, "a reload")
            os.kill(thousand.worker, signal.SIGCONT)
            assert thousand.answers() == {b"HTTP/1.1 200"}
    for _ in range(3):
        once()
    with Flat(server, headers=one, page=page):
        for _ in range(3):
            once()
