"""deploy/haproxy.cfg: three servers behind HAProxy under load. One is killed, then all are replaced one after the
other, first with nothing but SIGTERM, then taken out of HAProxy before. No request of libkld (here through the Python
package) may fail; of a client that never asks again it is counted how many do, and in the last case none may."""
import grp
import http.client
import json
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from conftest import ROOT, Server, needs, wait_until

sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from pythonlib import import_kld, probabilities  # noqa: E402

kld = import_kld()
pytestmark = [needs("haproxy"), pytest.mark.timeout(180)]
CONFIG = ROOT / "deploy" / "haproxy.cfg"


def is_there(name):
    try:
        return pwd.getpwnam(name).pw_uid and grp.getgrnam(name).gr_gid
    except KeyError:
        return None


DROPS_ROOT = os.geteuid() == 0 and is_there("haproxy")  # else what it is to become is left out, as the file says


def free_ports(count):
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class Balancer:
    def __init__(self, folder, addresses):
        front, metrics = free_ports(2)
        self.address, self.metrics = f"127.0.0.1:{front}", f"127.0.0.1:{metrics}"
        self.admin = folder / "admin.sock"
        self.log = open(folder / "haproxy.log", "w+")
        text = CONFIG.read_text()
        for there, here in [("127.0.0.1:8000", self.address), ("127.0.0.1:8404", self.metrics),
                            ("/run/haproxy/kld.sock", str(self.admin)),
                            *zip(("127.0.0.1:8081", "127.0.0.1:8082", "127.0.0.1:8083"), addresses)]:
            assert text.count(there) == 1, there
            text = text.replace(there, here)
        if not DROPS_ROOT:
            text = re.sub(r"^    (user|group) haproxy\n", "", text, flags=re.M)
        self.config = folder / "haproxy.cfg"
        self.config.write_text(text)
        self.process = subprocess.Popen(["haproxy", "-db", "-f", self.config], stdout=self.log, stderr=self.log)

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def ask(self, command):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.admin))
            connection.sendall(command.encode() + b"\n")
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def up(self):
        """Names of the servers that it holds for ready."""
        assert self.process.poll() is None, self.said()
        try:
            rows = [line.split(",") for line in self.ask("show stat").splitlines()]
        except OSError:
            return set()
        return {row[1] for row in rows if row[0] == "replicas" and len(row) > 17 and row[17] == "UP"} - {"BACKEND"}

    def check(self, name):
        """What its last check came to, and the HTTP status of it."""
        head, *rows = [line.split(",") for line in self.ask("show stat").lstrip("# ").splitlines()]
        row = dict(zip(head, next(row for row in rows if row[:2] == ["replicas", name])))
        return row["check_status"], row["check_code"]

    def busy(self, name):
        """How many requests a server has."""
        rows = [line.split(",") for line in self.ask("show stat").splitlines()]
        return next(int(row[4]) for row in rows if row[:2] == ["replicas", name])

    def stop(self):
        self.process.terminate()
        self.process.wait(30)
        self.log.close()


class Load(threading.Thread):
    """Requests one after the other until `over`; failures: what went wrong, and when."""

    def __init__(self, address, over):
        super().__init__(daemon=True)
        self.address, self.over, self.count, self.failures, self.slowest = address, over, 0, [], 0.0

    def run(self):
        try:
            self.prepare()
            while not self.over.is_set():
                began = time.monotonic()
                problem = self.request()
                self.slowest = max(self.slowest, time.monotonic() - began)
                self.count += 1
                if problem:
                    self.failures.append(problem)
        except Exception as error:  # told by the test
            self.failures.append(repr(error))


class Library(Load):
    """libkld; with 64 rows HAProxy passes the body on without keeping it."""

    def __init__(self, address, over, rows):
        super().__init__(address, over)
        self.student, self.teacher = probabilities(1, (rows, 512)), probabilities(2, (rows, 512))

    def prepare(self):
        self.connection = kld.connect(f"http://{self.address}")
        self.expected = self.connection.kl_div(self.student, self.teacher)

    def request(self):
        result = self.connection.kl_div(self.student, self.teacher)
        same = result.loss == self.expected.loss and \
            np.array_equal(result.grad_predictions, self.expected.grad_predictions)
        return None if same else "another answer"


class Plain(Load):
    """A client that never asks again."""

    BODY = json.dumps({"inputs": [{"name": name, "datatype": "FP32", "shape": [1, 2], "data": [0.5, 0.5]}
                                  for name in ("predictions", "targets")]})

    def prepare(self):
        self.connection = http.client.HTTPConnection(self.address, timeout=60)

    def request(self):
        try:
            self.connection.request("POST", "/v2/models/kl_div/infer", self.BODY)
            reply = self.connection.getresponse()
            reply.read()
            return None if reply.status == 200 else reply.status
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            return type(error).__name__


class PlainLarge(Plain):
    BODY = json.dumps({"inputs": [{"name": name, "datatype": "FP32", "shape": [1, 20000], "data": [0.00005] * 20000}
                                  for name in ("predictions", "targets")]})


@pytest.fixture
def replicas(tmp_path, request):
    ports = free_ports(3)
    servers = [Server(backend="cpu", threads=1, http=f"127.0.0.1:{port}", log_level="warn",
                      **getattr(request, "param", {})) for port in ports]
    balancer = Balancer(tmp_path, [server.address for server in servers])
    try:
        wait_until(lambda: balancer.up() == {"a", "b", "c"}, 30, "three servers that are ready")
        yield balancer, servers
    finally:
        balancer.stop()
        for server in servers:
            server.remove()


def test_the_configuration_is_valid(replicas):
    balancer, _ = replicas
    result = subprocess.run(["haproxy", "-c", "-f", balancer.config], capture_output=True, text=True)
    assert result.returncode == 0 and "WARNING" not in result.stdout + result.stderr, result.stdout + result.stderr
    connection = http.client.HTTPConnection(balancer.metrics, timeout=10)
    connection.request("GET", "/metrics")
    assert b"haproxy_backend_active_servers" in connection.getresponse().read()
    connection.close()


@pytest.mark.skipif(not DROPS_ROOT, reason="needs root, and Debian's user haproxy")
def test_it_does_not_stay_root(replicas):
    balancer, _ = replicas
    status = open(f"/proc/{balancer.process.pid}/status").read()
    ids = {name: set(re.search(rf"^{name}:\t(.*)$", status, re.M)[1].split()) for name in ("Uid", "Gid", "Groups")}
    assert ids["Uid"] == {str(pwd.getpwnam("haproxy").pw_uid)} and ids["Gid"] == {str(grp.getgrnam("haproxy").gr_gid)}, ids
    assert ids["Groups"] <= ids["Gid"] and int(re.search(r"^CapEff:\t(\w+)$", status, re.M)[1], 16) == 0, status


def test_nobody_who_asks_again_sees_replicas_come_and_go(replicas, capsys):
    balancer, servers = replicas
    over = threading.Event()
    library = [Library(balancer.address, over, rows) for rows in (1, 1, 64)]
    plain = [Plain(balancer.address, over), Plain(balancer.address, over)]
    large = [PlainLarge(balancer.address, over)]
    everybody = library + plain + large
    for load in everybody:
        load.start()

    def pause():
        """Until each has had answers in the present state of affairs."""
        wanted = [load.count + 5 for load in everybody]
        wait_until(lambda: all(load.count >= count or not load.is_alive() for load, count in zip(everybody, wanted)),
                   60, "answers for everybody")

    def back(server, name):
        server.process.stdout.close()
        server.start()
        wait_until(lambda: name in balancer.up(), 30, f"{name} again")

    pause()
    servers[0].process.send_signal(signal.SIGKILL)
    servers[0].process.wait()
    pause()
    wait_until(lambda: "a" not in balancer.up(), what="the end of a")  # by its checks, which have a pace of their own
    back(servers[0], "a")
    counts = [[len(load.failures) for load in everybody]]
    for take_out in (False, True):
        for server, name in zip(servers, "abc"):
            pause()
            if take_out:  # as deploy/README.md says
                balancer.ask(f"set server replicas/{name} state drain")
                wait_until(lambda: balancer.busy(name) == 0, 30, f"the last request of {name}")
            assert server.stop() == 0
            pause()
            if take_out:
                balancer.ask(f"set server replicas/{name} state ready")
            back(server, name)
        pause()
        counts.append([len(load.failures) for load in everybody])
    over.set()
    for load in everybody:
        load.join(60)
        assert not load.is_alive()

    with capsys.disabled():
        for what, first, last in (("libkld", 0, 3), ("never asks again, 0.2 KB", 3, 5),
                                  ("never asks again, 0.4 MB", 5, 6)):
            killed, replaced, taken = (sum(at[first:last]) for at in counts)
            loads = everybody[first:last]
            print(f"\n  {what}: of {sum(load.count for load in loads)} requests failed {killed} at kill -9, "
                  f"{replaced - killed} while three were replaced, {taken - replaced} where they were taken out "
                  f"before; slowest {max(load.slowest for load in loads) * 1000:.0f} ms", end="")
        print()
    for load in library:
        assert load.failures == [], load.failures
        assert load.count > 20
    for load in plain:  # HAProxy asks again for them; but what was inside the server that was killed may be lost
        assert load.failures[1:] == [], load.failures
    assert counts[1] == counts[2]
    # Told so, and at once; how many is a matter of speed.
    assert set(large[0].failures) <= {502, 503, "RemoteDisconnected", "ConnectionResetError", "BrokenPipeError"}


def test_a_server_that_says_503_gets_nothing(replicas):
    """Not ready is enough: one that ends answers what it has, and HAProxy learns of it by the check."""
    balancer, servers = replicas
    worker, replies = servers[1].child("worker"), []
    os.kill(worker, signal.SIGSTOP)
    try:
        asker = threading.Thread(target=lambda: replies.append(
            servers[1].request("/v2/models/kl_div/infer", Plain.BODY.encode())[0]))
        asker.start()
        wait_until(lambda: servers[1].metrics()["kld_http_requests_in_flight"] == 1, what="a request")
        servers[1].process.send_signal(signal.SIGTERM)
        wait_until(lambda: balancer.up() == {"a", "c"}, 30, "the end of b")
        assert servers[1].process.poll() is None and balancer.check("b") == ("L7STS", "503")
    finally:
        os.kill(worker, signal.SIGCONT)
    asker.join(60)
    assert replies == [200] and servers[1].process.wait(30) == 0


def test_a_server_that_stands_still_gets_nothing(replicas):
    """Its checks are not answered in time."""
    balancer, servers = replicas
    pid = servers[1].child("gateway")
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: balancer.up() == {"a", "c"}, 30, "the end of b")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: balancer.up() == {"a", "b", "c"}, 30, "b again")


@pytest.mark.parametrize("replicas", [{"http_requests_max": 1, "http_wait_ms": 0}], indirect=True)
def test_an_overload_is_not_multiplied(replicas, capsys):
    """Busy is told by 503 as well, by every server: the first request is sent to others, those behind it are not; and
    a little after the overload they are again."""
    balancer, servers = replicas

    def rejections():
        return sum(server.metrics()['kld_rejected_total{front="http",reason="http_requests_max"}'] for server in servers)

    held = []
    for server in servers:  # a request whose body does not end has the one place
        host, port = server.address.split(":")
        held.append(socket.create_connection((host, int(port))))
        held[-1].sendall(b"POST /v2/models/kl_div/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20000\r\n\r\n{")
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1, what="a request")
    plain = Plain(balancer.address, threading.Event())
    plain.prepare()
    said = [plain.request() for _ in range(20)]
    assert said == [503] * 20
    told = rejections()
    with capsys.disabled():
        print(f"\n  20 requests were told busy {told:.0f} times", end="")
    assert told <= 20 + 6  # once, or twice where the machine stood still for a second
    for connection in held:
        connection.close()
    wait_until(lambda: plain.request() is None, what="room")
    time.sleep(2.1)  # as long as HAProxy remembers, and on
    before = rejections()
    held = [socket.create_connection(servers[0].address.split(":"))]
    held[0].sendall(b"POST /v2/models/kl_div/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20000\r\n\r\n{")
    wait_until(lambda: servers[0].metrics()["kld_http_requests_in_flight"] == 1, what="a request")
    assert [plain.request() for _ in range(6)] == [None] * 6 and rejections() > before  # b and c answered for a
    held[0].close()
