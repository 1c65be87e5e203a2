"""HTTP when something ends: clients that leave, deadlines, a killed worker or gateway, the drain, limits.
Nothing is left behind, and what was asked is answered."""
import contextlib
import http.client
import json
import os
import pathlib
import re
import resource
import signal
import socket
import ssl
import threading
import time

import pytest

import oip
from conftest import children_of, suspend, wait_until
from httplib import PREFIX, Pace, Shared, certificates, close, fds_of, probabilities, register, tls_flags  # noqa: F401
from httplib import unless_late, unregister
from oip import INFER, Connection, infer


def test_nothing_is_left_behind(make_server):
    server = make_server(shm_prefix=PREFIX)
    pid = server.child("gateway")
    q, p = probabilities((50, 100), 27), probabilities((50, 100), 28)
    infer(server, {"predictions": q, "targets": p})
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="free staging")
    base = fds_of(pid)
    headers, data = oip.body({"predictions": q, "targets": p}, {"grad_predictions": {"binary_data": True}})
    host, port = server.address.rsplit(":", 1)
    head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n" + \
        "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"
    for end in (5, 200, len(data) // 2, len(data) - 1, len(data)):
        for _ in range(10):
            with socket.create_connection((host, int(port)), 60) as connection:
                connection.sendall(head.encode() + data[:end])
    for wrong in (b"{}", b"[", b"\xff", data):
        server.request(INFER, wrong)
    with Shared(4096) as shared:
        for _ in range(10):
            register(server, "r", shared, 4096)
            unregister(server)
    infer(server, {"predictions": q, "targets": p})

    def clean():
        metrics = server.metrics()
        return metrics["kld_staging_bytes"] == 0 and metrics["kld_http_requests_in_flight"] == 0 \
            and metrics["kld_http_regions"] == 0 and fds_of(pid) <= base + 1
    wait_until(clean, what="a clean gateway")


def load(server, data, headers, check, stop, counts, problems):
    while not stop.is_set():
        try:
            with Connection(server) as connection:
                while not stop.is_set():
                    status, reply_headers, body = connection.ask("POST", INFER, data, headers)
                    if status != 200:
                        problems.append((status, body))
                        return
                    check(oip.parse(reply_headers, body)[1])
                    counts.append(time.monotonic())
        except Exception as problem:  # noqa: BLE001 - told by the main thread
            problems.append(problem)
            return


def test_killed_worker_under_load(make_server):
    """Every request is answered rightly; the callers see a slower answer, not an error."""
    server = make_server()
    q, p = probabilities((64, 1000), 29), probabilities((64, 1000), 30)
    asked = {"loss": {"binary_data": True}, "grad_predictions": {"binary_data": True}}
    headers, data = oip.body({"predictions": q, "targets": p}, asked)
    _, truth = infer(server, {"predictions": q, "targets": p}, asked)

    def check(got):
        for name, value in truth.items():
            assert got[name].tobytes() == value.tobytes(), name

    stop, counts, problems = threading.Event(), [], []
    threads = [threading.Thread(target=load,
                                args=(server, data, headers, check, stop, counts, problems))
               for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        before = len(counts)
        wait_until(lambda: problems or len(counts) > before + 20, 60, "answers")
        suspend(server.child("worker"))  # so that it dies with work in flight
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] >= 8, what="requests")
        server.kill_child("worker")
    before = len(counts)
    wait_until(lambda: problems or len(counts) > before + 20, 60, "answers after the last kill")
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems, problems[0]
    metrics = server.metrics()
    assert metrics['kld_worker_restarts_total{worker="0"}'] == 4
    assert metrics["kld_requests_repeated_total"] >= 8
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="free staging")


def test_not_ready_while_the_worker_is_gone(make_server):
    server = make_server()
    for _ in range(6):  # a worker that keeps dying is replaced after a longer and longer pause: 1.6 s
        server.kill_child("worker")

    def is_lost():  # where the next one was there before anybody looked, it dies, too
        with contextlib.suppress(ProcessLookupError):
            if worker := children_of(server.pid).get("worker"):
                os.kill(worker, signal.SIGKILL)
        return server.request("/v2/health/ready")[0] == 503
    wait_until(is_lost, what="the loss to be seen")
    q, p = probabilities((2, 3), 31), probabilities((2, 3), 32)
    _, got = infer(server, {"predictions": q, "targets": p})  # waits for the next worker
    close(got["loss"], oip.expected(q, p)["loss"], "FP32")
    assert server.request("/v2/health/live")[0] == 200
    wait_until(lambda: server.request("/v2/health/ready")[0] == 200, what="readiness")


def test_killed_gateway_is_replaced(make_server):
    server = make_server()
    q, p = probabilities((2, 3), 33), probabilities((2, 3), 34)
    server.kill_child("gateway")
    _, got = infer(server, {"predictions": q, "targets": p})  # the socket was never closed
    close(got["loss"], oip.expected(q, p)["loss"], "FP32")


def stopped_worker_request(server, parameters, replies):
    q, p = probabilities((2, 3), 35), probabilities((2, 3), 36)
    headers, data = oip.body({"predictions": q, "targets": p}, None, parameters)
    replies.append(server.request(INFER, data, headers))


def test_deadline(make_server):
    """The caller is answered; the memory is free only after the worker let go of it."""
    server = make_server(http_deadline_ms=300)

    def is_warm():  # the gateway has its worker now, and that its kernels
        warm = []
        stopped_worker_request(server, {"timeout": 60000000}, warm)
        return warm[0][0] == 200
    wait_until(is_warm, what="an answer in time")
    worker, before = server.child("worker"), server.metrics()["kld_requests_detached_total"]
    suspend(worker)
    try:
        for parameters, least in ((None, 0.25), ({"timeout": 200000}, 0.18), ({"timeout": 60000000}, 0.25)):
            begin, replies = time.monotonic(), []
            stopped_worker_request(server, parameters, replies)
            assert least < time.monotonic() - begin < 20
            assert replies[0][0] == 408 and "deadline" in json.loads(replies[0][2])["error"]
        assert server.metrics()["kld_staging_bytes"] > 0
        assert server.metrics()["kld_requests_detached_total"] == before + 3
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="free staging")


def test_a_result_that_comes_too_late_is_not_given(make_server):
    """However short the time and however quick the result."""
    server, replies = make_server(), []
    for microseconds in (60000000, 1, 60000000):
        stopped_worker_request(server, {"timeout": microseconds}, replies)
    assert [reply[0] for reply in replies] == [200, 408, 200]
    assert "deadline" in json.loads(replies[1][2])["error"]


def test_drain_answers_what_is_in_flight(make_server):
    server = make_server()
    worker, gateway = server.child("worker"), server.child("gateway")
    suspend(worker)
    replies = []
    asker = threading.Thread(target=stopped_worker_request, args=(server, None, replies))
    asker.start()
    wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1, what="the request")
    os.kill(gateway, signal.SIGTERM)
    wait_until(lambda: server.request("/v2/health/ready")[0] == 503, what="not ready")
    stopped_worker_request(server, None, replies)
    assert replies[0][0] == 503 and replies[0][1]["Retry-After"]
    os.kill(worker, signal.SIGCONT)
    asker.join()
    assert replies[1][0] == 200, replies[1]


def test_index_of_what_is_ready(make_server):
    """A model that is not is listed for who does not ask for those alone that are."""
    server, replies = make_server().wait_linked(), []

    def index(body):
        return [model["state"] for model in server.json("/v2/repository/index", body)[1]]
    assert index({"ready": True}) == index({}) == ["READY"]
    worker, gateway = server.child("worker"), server.child("gateway")
    suspend(worker)
    asker = threading.Thread(target=stopped_worker_request, args=(server, None, replies))
    asker.start()
    try:
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1, what="the request")
        os.kill(gateway, signal.SIGTERM)  # it is not ready until that request has ended
        wait_until(lambda: server.request("/v2/health/ready")[0] == 503, what="not ready")
        assert index({"ready": True}) == []
        assert index({"ready": False}) == index({}) == ["UNAVAILABLE"]
        reason = server.json("/v2/repository/index", {})[1][0]["reason"]
        assert reason == "the server is shutting down" and reason in server.json("/v2/health/ready")[1]["error"]
    finally:
        os.kill(worker, signal.SIGCONT)
        asker.join()


def test_drain_has_an_end(make_server):
    server = make_server(drain_ms=300, http_deadline_ms=60000)
    worker, gateway = server.child("worker"), server.child("gateway")
    suspend(worker)
    replies = []
    asker = threading.Thread(target=stopped_worker_request, args=(server, None, replies))
    asker.start()
    try:
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1, what="the request")
        os.kill(gateway, signal.SIGTERM)
        asker.join(20)
        assert replies and replies[0][0] == 503
        wait_until(lambda: not pathlib.Path(f"/proc/{gateway}/fd").exists() or
                   server.child("gateway") != gateway, what="the end of the gateway")
    finally:
        os.kill(worker, signal.SIGCONT)
        asker.join()


def test_limit_of_requests_in_flight(make_server):
    server = make_server(http_requests_max=2)
    worker = server.child("worker")
    suspend(worker)
    replies = []
    askers = [threading.Thread(target=stopped_worker_request, args=(server, None, replies))
              for _ in range(2)]
    try:
        for asker in askers:
            asker.start()
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 2, what="two requests")
        late = []
        stopped_worker_request(server, None, late)
        assert late[0][0] == 503 and late[0][1]["Retry-After"] == "1"
    finally:
        os.kill(worker, signal.SIGCONT)
    for asker in askers:
        asker.join()
    assert [reply[0] for reply in replies] == [200, 200]


def test_who_could_not_be_refused_later_does_not_wait(make_server):
    """One that waited would be told to send its body: MHD says 100 Continue."""
    server = make_server(http_requests_max=1, http_wait_ms=60000)
    worker, replies = server.child("worker"), []
    suspend(worker)
    asker = threading.Thread(target=stopped_worker_request, args=(server, None, replies))
    asker.start()
    try:
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1, what="a request")
        host, port = server.address.rsplit(":", 1)
        client = http.client.HTTPConnection(host, int(port), timeout=20)
        client.putrequest("POST", INFER)
        client.putheader("Content-Length", "9")
        client.putheader("Expect", "100-continue")
        client.endheaders()  # and no byte of the body
        reply = client.getresponse()
        assert (reply.status, reply.getheader("Retry-After")) == (503, "1")
        assert b"in flight" in reply.read()
        client.close()
    finally:
        os.kill(worker, signal.SIGCONT)
        asker.join()
    assert replies[0][0] == 200


def test_who_is_above_the_limit_waits_for_its_turn(make_server):
    """Its body is not read meanwhile; one whose client leaves takes no turn, and SIGTERM refuses those who wait."""
    server = make_server(http_requests_max=2, http_wait_ms=60000)
    worker, gateway = server.child("worker"), server.child("gateway")
    warm = []
    stopped_worker_request(server, None, warm)
    suspend(worker)
    replies = []
    askers = [threading.Thread(target=stopped_worker_request, args=(server, None, replies)) for _ in range(6)]

    def waiting(count):
        wait_until(lambda: server.metrics()["kld_http_requests_waiting"] == count, what=f"{count} that wait")
    try:
        for asker in askers:
            asker.start()
        waiting(4)
        host, port = server.address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), 60) as leaver:
            leaver.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{".encode())
            waiting(5)
        waiting(4)
    finally:
        os.kill(worker, signal.SIGCONT)
    for asker in askers:
        asker.join(60)
    assert [reply[0] for reply in replies] == [200] * 6
    waiting(0)
    suspend(worker)
    askers = [threading.Thread(target=stopped_worker_request, args=(server, None, replies)) for _ in range(4)]
    try:
        for asker in askers:
            asker.start()
        waiting(2)
        os.kill(gateway, signal.SIGTERM)
        wait_until(lambda: len(replies) == 8, what="those who wait being told")
        assert [reply[0] for reply in replies[6:]] == [503, 503]
    finally:
        os.kill(worker, signal.SIGCONT)
    for asker in askers:
        asker.join(60)
    assert [reply[0] for reply in replies[8:]] == [200, 200]


def test_idle_connections_are_closed(make_server):
    server = make_server(http_idle_ms=1000)
    host, port = server.address.rsplit(":", 1)
    begin = time.monotonic()
    with socket.create_connection((host, int(port)), 60) as connection:
        assert connection.recv(1) == b""
        assert 0.5 < time.monotonic() - begin < 20


SLOW_HEAD = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n".encode()


@pytest.mark.parametrize("data", [SLOW_HEAD, SLOW_HEAD + b"\r\n{", b"G"])
def test_a_slow_sender_is_cut_off(make_server, data):
    """Bytes that come now and then do not hold a connection for ever."""
    server = make_server(http_slow_ms=1000, http_slow_bytes="1K")
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 60) as idle:
        took, begin = None, time.monotonic()
        with socket.create_connection((host, int(port)), 60) as connection:
            connection.sendall(data)
            connection.settimeout(0.1)
            while took is None:
                assert time.monotonic() - begin < 60
                try:
                    connection.sendall(b"x")
                    if connection.recv(100) == b"":
                        took = time.monotonic() - begin
                except TimeoutError:
                    pass
                except OSError:
                    took = time.monotonic() - begin
        assert took > 0.9
        idle.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")  # silent, not slow
        assert b" 200 " in idle.recv(1000)
    metrics = server.metrics()
    assert metrics["kld_http_slow_total"] == 1
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0 and
               server.metrics()["kld_http_requests_in_flight"] == 0, what="nothing held")


def half_sent(server, upload):
    connection = socket.create_connection(server.address.rsplit(":", 1), 60)
    head = "PUT /v2/tensors/t?datatype=FP32&shape=25000" if upload else f"POST {INFER}"
    connection.sendall(f"{head} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{{".encode())
    return connection


def cancelled(server):
    """What the log says of the one request that was, to its reason or that it has none."""
    def lines():
        return [line for line in server.log().splitlines() if "transport=http" in line and "status=cancelled" in line]
    line, = wait_until(lines, what="its line")
    wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 0, what="its end")
    return re.search(r"status=cancelled( reason=\S+)?", line).group()


@pytest.mark.parametrize("upload", (False, True), ids=("infer", "upload"))
@pytest.mark.parametrize("limits", ({"http_slow_ms": 1000, "http_idle_ms": 60000}, {"http_slow_ms": 60000, "http_idle_ms": 1000}),
                         ids=("slow", "silent"))
def test_who_is_cut_off_has_not_left(make_server, limits, upload):
    """The log says whose doing it was, and what counts those who left does not."""
    server = make_server(**limits).wait_linked()
    with half_sent(server, upload) as connection:
        assert cancelled(server).endswith(" reason=slow")
        assert connection.recv(1) == b""
    metrics = server.metrics()
    assert metrics['kld_requests_total{front="http",status="cancelled"}'] == metrics["kld_http_slow_total"] == 1
    assert metrics["kld_requests_detached_total"] == 0


@pytest.mark.parametrize("upload", (False, True), ids=("infer", "upload"))
def test_who_leaves_was_not_cut_off(make_server, upload):
    server = make_server(http_slow_ms=60000, http_idle_ms=60000).wait_linked()
    with half_sent(server, upload):
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1, what="a request")
    assert "reason=" not in cancelled(server)
    metrics = server.metrics()
    assert metrics['kld_requests_total{front="http",status="cancelled"}'] == metrics["kld_requests_detached_total"] == 1
    assert metrics["kld_http_slow_total"] == 0


def unsent_of(server_end, client_end):
    """Bytes that the kernel keeps of what one end has sent and the other has not taken, after a close as well; None: it
    knows no such connection any more."""
    def is_end(text, end):
        return int(text.rsplit(":", 1)[1], 16) == end[1]
    for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, here, there, state, queues, *_ = line.split()
        if is_end(here, server_end) and is_end(there, client_end) and state != "06":  # TIME_WAIT has no queue
            return int(queues.split(":")[0], 16)
    return None


@pytest.mark.parametrize("tls", (False, True), ids=("plain", "tls"))
def test_a_slow_reader_is_cut_off(make_server, certificates, tls):
    """It takes a byte now and then of a reply of 16 MB, which the server holds meanwhile; nor does the kernel keep any of it."""
    server = make_server(http_slow_ms=1000, http_slow_bytes="1M", **(tls_flags(certificates) if tls else {}))
    q = probabilities((1000, 2000), 37)
    headers, data = oip.body({"predictions": q, "targets": q},
                             {n: {"binary_data": True} for n in ("grad_predictions", "grad_targets")})
    host, port = server.address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.connect((host, int(port)))
        connection.settimeout(20)
        ends = connection.getpeername(), connection.getsockname()
        wait_until(lambda: unsent_of(*ends) is not None, what="the server's end")
        if tls:
            context = ssl.create_default_context(cafile=certificates / "ca.crt")
            connection = stack.enter_context(context.wrap_socket(connection, server_hostname="localhost"))
        lines = [f"POST {INFER} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
        connection.sendall("\r\n".join(lines + [f"{k}: {v}" for k, v in headers.items()] + ["", ""]).encode())
        connection.sendall(data)
        assert connection.recv(1)
        wait_until(lambda: unsent_of(*ends) is None, 20, "the slow reader's end")
        if not tls:
            assert server.metrics()["kld_http_slow_total"] == 1
            wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="free staging")


@unless_late
def test_slow_but_moving_is_served(make_server):
    server = make_server(http_slow_ms=1000, http_slow_bytes="1K")
    q = probabilities((100, 100), 38)
    headers, data = oip.body({"predictions": q, "targets": q})

    def pieces():
        for at in range(0, len(data), 8192):
            pace.look()
            yield data[at:at + 8192]
            time.sleep(0.2)
    with Pace(0, 1000) as pace, Connection(server) as connection:
        connection.http.request("POST", INFER, pieces(), headers, encode_chunked=True)
        pace.look()
        assert connection.http.getresponse().status == 200


def test_many_clients_that_leave_are_all_noticed(make_server):
    """Their end comes together with their last bytes; more of them than are looked at in one turn."""
    server = make_server()
    host, port = server.address.rsplit(":", 1)
    for _ in range(150):
        with socket.create_connection((host, int(port)), 60) as connection:
            connection.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{".encode())
    wait_until(lambda: server.metrics()["kld_http_connections"] == 1, what="the end of all but one")
    assert server.metrics()["kld_http_connections_total"] > 150


def test_connections_over_the_limit_wait(make_server):
    """In the backlog of the socket, not refused, until another one goes."""
    server = make_server(http_connections_max=4)
    wait_until(lambda: server.metrics()["kld_http_connections"] == 1, what="one connection")
    host, port = server.address.rsplit(":", 1)
    idle = [socket.create_connection((host, int(port)), 60) for _ in range(4)]
    answers = []
    late = threading.Thread(target=lambda: answers.append(server.request("/v2/health/live")[0]))
    late.start()
    late.join(0.3)
    assert not answers
    idle.pop().close()
    late.join(20)
    assert answers == [200]
    for connection in idle:
        connection.close()


def test_more_descriptors_than_the_usual_limit(make_server):
    """Who holds clients' descriptors raises its limit as far as it may, and says so if that is too little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 900), hard))
        server = make_server(clients_max=1, cuda_files_max=1, http_connections_max=8)
        for role in ("gateway", "worker"):
            limits = pathlib.Path(f"/proc/{server.child(role)}/limits").read_text()
            assert int(limits.split("Max open files")[1].split()[0]) == hard
        assert "few descriptors" not in server.log()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    server = make_server(limit=1000)
    for role in ("gateway", "worker0"):
        line = next(line for line in server.log().splitlines() if "few descriptors" in line and role in line)
        assert "limit=1000 " in line and int(line.split("wanted=")[1].split()[0]) > 4000
