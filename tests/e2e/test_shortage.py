"""A server that runs short of something while it serves: descriptors, memory, room for its log, room in /dev/shm, a clock. Who is
there is served or told why not, nobody is answered wrongly, no process ends, and with room again all is as before."""
import contextlib
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import types

import numpy as np
import pytest

import oip
import wire
from conftest import BIN, children_of, clean_environment, suspend, wait_until
from httplib import PREFIX, Shared, close, is_sanitized, probabilities, register, unregister
from oip import INFER, Connection, infer
from unixlib import Case

Q, P = probabilities((2, 8), 1), probabilities((2, 8), 2)
TRUTH = oip.expected(Q, P)["loss"]


def pids_of(server):
    return {"supervisor": server.pid, **children_of(server.pid)}


def ask(connection, q=Q, p=P, binary=True):
    headers, data = oip.body({"predictions": q, "targets": p}, None, None, binary)
    status, reply_headers, reply = connection.ask("POST", INFER, data, headers)
    return status, oip.parse(reply_headers, reply)[1]["loss"] if status == 200 else json.loads(reply)["error"]


def right(connection, **more):
    status, got = ask(connection, **more)
    assert status == 200, got
    close(got, TRUTH, "FP32")


@contextlib.contextmanager
def limited(pid, what, value):
    """The soft limit of a process that runs; its own again at the end."""
    soft, hard = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (value, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # told by the caller
            resource.prlimit(pid, what, (soft, hard))


def no_more_descriptors(pid):
    """A driver closes files that it opened before others: the lowest number that is free, not the one behind all."""
    held = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    return limited(pid, resource.RLIMIT_NOFILE, min(set(range(len(held) + 1)) - held))


def cpu_s(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- Descriptors -------------------------------------------------------------------------------------

def test_a_gateway_without_descriptors(make_server):
    server = make_server(shm_prefix=PREFIX)
    pid, before = server.child("gateway"), pids_of(server)
    with Connection(server) as connection, Shared(4096) as shared:
        right(connection)
        late, answers = [], []
        with no_more_descriptors(pid):
            newcomers = [socket.create_connection(server.address.rsplit(":", 1), 60) for _ in range(20)]
            begin, used = time.monotonic(), cpu_s(pid)
            for _ in range(20):
                right(connection)
                body = json.dumps({"key": shared.key, "offset": 0, "byte_size": 4096}).encode()
                status, _, reply = connection.ask("POST", "/v2/systemsharedmemory/region/r/register", body)
                assert status in (200, 500, 503), reply
                if status == 200:
                    connection.ask("POST", "/v2/systemsharedmemory/region/r/unregister", b"")
                answers.append(status)
                time.sleep(0.05)
            assert cpu_s(pid) - used < 0.5 * (time.monotonic() - begin), "it spins"
        assert set(answers) != {200}, "a descriptor was there all the time"
        for newcomer in newcomers:
            newcomer.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        for newcomer in newcomers:
            late.append(newcomer.recv(12))
            newcomer.close()
        assert late == [b"HTTP/1.1 200"] * 20
        assert register(server, "r", shared, 4096) == (200, None) and unregister(server) == 200
    assert pids_of(server) == before


def test_a_worker_without_descriptors(make_server):
    server = make_server()
    pid, before = server.child("worker"), pids_of(server)
    with wire.Client(server.unix) as client, Connection(server) as connection:
        case, memory = Case(client), wire.Memory(1 << 16)
        client.run(case.shape, case.tensors())
        right(connection)
        with no_more_descriptors(pid):
            newcomer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            newcomer.settimeout(60)
            newcomer.connect(server.unix)
            newcomer.send(wire.frame(wire.HELLO, 1, wire.HELLO_BODY.pack(1, 1, 0, b"late")))
            begin, used, told = time.monotonic(), cpu_s(pid), 0
            for _ in range(20):
                with pytest.raises(wire.Failed) as failed:
                    client.region(memory)
                told += failed.value.status in ("no_memory", "unavailable", "throttled", "busy")
                assert np.isfinite(client.run(case.shape, case.tensors())["loss"])
                right(connection)
                time.sleep(0.05)
            assert told == 20, failed.value
            assert cpu_s(pid) - used < 0.5 * (time.monotonic() - begin), "it spins"
        assert len(newcomer.recv(wire.FRAME_BYTES)) > wire.HEADER.size  # WELCOME: it waited in the backlog
        newcomer.close()
        client.drop(client.region(memory))
        case.close()
        memory.close()
    assert pids_of(server) == before


def test_a_supervisor_without_descriptors(make_server):
    """It cannot start anybody meanwhile, and does so as soon as it can."""
    server = make_server(restart_ms_max=200)
    with Connection(server) as connection:
        right(connection)
        with no_more_descriptors(server.pid):
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE,
                             (3, resource.prlimit(server.pid, resource.RLIMIT_NOFILE)[1]))
            server.kill_child("worker")
            wait_until(lambda: "child not started" in server.log(), what="a start that fails")
            time.sleep(1)
            assert server.process.poll() is None and "worker" not in children_of(server.pid)
            assert cpu_s(server.pid) < 5
        server.child("worker")
        right(connection)
        server.kill_child("gateway")
        wait_until(lambda: server.request("/v2/health/ready")[0] == 200, what="readiness")
    infer(server, {"predictions": Q, "targets": P})


# ---- Memory --------------------------------------------------------------------------------------------

def address_space(pid):
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


@pytest.mark.skipif(is_sanitized(), reason="a sanitizer ends a process that gets no memory")
@pytest.mark.parametrize("role, room", [("worker", 0), ("worker", 3 << 20), ("gateway", 300 << 10), ("gateway", 3 << 20),
                                        ("supervisor", 0)])
def test_without_memory(make_server, role, room):
    """Small and large requests of both fronts while one process gets no more address space. A CUDA worker has been seen
    to end by SIGSEGV then, in whose code is not known: it may be replaced, and the others carry on."""
    server = make_server(shm_prefix=PREFIX, staging_bytes_max="64M", staging_request_bytes_max="1M", pool_bytes_max="256M",
                         threads=2, restart_ms_max=200)
    server.may_crash = server.backend == "cuda"
    before, pid = pids_of(server), pids_of(server)[role]
    big = probabilities((100, 3000), 3)
    stop, problems, told = threading.Event(), [], []

    def http(binary, q, truth):
        try:
            while not stop.is_set():
                try:
                    with Connection(server) as connection:
                        for _ in range(10):
                            status, got = ask(connection, q, q if q is big else P, binary)
                            if status == 200:
                                close(got, truth, "FP32")
                            else:
                                assert status in (500, 503), got
                                told.append(got)
                except ConnectionError:
                    pass
        except Exception as problem:  # noqa: BLE001 - told below
            problems.append(problem)

    def unix():
        try:
            while not stop.is_set():
                try:
                    with wire.Client(server.unix) as client:
                        for _ in range(5):
                            case = Case(client, 64, 1000)
                            got = client.run(case.shape, case.tensors())["loss"]
                            assert abs(got / oip.expected(case.q, case.p)["loss"][0] - 1) < 1e-6
                            client.drop(client.region_add(wire.POOL, 32 << 20))
                            client.drop(case.region)
                            case.close()
                except (wire.Ended, ConnectionError):
                    pass
                except wire.Failed as failed:
                    assert failed.status in ("no_memory", "unavailable", "busy", "internal"), failed
                    told.append(failed.text)
        except Exception as problem:  # noqa: BLE001 - told below
            problems.append(problem)

    threads = [threading.Thread(target=http, args=arguments) for arguments in (
        (True, Q, TRUTH), (False, Q, TRUTH), (True, big, oip.expected(big, big)["loss"]),
        (False, big, oip.expected(big, big)["loss"]))] + [threading.Thread(target=unix) for _ in range(2)]
    try:
        with limited(pid, resource.RLIMIT_AS, address_space(pid) + room):
            for thread in threads:
                thread.start()
            if role == "supervisor":
                server.kill_child("worker")
            time.sleep(1.5)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "waits for an answer that does not come"
    assert not problems, problems[0]
    if role == "supervisor":
        assert server.process.poll() is None
    else:
        after = pids_of(server)
        if role == "worker" and server.backend == "cuda":
            wait_until(lambda: server.request("/v2/health/ready")[0] == 200, 30, "a worker")
            before.pop("worker"), after.pop("worker", None)
        assert after == before, server.log()[-3000:]
    infer(server, {"predictions": big, "targets": big})
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == 0, what="free staging")


STACK_BYTES = 1 << 20  # KLD_STACK_BYTES


def test_stacks_do_not_have_to_grow(make_server):
    """Where there is no more address space that is a fault, and no error of one request."""
    for role, pid in pids_of(make_server()).items():
        stack = re.search(r"VmStk:\s*(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text())[1]
        assert int(stack) << 10 >= STACK_BYTES, role


@pytest.mark.skipif(is_sanitized(), reason="a sanitizer ends a process that gets no memory")
def test_a_reload_without_memory(make_server):
    """The supervisor has the threads that read files again from the start."""
    server = make_server()
    with limited(server.pid, resource.RLIMIT_AS, address_space(server.pid)):
        os.kill(server.pid, signal.SIGHUP)
        wait_until(lambda: server.process.poll() is not None or re.search(": reload(ed| failed)", server.log()),
                   what="an answer to SIGHUP")
        assert server.process.poll() is None, server.log()
    begin = len(server.log())
    os.kill(server.pid, signal.SIGHUP)
    wait_until(lambda: "reloaded" in server.log()[begin:], what="a reload with memory")


# ---- Room for the log, room in /dev/shm ----------------------------------------------------------------

def serve(command, log, checks, **more):
    """A server whose log goes to `log`, as it is started by `command` and the program's name."""
    with tempfile.TemporaryDirectory(prefix="kld-test-") as folder:
        process = subprocess.Popen([*command, BIN / "kld-server", "--http=127.0.0.1:0", f"--unix={folder}/s", "--backend=cpu",
                                    "--log-level=debug", f"--shm-prefix={PREFIX}", "--http-threads=1"], stdout=subprocess.PIPE,
                                   stderr=log, env=clean_environment(), **more)
        try:
            line = process.stdout.readline().decode()
            assert line.startswith("ready "), line
            address = line.split("http=")[1].split()[0]
            checks(types.SimpleNamespace(address=address, pid=process.pid))
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def lost_lines(connection):
    text = connection.ask("GET", "/metrics")[2].decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("kld_log_lines_lost_total"))


def serves_without_log(server):
    children = children_of(server.pid)
    with Connection(server) as connection:
        for _ in range(50):
            right(connection)
        wait_until(lambda: lost_lines(connection) > 0, what="lines being counted as lost")
        os.kill(children["worker"], signal.SIGKILL)
        right(connection)
    now = children_of(server.pid)
    assert now["gateway"] == children["gateway"], "the gateway was replaced"


def test_a_full_disk_under_the_log():
    with open("/dev/full", "wb") as full:
        serve([], full, serves_without_log)


def test_files_may_not_grow(make_server):
    """RLIMIT_FSIZE is told by a signal too, which would end who writes his log."""
    server = make_server(log_level="debug")
    before, size = pids_of(server), os.path.getsize(server.log_path)
    with Connection(server) as connection, contextlib.ExitStack() as stack:
        right(connection)
        for pid in before.values():
            stack.enter_context(limited(pid, resource.RLIMIT_FSIZE, size + 4096))
        wait_until(lambda: [right(connection) for _ in range(20)] and lost_lines(connection) > 0, 60, "a full log")
        for _ in range(20):
            right(connection)
    assert pids_of(server) == before


def test_a_log_that_nobody_reads_any_more():
    """The reader of the pipe is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        serve([], writer, serves_without_log)
    finally:
        os.close(writer)


def may_mount():
    """In a mount namespace of its own: seccomp of containers forbids that to root, too."""
    tried = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=256k", "none", "/dev/shm"],
                           capture_output=True) if shutil.which("unshare") else None
    return bool(tried) and tried.returncode == 0


def test_shared_memory_without_room():
    """Results that do not fit /dev/shm are an error of their request; the next one has its answer."""
    if not may_mount() and os.environ.get("CI") != "true":
        pytest.skip("needs unshare --mount")
    script = 'mount -t tmpfs -o size=256k none /dev/shm && exec "$@"'

    def checks(server):
        path = pathlib.Path(f"/proc/{server.pid}/root/dev/shm{PREFIX}room")
        q, size = probabilities((100, 400), 5), 160000
        with open(path, "w+b") as file, Connection(server) as connection:
            file.truncate(3 * size)
            file.seek(0)
            file.write(q.tobytes()[:80000])
            file.flush()
            body = json.dumps({"key": f"{PREFIX}room", "offset": 0, "byte_size": 3 * size}).encode()
            assert connection.ask("POST", "/v2/systemsharedmemory/region/r/register", body)[0] == 200

            def region(name, offset, rows):
                return {"name": name, "shape": [rows, 400], "datatype": "FP32", "parameters": {
                    "shared_memory_region": "r", "shared_memory_offset": offset, "shared_memory_byte_size": rows * 1600}}
            statuses = []
            for rows in (100, 20):
                request = {"inputs": [region("predictions", 0, rows), region("targets", 0, rows)],
                           "outputs": [{"name": "grad_predictions", "parameters": region("", 2 * size, rows)["parameters"]}]}
                # Of the large one 160000 bytes have to find room beside 80000 of 262144.
                if rows == 100:
                    file.seek(size)
                    file.write(bytes(100000))
                    file.flush()
                status, _, reply = connection.ask("POST", INFER, json.dumps(request).encode())
                statuses.append((status, reply))
            assert statuses[0][0] in (500, 503, 507) and b"cannot be written" in statuses[0][1], statuses
            right(connection)
        path.unlink()

    serve(["unshare", "--mount", "sh", "-c", script, "sh"], subprocess.DEVNULL, checks)


# ---- A clock that jumps ----------------------------------------------------------------------------------

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static int (*real)(clockid_t, struct timespec *);
/* A day ahead, then a day behind, each 20 ms. */
static long jump(void) {
    struct timespec now;
    real(CLOCK_MONOTONIC, &now);
    return (now.tv_nsec / 20000000) % 2 ? 86400 : -86400;
}
int clock_gettime(clockid_t clock, struct timespec *time) {
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, time);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
        time->tv_sec += jump();
    return result;
}
int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *ret) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (ret)
        *ret = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.mark.skipif(is_sanitized(), reason="a sanitizer wants to be loaded first")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a compiler")
def test_a_clock_that_jumps(make_server, tmp_path):
    """Deadlines, idle times, pauses before restarts and the drain go by the clock that does not."""
    (tmp_path / "clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", tmp_path / "clock.so", tmp_path / "clock.c", "-ldl"], check=True)
    server = make_server(environment={"LD_PRELOAD": tmp_path / "clock.so"}, http_deadline_ms=5000, http_idle_ms=5000)
    with Connection(server) as connection, wire.Client(server.unix) as client:
        case = Case(client)
        begin = time.monotonic()
        while time.monotonic() - begin < 1.5:
            right(connection)
            assert np.isfinite(client.run(case.shape, case.tensors(), timeout_ns=5 * 10**9)["loss"])
        suspend(server.child("worker"))
        try:
            begin = time.monotonic()
            headers, data = oip.body({"predictions": Q, "targets": P}, None, {"timeout": 300000})
            status, _, reply = connection.ask("POST", INFER, data, headers)
            assert status == 408 and 0.25 < time.monotonic() - begin < 20, reply
        finally:
            os.kill(server.child("worker"), signal.SIGCONT)
        right(connection)
        case.close()
    server.kill_child("worker")
    with Connection(server) as connection:
        right(connection)

    def has_jumped():  # it says another thing of a time each 20 ms, to those that log something then
        os.kill(server.pid, signal.SIGHUP)
        return len({line[:10] for line in server.log().splitlines()}) > 1
    wait_until(has_jumped, what="a clock that jumps")
