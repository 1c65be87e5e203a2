"""The server as its operator meets it: start, options, the ready line, signals, lost children."""
import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

import pytest

from conftest import BIN, START_SECONDS, children_of, clean_environment, sanitizer, suspend, wait_until
from httplib import Late, unless_late
from wire import Client

SERVER = str(BIN / "kld-server")


def run(*arguments, environment=None, timeout=60):
    return subprocess.run([SERVER, *arguments], capture_output=True, text=True, timeout=timeout,
                          env=clean_environment(**(environment or {})), stdin=subprocess.DEVNULL)


def test_help_lists_every_option_with_default():
    result = run("--help")
    assert result.returncode == 0 and result.stderr == ""
    for option in ("--http TEXT", "--unix TEXT", "--backend TEXT", "--drain-ms N", "--insecure-bind",
                   "--staging-bytes-max BYTES", "--config TEXT", "[127.0.0.1:8080]", "[10000]"):
        assert option in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 130


def test_version():
    result = run("--version")
    assert result.returncode == 0
    version = result.stdout.split()
    assert version[0] == "kld-server" and version[1].count(".") == 2


def test_what_is_asked_for_and_cannot_be_printed_is_a_failure():
    for question in ("--help", "-h", "--version", "--help-metrics"):
        for where, why in ((">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")):
            done = subprocess.run(["sh", "-c", f'exec "$@" {where}', "sh", SERVER, question], capture_output=True, text=True,
                                  env=clean_environment(), timeout=60)
            assert (done.returncode, done.stderr) == (1, f"kld-server: standard output cannot be written: {why}\n"), done


@pytest.mark.parametrize("arguments, expected", [
    (["--lgo-level", "info"], "did you mean --log-level?"),
    (["--nonsense"], "'--nonsense'"),
    (["serve"], "unexpected argument 'serve'"),
    (["--http"], "--http needs a value"),
    (["--device", "first"], "--device: 'first' is neither all nor 1 to 16 numbers"),
    (["--device=-1"], "neither all nor"),
    (["--device=0,"], "neither all nor"),
    (["--device=0,1024"], "neither all nor"),
    (["--device", ",".join("0" * 17)], "neither all nor"),
    (["--requests-max", "0"], "from 1 to"),
    (["--backend", "tpu"], "not one of auto,cpu,cuda"),
    (["--staging-bytes-max", "1X"], "K, M, G, T"),
    (["--unix-mode", "0999"], "--unix-mode"),
    (["--allow-uids", "root"], "numbers separated by commas"),
    (["--allow-uids", "4294967295"], "less than 4294967295"),
    (["--allow-gids", "4294967296"], "less than 4294967295"),
    (["--allow-uids", ",".join("1" * 65)], "at most 64 numbers"),
    (["--insecure-bind=maybe"], "true or false"),
    (["--sandbox", "false"], "unexpected argument 'false'; expected --sandbox=false"),
    (["--http", "", "false"], "options begin with --"),
    (["--config", "/nonexistent.json"], "No such file"),
    (["--http_idle_ms=5"], "did you mean --http-idle-ms?"),
])
def test_wrong_usage(arguments, expected):
    result = run(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert expected in result.stderr


@pytest.mark.parametrize("address, expected", [
    ("0.0.0.0:0", "--insecure-bind allows it without"),
    ("[::]:0", "--insecure-bind allows it without"),
    ("8080", "expected ADDR:PORT"),
    ("127.0.0.1:99999", "expected ADDR:PORT"),
    ("example.invalid:1", "is not an address"),
])
def test_wrong_http_address(tmp_path, address, expected):
    result = run("--http", address, "--unix", str(tmp_path / "s"))
    assert result.returncode == 2 and expected in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong, status, expected", [
    (["--tls-cert=/none"], 2, "go together"),
    (["--tls-cert=/none", "--tls-key=/none"], 1, "tls_cert: the file cannot be opened"),
    (["--tokens=/none"], 1, "tokens: the file cannot be opened"),
    (["--http=", "--tls-cert=/none"], 2, "go together"),
    (["--http=", "--tls-client-ca=/none"], 2, "go together"),
    (["--tokens=/none/file"], 1, "No such file or directory (/none/file)"),
    (["--http=", "--metrics-http=127.0.0.1:0"], 2, "there is no --http beside it"),
    (["--metrics-http=9090"], 2, "--metrics-http: expected ADDR:PORT"),
    (["--unix=/tmp/" + "x" * 200], 2, "the path is longer than"),
    (["--unix=/none/s"], 1, "is its folder there?"),
    (["--http=192.0.2.1:1", "--insecure-bind"], 1, "cannot listen on"),
])
def test_what_another_start_may_find_otherwise(tmp_path, wrong, status, expected):
    """1 where one may find it right, else 2."""
    result = run("--http=127.0.0.1:0", f"--unix={tmp_path}/s", "--backend=cpu", *wrong)
    assert (result.returncode, expected in result.stderr) == (status, True), result


def is_ready_at_once(server):
    with contextlib.suppress(urllib.error.HTTPError):
        return urllib.request.urlopen(server.http + "/v2/health/ready").status == 200


def test_ready_line_and_clean_end(make_server):
    begin = time.monotonic()
    server = make_server()
    took = time.monotonic() - begin
    if not is_ready_at_once(server):
        assert took > 1  # for so long the line waits for the worker, which takes more on a busy machine or in a sanitizer
        server.wait_linked()
    host, port = server.address.rsplit(":", 1)
    assert host == "127.0.0.1" and int(port) > 0
    assert server.backend == server.flags["backend"]
    mode = os.stat(server.unix)
    assert stat.S_ISSOCK(mode.st_mode) and stat.S_IMODE(mode.st_mode) == 0o660
    assert set(children_of(server.pid)) == {"worker", "gateway"}
    names = {role: pathlib.Path(f"/proc/{pid}/comm").read_text() for role, pid in children_of(server.pid).items()}
    assert names == {"worker": "kld-worker0\n", "gateway": "kld-gateway\n"}
    children = list(children_of(server.pid).values())
    assert server.stop() == 0
    assert not os.path.exists(server.unix)
    assert server.process.stdout.closed
    for pid in children:
        assert not os.path.exists(f"/proc/{pid}")


def test_exactly_one_line_on_stdout(tmp_path, backend):
    process = subprocess.Popen([SERVER, "--http=127.0.0.1:0", f"--unix={tmp_path}/s",
                                f"--backend={backend}"], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, env=clean_environment())
    line = process.stdout.readline()
    worker = wait_until(lambda: children_of(process.pid).get("worker"))
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: children_of(process.pid).get("worker") not in (None, worker))
    process.terminate()
    rest = process.stdout.read()
    assert process.wait(30) == 0
    assert line.startswith(b"ready ") and rest == b""
    process.stdout.close()


def test_without_http(make_server):
    server = make_server(http="")
    assert server.ready_line.startswith("ready http= unix=")
    assert set(children_of(server.pid)) == {"worker"}
    server.connect().close()


def test_ipv6_loopback(make_server):
    try:
        socket.socket(socket.AF_INET6).bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    server = make_server(http="[::1]:0")
    assert server.address.startswith("[::1]:")
    assert server.json("/v2")[0] == 200


def test_insecure_bind_is_explicit(make_server):
    server = make_server(http="0.0.0.0:0", arguments=["--insecure-bind"])
    port = server.address.rsplit(":", 1)[1]
    assert urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/live").status == 200


def test_settings_from_environment_file_and_flag(make_server, tmp_path):
    settings = tmp_path / "kld.json"
    settings.write_text(json.dumps({"log_level": "error", "log_format": "json", "drain_ms": 5000,
                                    "staging_bytes_max": "64M", "unix_mode": "0600"}))
    server = make_server(environment={"KLD_LOG_LEVEL": "debug", "KLD_CONFIG": str(settings),
                                      "KLD_DRAIN_MS": "1"}, drain_ms=20000)
    arguments = pathlib.Path(f"/proc/{server.child('worker')}/cmdline").read_text().split("\0")
    assert "--log-level=debug" in arguments           # environment over file
    assert "--log-format=json" in arguments           # file over default
    assert "--drain-ms=20000" in arguments            # flag over environment
    assert f"--staging-bytes-max={64 << 20}" in arguments
    assert stat.S_IMODE(os.stat(server.unix).st_mode) == 0o600
    lines = server.log_lines()
    assert lines and all({"time", "level", "role", "event"} <= set(line) for line in lines)


@pytest.mark.parametrize("text, expected", [
    ('{"htpp": "x"}', "did you mean http"),
    ('{"http": 8080}', "expected a text"),
    ('{"drain_ms": 1.5}', "expected a whole number"),
    ('{"drain_ms": 1, "drain_ms": 2}', "is there twice"),
    ('{"insecure_bind": "yes"}', "expected true or false"),
    ("[]", "expected a JSON object"),
    ("{", "the JSON is not valid"),
    ("{} {}", "something behind the value"),
])
def test_wrong_file(tmp_path, text, expected):
    settings = tmp_path / "kld.json"
    settings.write_text(text)
    result = run("--config", str(settings))
    assert result.returncode == 2 and expected in result.stderr


def test_unknown_device_ends_the_start(tmp_path, backend):
    result = run("--http=127.0.0.1:0", f"--unix={tmp_path}/s", f"--backend={backend}",
                 "--device=1000")
    assert result.returncode == 1 and result.stdout == ""
    assert "cannot start" in result.stderr and "device" in result.stderr
    assert not list(tmp_path.iterdir())


def test_stale_socket_is_replaced(make_server):
    server = make_server()
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not children_of(server.pid), what="the end of the children")
    assert os.path.exists(server.unix)
    server.process.stdout.close()
    server.start()
    server.connect().close()


def test_socket_of_a_dying_server_is_waited_for(tmp_path):
    """A killed worker may hold the socket for a while after its supervisor is gone."""
    path = str(tmp_path / "kld.sock")
    dying = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dying.bind(path)
    dying.listen(16)
    timer = threading.Timer(1.0, dying.close)
    timer.start()
    server = subprocess.Popen([SERVER, "--http=", f"--unix={path}", "--backend=cpu"],
                              stdout=subprocess.PIPE, text=True, env=clean_environment())
    try:
        assert server.stdout.readline().startswith("ready ")
        assert dying.fileno() == -1
    finally:
        server.terminate()
        assert server.wait(30) == 0
        server.stdout.close()


def test_live_socket_is_not_taken(make_server):
    server = make_server()
    result = run("--http=", f"--unix={server.unix}")
    assert result.returncode == 1 and "another server" in result.stderr
    server.connect().close()


def test_other_file_is_not_replaced(tmp_path):
    path = tmp_path / "notes"
    path.write_text("mine")
    result = run("--http=", f"--unix={path}")
    assert result.returncode == 1 and "not a socket" in result.stderr
    assert path.read_text() == "mine"


def test_default_socket_folder_is_made(make_server, tmp_path):
    server = make_server(unix=None, environment={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert server.unix == f"{tmp_path}/kld/kld.sock"
    server.connect().close()


def test_port_in_use(make_server, tmp_path):
    server = make_server()
    result = run(f"--http={server.address}", f"--unix={tmp_path}/s")
    assert result.returncode == 1 and "Address already in use" in result.stderr


@pytest.mark.parametrize("role", ["worker", "gateway"])
def test_killed_child_is_back(make_server, role):
    server = make_server()
    for _ in range(3):
        before = server.kill_child(role)
        # Nobody is refused: the connection waits for the next worker or gateway.
        assert server.request("/v2/health/live")[0] == 200
        server.connect().close()
        wait_until(lambda: server.request("/v2/health/ready")[0] == 200, what="readiness")
        assert server.child(role) != before
    labels = '{worker="0"}' if role == "worker" else ""
    assert server.metrics()[f"kld_{role}_restarts_total{labels}"] == 3


STUCK_MS = 6000 if sanitizer() else 3000  # longer than a busy machine leaves a process without a turn


@unless_late
def test_a_stuck_worker_is_replaced(make_server):
    """Whose loop stands still. A supervisor that stood still itself, longer than that takes, accuses nobody."""
    server = make_server(stuck_ms=STUCK_MS, http="")
    worker = server.child("worker")
    suspend(server.pid)
    time.sleep(STUCK_MS / 1000 + 1)
    os.kill(server.pid, signal.SIGCONT)
    time.sleep(0.5)
    if server.child("worker") != worker:
        raise Late
    suspend(worker)
    wait_until(lambda: children_of(server.pid).get("worker", worker) != worker, START_SECONDS, "another worker")
    wait_until(lambda: server.log().count("worker ready") == 2 or server.log().count("child ready") == 2, START_SECONDS,
               "that it serves")
    [line] = [line for line in server.log().splitlines() if "worker replaced" in line]
    assert "error" in line and f"child_pid={worker}" in line and "its loop gives no sign of life" in line


@unless_late
def test_a_stuck_gateway_is_replaced(make_server):
    server = make_server(stuck_ms=STUCK_MS, http_threads=3)
    gateway, worker = server.child("gateway"), server.child("worker")
    time.sleep(STUCK_MS / 1000 + 1)  # all loops answer all the time
    if server.child("gateway") != gateway:
        raise Late
    suspend(gateway)
    assert server.json("/v2")[0] == 200  # by the next one
    assert server.child("gateway") != gateway and server.child("worker") == worker
    [line] = [line for line in server.log().splitlines() if "gateway replaced" in line]
    assert "error" in line and f"child_pid={gateway}" in line and "its loop gives no sign of life" in line
    metrics = server.metrics()
    assert metrics["kld_gateway_stuck_total"] == metrics["kld_gateway_restarts_total"] == 1
    assert metrics['kld_worker_stuck_total{worker="0"}'] == 0


def test_live_fails_only_where_a_restart_is_the_cure(make_server):
    """A probe is answered without a worker, and by no gateway that stands still, which the supervisor replaces in a
    container's stead: it is told not to here."""
    server = make_server(stuck_ms=60000, restart_ms_max=60000)
    live = f"http://{server.address}/v2/health/live"
    worker, gateway = server.child("worker"), server.child("gateway")
    suspend(worker)
    assert urllib.request.urlopen(live, timeout=30).status == 200
    os.kill(worker, signal.SIGKILL)
    assert urllib.request.urlopen(live, timeout=30).status == 200
    suspend(gateway)
    with pytest.raises(OSError, match="timed out"):
        urllib.request.urlopen(live, timeout=1)
    os.kill(gateway, signal.SIGCONT)
    assert urllib.request.urlopen(live, timeout=30).status == 200 and server.child("gateway") == gateway


def test_worker_keeps_its_back_end(make_server, backend):
    server = make_server(backend="auto")
    server.kill_child("worker")
    pid = server.child("worker")
    arguments = wait_until(lambda: pathlib.Path(f"/proc/{pid}/cmdline").read_text())
    assert f"--backend={server.backend}\0" in arguments


def test_children_go_with_a_killed_supervisor(make_server):
    server = make_server()
    children = list(children_of(server.pid).values())
    assert len(children) == 2
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children),
               what="the end of the children")


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_drain_is_quick_when_idle(make_server, signal_number):
    server = make_server(drain_ms=60000)
    connection = server.connect()  # an idle client does not hold up the end
    started = time.monotonic()
    assert server.stop(signal_number) == 0
    assert time.monotonic() - started < 30
    connection.close()


# ThreadSanitizer puts signals off and then runs the handler of one inside that of another, which libuv's, holding its lock,
# does not allow: one server in some 8,000 stood still in read() under both (gdb).
several_signals = pytest.mark.skipif(sanitizer() == "thread", reason="ThreadSanitizer nests the handlers of signals that it put off")


@several_signals
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_told_again_and_again(make_server, signal_number):
    """To its last moment: it ends in order all the same."""
    for _ in range(10):
        server = make_server()
        while server.process.poll() is None:
            os.kill(server.pid, signal_number)
            time.sleep(0.0005)  # it has something else to do, too
        assert server.process.returncode == 0 and not os.path.exists(server.unix)


@several_signals
def test_a_whole_group_that_is_told_again_and_again(make_server):
    """As by `kill -- -PGID`: the children, too, end in order, and none of a signal."""
    for _ in range(10):
        server = make_server()
        processes = [server.pid, *children_of(server.pid).values()]
        while server.process.poll() is None:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM)
            time.sleep(0.0005)
        log = server.log()
        assert server.process.returncode == 0 and not any(
            f"child_pid={process} signal" in line for process in processes for line in log.splitlines()), log


@unless_late
def test_drain_that_takes_its_time_kills_nobody(make_server):
    """A caller that never finishes its body costs the drain time, and not the worker's clients."""
    server = make_server(drain_ms=500)
    host, port = server.http.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as stalled:
        stalled.sendall(b"POST /v2/models/kl_div/infer HTTP/1.1\r\nHost: localhost\r\n"
                        b"Content-Length: 200\r\n\r\n{")
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1)
        assert server.stop() == 0
    if "signal=9" in server.log():  # of a gateway without a processor for 5 s
        raise Late
    assert "worker ended" in server.log()


def test_signal_during_start(make_server):
    server = make_server(wait=False)
    time.sleep(0.02)
    assert server.stop() in (0, -signal.SIGTERM)  # before the handler is there: the default action
    wait_until(lambda: not children_of(server.pid), what="the end of the children")


@pytest.fixture(params=["its own", "another user's"])
def stderr_user(request):
    """Keywords for Popen: whose pipe standard error is, of the server's own user or of ours."""
    if request.param == "its own":
        return {}
    other = {"user": 65534, "group": 65534, "extra_groups": []}
    if os.geteuid() != 0 or subprocess.run(["sh", "-c", f"test -x {SERVER}"], **other).returncode != 0:
        pytest.skip("another user cannot start the server here")
    return other


def test_full_stderr_stops_nothing(backend, stderr_user):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kld-", dir="/tmp"))
    folder.chmod(0o777)
    reader, writer = os.pipe()
    # Counters of coverage that could not be written where another user may not, nor in the sandbox, would be told to the
    # full pipe at the end, by a write that waits.
    counters = {"GCOV_PREFIX": folder} if stderr_user else {}
    process = subprocess.Popen([SERVER, "--http=127.0.0.1:0", f"--unix={folder}/s",
                                f"--backend={backend}", "--log-level=debug",
                                f"--sandbox={os.environ.get('TEST_SANDBOX', 'true')}"],
                               stdout=subprocess.PIPE, stderr=writer, env=clean_environment(**counters), **stderr_user)
    try:
        line = process.stdout.readline().decode()
        address = line.split("http=")[1].split()[0]
        tensor = {"datatype": "FP32", "shape": [1, 2], "data": [0.5, 0.5]}
        body = json.dumps({"inputs": [{"name": name, **tensor} for name in ("predictions", "targets")]}).encode()
        for _ in range(400):  # each has lines in two roles; the pipe holds 64 KiB
            url = f"http://{address}/v2/models/kl_div/infer"
            assert urllib.request.urlopen(url, body, timeout=60).status == 200
        counted = urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode()
        assert float(re.search(r"^kld_log_lines_lost_total (\S+)", counted, re.M)[1]) > 100
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(reader)
        os.close(writer)
        shutil.rmtree(folder)


def test_full_stdout_stops_nothing(backend, tmp_path):
    """It is ready, serves, replaces a worker and stops; and says so when there is room."""
    reader, writer = os.pipe()
    room = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * room)
    process = subprocess.Popen([SERVER, "--http=", f"--unix={tmp_path}/s", f"--backend={backend}"], stdout=writer,
                               stderr=subprocess.DEVNULL, env=clean_environment())
    try:
        wait_until(lambda: os.path.exists(f"{tmp_path}/s"), what="the socket")
        with Client(f"{tmp_path}/s") as client:
            client.ping()
        worker = children_of(process.pid)["worker"]
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: children_of(process.pid).get("worker") not in (None, worker), what="the next worker")
        assert os.read(reader, room) == b"x" * room
        assert os.read(reader, 1000).startswith(b"ready http= unix=")
        os.write(writer, b"x" * room)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)


def skip_without_namespaces(command):
    if not shutil.which("unshare") or subprocess.run(command[:5] + ["true"], capture_output=True).returncode:
        assert os.environ.get("CI") != "true", "no PID namespaces here (unshare)"
        pytest.skip("no PID namespaces here")


def test_as_pid_1(tmp_path):
    """In a PID namespace of its own: starts, collects orphans, ends on SIGTERM."""
    script = (f"mount -t proc proc /proc; exec {SERVER} --http= --unix={tmp_path}/s --backend=cpu")
    command = ["unshare", "--pid", "--fork", "--mount", "--kill-child", "sh", "-c", script]
    skip_without_namespaces(command)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=clean_environment())
    line = process.stdout.readline()
    assert line.startswith(b"ready "), process.stderr.read()
    inside = wait_until(lambda: [int(p.name) for p in pathlib.Path("/proc").iterdir()
                                 if p.name.isdigit() and parent_of(p) == process.pid])[0]
    # An orphan: its parent, in the namespace, ends at once; PID 1 must collect it.
    subprocess.run(["nsenter", "-t", str(inside), "-p", "-m", "sh", "-c", "(sleep 0.2 &)"],
                   check=True)
    time.sleep(0.6)

    def zombies():
        return [p for p in pathlib.Path("/proc").iterdir()
                if p.name.isdigit() and parent_of(p) == inside and state_of(p) == "Z"]
    wait_until(lambda: not zombies(), what="the orphan being collected")
    os.kill(inside, signal.SIGTERM)
    assert process.wait(30) == 0
    process.stdout.close()
    process.stderr.close()


ORPHAN = """
import os, sys, time
import wire
if os.fork():
    os._exit(0)
while os.getppid() != 1:
    time.sleep(0.01)
with wire.Client(sys.argv[1]) as client:
    try:
        client.region_add(wire.POOL, 60 << 20)
        print("taken")
    except wire.Failed as refused:
        print(refused)
"""


def test_an_orphan_is_not_the_gateway(tmp_path):
    """PID 1 becomes the parent of orphans, as it is the gateway's: their part of the pool stays what it is.
    The gateway, each successor of it and that of the worker know each other."""
    script = (f"mount -t proc proc /proc; exec {SERVER} --http=127.0.0.1:0 --unix={tmp_path}/s --backend=cpu "
              "--pool-bytes-max=64M --staging-request-bytes-max=1M --keep-buffer-ms=1")
    command = ["unshare", "--pid", "--fork", "--mount", "--kill-child", "sh", "-c", script]
    skip_without_namespaces(command)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=clean_environment())
    try:
        address = process.stdout.readline().decode().split("http=")[1].split()[0]
        inside = wait_until(lambda: [int(p.name) for p in pathlib.Path("/proc").iterdir()
                                     if p.name.isdigit() and parent_of(p) == process.pid])[0]

        def store():
            url = f"http://{address}/v2/tensors/large"
            for url, body, method in ((url + "?datatype=FP32&shape=10,1048576", bytes(40 << 20), "PUT"), (url, None, "DELETE")):
                urllib.request.urlopen(urllib.request.Request(url, body, method=method), timeout=60).close()

        store()
        said = subprocess.run(["nsenter", "-t", str(inside), "-p", "-m", sys.executable, "-c", ORPHAN, f"{tmp_path}/s"],
                              capture_output=True, text=True, timeout=60,
                              env=clean_environment(PYTHONPATH=pathlib.Path(__file__).parent)).stdout
        assert "the device's pool, the most allowed" in said
        for role in ("worker", "gateway"):
            killed = children_of(inside)[role]
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: children_of(inside).get(role) not in (None, killed), what=f"another {role}")
            wait_until(lambda: is_ready(f"http://{address}"), what="a server that is ready")
            store()
        os.kill(inside, signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def is_ready(url):
    try:
        return urllib.request.urlopen(f"{url}/v2/health/ready", timeout=10).status == 200
    except OSError:
        return False


def stat_of(entry):
    try:
        return (entry / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ["?", "0"]


def parent_of(entry):
    return int(stat_of(entry)[1])


def state_of(entry):
    return stat_of(entry)[0]


def test_another_build_of_libkld_is_told(tmp_path, backend):
    """The tables between the server and its library may differ between two builds of one version."""
    file = next(path for path in (BIN / "libkld.so", BIN.parent / "lib/libkld.so") if path.exists())
    library = file.read_bytes()
    build = re.search(rb"\d+\.\d+\.\d+\+\d+\0", library).group()
    other = build[:-2] + (b"0" if build[-2:-1] != b"0" else b"1") + b"\0"
    shutil.copy(BIN / "kld-server", tmp_path / "kld-server")
    for name, content in (("whole", library), ("other", library.replace(build, other))):
        (tmp_path / "libkld.so.0").write_bytes(content)
        with subprocess.Popen([tmp_path / "kld-server", f"--unix={tmp_path}/s", "--http=", f"--backend={backend}"],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=clean_environment(LD_LIBRARY_PATH=f"{tmp_path}:{file.parent}")) as server:
            first = server.stdout.readline()
            server.terminate()
            _, said = server.communicate(timeout=60)
        if name == "whole":
            assert first.startswith("ready ")
        else:
            assert first == "" and server.returncode == 1
            assert f"libkld.so is of build {other[:-1].decode()}, this server of {build[:-1].decode()}" in said
