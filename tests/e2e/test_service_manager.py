"""Under a service manager: what the server tells it (sd_notify), its signs of life, and the listening sockets
that it keeps for us. The manager is played here, on its protocol; deploy/systemd is checked in tests/deploy."""
import os
import re
import signal
import socket
import statistics
import subprocess
import time

import pytest

from conftest import BIN, Server, children_of, clean_environment, suspend, wait_until


class Manager:
    """Its end of NOTIFY_SOCKET."""

    def __init__(self, address):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1))
        self.name = address

    def next(self, seconds=30):
        """The lines of one message; None: there was none in that time."""
        self.socket.settimeout(seconds)
        try:
            return self.socket.recv(4096).decode().split("\n")
        except TimeoutError:
            return None

    def fill(self):
        """Its queue has no room from here on; what is in it says nothing."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            try:
                while True:
                    other.sendto(b"X=1", self.name.replace("@", "\0", 1))
            except BlockingIOError:
                pass

    def next_but_filling(self):
        while (told := self.next()) == ["X=1"]:
            pass
        return told

    def quiet_for(self, seconds):
        """Drops what has come, then: does nothing come?"""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(4096):
                pass
        except BlockingIOError:
            pass
        return self.next(seconds) is None


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    one = Manager(str(tmp_path / "notify") if request.param == "path" else f"@kld-test-{os.getpid()}")
    yield one
    one.socket.close()


def test_start_and_end_are_told(manager, make_server):
    server = make_server(environment={"NOTIFY_SOCKET": manager.name})
    told = manager.next()
    assert told[0] == "READY=1" and told[1].startswith("STATUS=serves on 127.0.0.1:")
    server.kill_child("worker")
    server.child("worker")
    assert manager.quiet_for(0.3)  # no watchdog was asked for
    for pid in [server.child("worker"), server.child("gateway")]:
        assert b"NOTIFY_SOCKET" not in open(f"/proc/{pid}/environ", "rb").read()
    assert server.stop() == 0
    assert manager.next() == ["STOPPING=1"]


def test_a_manager_that_has_no_room_is_told_later(manager, make_server):
    manager.fill()
    server = make_server(environment={"NOTIFY_SOCKET": manager.name, "WATCHDOG_USEC": "400000"})
    time.sleep(1)  # several signs of life, of which the manager wants one
    assert manager.next_but_filling()[0] == "READY=1"
    assert manager.next() == ["WATCHDOG=1"]
    manager.quiet_for(0.01)
    manager.fill()
    assert server.stop() == 0  # which it does not wait for


def test_a_start_that_fails_is_not_ready(manager, tmp_path):
    result = subprocess.run([str(BIN / "kld-server"), "--http=", f"--unix={tmp_path}/s", "--device=1000"],
                            env=clean_environment(NOTIFY_SOCKET=manager.name), capture_output=True, timeout=60)
    assert result.returncode == 1
    assert manager.next(0.1) in (None, ["STOPPING=1"])


@pytest.mark.parametrize("name", ["", "relative", "/" + "x" * 200, "/nowhere/notify"])
def test_a_manager_that_is_not_there(name, make_server):
    server = make_server(environment={"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000000"})
    assert server.json("/v2")[0] == 200
    if name:
        wait_until(lambda: "manager not told" in server.log(), what="a word about it")
    else:
        assert "manager not told" not in server.log()


WATCHDOG_S = 1.0


@pytest.fixture
def watched(tmp_path, make_server):
    one = Manager(str(tmp_path / "notify"))
    one.server = make_server(http_threads=3,  # which all answer
                             environment={"NOTIFY_SOCKET": one.name, "WATCHDOG_USEC": int(WATCHDOG_S * 1e6)})
    assert one.next()[0] == "READY=1"
    yield one
    one.socket.close()


def test_signs_of_life_come_at_half_time(watched):
    times = []
    for _ in range(6):
        assert watched.next() == ["WATCHDOG=1"]
        times.append(time.monotonic())
    gaps = [later - earlier for earlier, later in zip(times, times[1:])]
    assert 0.4 * WATCHDOG_S < statistics.median(gaps) < 0.8 * WATCHDOG_S, gaps


@pytest.mark.parametrize("role", ["worker", "gateway"])
def test_a_hanging_child_ends_them(watched, role):
    pid = watched.server.child(role)
    suspend(pid)
    # An answer may be on its way, and the sign of life that it leads to.
    wait_until(lambda: watched.quiet_for(1.5 * WATCHDOG_S), what="quiet")
    os.kill(pid, signal.SIGCONT)
    assert watched.next(30) == ["WATCHDOG=1"]


@pytest.mark.parametrize("role", ["worker", "gateway"])
def test_a_child_that_is_replaced_does_not(watched, role):
    before = watched.server.kill_child(role)
    last = time.monotonic()
    while time.monotonic() - last < 30:
        assert watched.next() == ["WATCHDOG=1"]
        if children_of(watched.server.pid).get(role, before) != before:
            break
        last = time.monotonic()
    assert watched.next(30) == ["WATCHDOG=1"]


def test_a_watchdog_of_another_process_is_not_ours(tmp_path, make_server):
    one = Manager(str(tmp_path / "notify"))
    make_server(environment={"NOTIFY_SOCKET": one.name, "WATCHDOG_USEC": "200000", "WATCHDOG_PID": "1"})
    assert one.next()[0] == "READY=1"
    assert one.quiet_for(0.5)
    one.socket.close()


# ---- sockets that the manager opened ---------------------------------------------------------------------------

class Activated(Server):
    """A server started with the given sockets from descriptor 3 on."""

    def __init__(self, sockets, names="", pid="$$", **more):
        self.passed, self.names, self.listen_pid = sockets, names, pid
        super().__init__(**more)

    def start(self, wait=True):
        moves = " ".join(f"{3 + i}<&{one.fileno()}" for i, one in enumerate(self.passed))
        script = f"LISTEN_PID={self.listen_pid} exec \"$@\" {moves}"
        # They may have those very numbers here.
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", script, "bash", *self.arguments], stdout=subprocess.PIPE, stderr=log,
                stdin=subprocess.DEVNULL, pass_fds=[one.fileno() for one in self.passed],
                env={**self.environment, "LISTEN_FDS": str(len(self.passed)), "LISTEN_FDNAMES": self.names})
        if wait:
            self.wait_ready()


def high(one):
    """The same socket at a number that is not among the first."""
    import fcntl
    number = fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, 50)
    one.close()
    return socket.socket(fileno=number)


def tcp(host="127.0.0.1"):
    return high(socket.create_server((host, 0)))


def unix(path, kind=socket.SOCK_SEQPACKET):
    one = socket.socket(socket.AF_UNIX, kind)
    one.bind(str(path))
    one.listen(16)
    return high(one)


@pytest.fixture
def activate(backend):
    servers = []

    def make(sockets, **more):
        servers.append(Activated(sockets, **{"backend": backend, **more}))
        return servers[-1]

    yield make
    for server in servers:
        server.remove()
        for one in server.passed:
            one.close()


def test_sockets_are_taken_and_kept(activate, tmp_path, backend):
    """Requests that come while no server runs wait in the sockets for the next one."""
    path = tmp_path / "kld.sock"
    sockets = [unix(path), tcp(), tcp()]
    server = activate(sockets, names="kld.socket:http:metrics", unix=None, http=None)
    assert server.unix == str(path)
    assert server.address == "127.0.0.1:%d" % sockets[1].getsockname()[1]
    assert server.json("/v2")[0] == 200
    assert "kld_build_info" in server.request("/metrics")[2].decode()
    ping = [str(BIN / "kld"), "ping", "--count", "1", "--server"]
    metrics = "http://127.0.0.1:%d" % sockets[2].getsockname()[1]
    for url in (server.url_unix, metrics):
        assert subprocess.run([*ping, url], capture_output=True, timeout=60).returncode == 0
    assert b"LISTEN_" not in open(f"/proc/{server.child('worker')}/environ", "rb").read()
    assert server.stop() == 0
    assert path.exists()  # it is the manager's

    early = subprocess.Popen([*ping, server.http], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        early.wait(0.5)
    server.start()
    assert early.wait(60) == 0, early.stderr.read()
    early.stderr.close()
    assert server.stop() == 0


def test_what_does_nothing_is_said(activate, tmp_path):
    """Settings that the passed sockets decide, and variables that are none; what says the same is left alone."""
    def warnings(**environment):
        sockets = [tcp(), tcp(), unix(tmp_path / f"{len(list(tmp_path.iterdir()))}.sock")]
        server = activate(sockets, names="http:metrics:unix", unix=None, http=None,
                          environment=environment)
        assert server.stop() == 0
        return re.findall(r" warn +supervisor: (.*)", server.log()), [
            "127.0.0.1:%d" % one.getsockname()[1] for one in sockets[:2]]

    assert warnings()[0] == []
    mode = f"0{os.stat(next(tmp_path.iterdir())).st_mode & 0o777:o}"
    assert warnings(KLD_UNIX_MODE=mode, KLD_SERVER="x", KLD_SERVICE_HOST="10.0.0.1")[0] == []
    said, (http, metrics) = warnings(KLD_HTTP="", KLD_METRICS_HTTP="127.0.0.1:9090", KLD_UNIX_MODE="0600", KLD_TLS_CRT="/x",
                                     KLD_XYZZY="1")
    reason = 'reason="the service manager passed a socket, which listens on'
    assert sorted(said) == [
        f'setting not used setting=http {reason} {http}"', f'setting not used setting=metrics_http {reason} {metrics}"',
        'setting not used setting=unix_mode reason="the service manager passed a socket, whose mode is its own"',
        'unknown variable name="KLD_TLS_CRT" did_you_mean="KLD_TLS_CERT"', 'unknown variable name="KLD_XYZZY"']


def test_a_second_socket_at_another_path(activate, tmp_path):
    """Whether or not there turns out to be a second device: another start would find the same."""
    for device in ("all", "0,0"):
        sockets = [unix(tmp_path / f"{device}.s"), unix(tmp_path / f"{device}.t")]
        server = activate(sockets, unix=None, device=device, wait=False)
        assert server.process.wait(60) == 2
        assert f"{device}.t; expected {tmp_path}/{device}.s.1" in server.log() and "child ready" not in server.log()


def test_several_workers(activate, tmp_path):
    """The second worker's socket is passed, the third's is not."""
    sockets = [unix(tmp_path / "s"), unix(tmp_path / "s.1")]
    server = activate(sockets, unix=None, backend="cpu", device="0,0,0")
    wait_until((tmp_path / "s.2").exists)
    for name in ("s", "s.1", "s.2"):
        result = subprocess.run([str(BIN / "kld"), "ping", "--count=1", f"--server=unix:{tmp_path}/{name}"],
                                capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
    assert server.stop() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "s.1"]


@pytest.mark.parametrize("make, flags, expected", [
    (lambda folder: [tcp("0.0.0.0")], {}, "can be reached from other machines"),
    (lambda folder: [tcp(), tcp()], {}, "descriptor 4 is a second socket for HTTP"),
    (lambda folder: [unix(folder / "s", socket.SOCK_STREAM)], {}, "descriptor 3 ('') is not a listening socket"),
    (lambda folder: [unix(folder / "s")], {"unix": "/elsewhere/s"}, "expected /elsewhere/s"),
    (lambda folder: [unix(folder / "s"), unix(folder / "t")], {"device": "0,0", "unix": None}, "/s.1"),
], ids=["public", "twice", "kind", "path", "second"])
def test_sockets_that_do_not_fit(make, flags, expected, activate, tmp_path):
    server = activate(make(tmp_path), **{"backend": "cpu", "wait": False, **flags})
    assert server.process.wait(60) == 2  # so they are at the next start
    assert expected in server.log()


def test_sockets_of_another_process_are_left_alone(activate, tmp_path):
    server = activate([unix(tmp_path / "theirs")], pid="1")
    assert server.unix != str(tmp_path / "theirs")
    assert server.stop() == 0
