"""What every end-to-end test uses: the programs under test, and a server with its own sockets.

Programs come from KLD_BIN (a folder with kld-server and kld; default: build/). KLD_BACKEND (or
--backend) names the back end that servers are started with; default cpu. Needs only Debian's
python3-pytest and python3-numpy.
"""
import functools
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
BIN = pathlib.Path(os.environ.get("KLD_BIN", ROOT / "build")).resolve()
START_SECONDS = 60  # a sanitizer build on a busy machine, a driver with many contexts to make; else it takes 0.1


def pytest_addoption(parser):
    parser.addoption("--backend", default=os.environ.get("KLD_BACKEND", "cpu"),
                     choices=["cpu", "cuda"], help="back end of the servers under test")
    parser.addoption("--every", type=int, default=1, help="of the tests, each N-th or so, by their names")
    parser.addoption("--every-from", type=int, default=0, help="which of them")


def pytest_collection_modifyitems(config, items):
    every, first = config.getoption("--every"), config.getoption("--every-from")
    left_out = [item for item in items if (zlib.crc32(item.nodeid.encode()) - first) % every]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if (zlib.crc32(item.nodeid.encode()) - first) % every == 0]


def clean_environment(**extra):
    """The environment without the user's own KLD_ settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KLD_")}
    environment.update({k: str(v) for k, v in extra.items()})
    return environment


@functools.cache
def sanitizer():
    """That of the programs under test: "address", "thread" or None."""
    program = (BIN / "kld-server").read_bytes()
    return next((name for name in ("address", "thread") if f"__{name[0]}san_init".encode() in program), None)


def children_of(pid):
    """{role: pid} of the processes that a server started; workers after the first: "worker1", ..."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            for role, index in zip(arguments, arguments[1:]):
                if role.startswith(b"--role="):
                    number = index.removeprefix(b"--index=")
                    found[(role[7:] + (b"" if number == b"0" else number)).decode()] = int(entry.name)
    return found


def wait_until(condition, seconds=None, what="the condition"):
    """Polls until condition() is true and returns its value; fails the test after that, and one more look. Where nothing
    is said a machine with other work has its time: nobody waits for it but a test that fails."""
    seconds = seconds or (60 if sanitizer() else 30)
    end = time.monotonic() + seconds
    while True:
        late = time.monotonic() >= end
        value = condition()
        if value:
            return value
        assert not late, f"{what}: not within {seconds} s"
        time.sleep(0.01)


def settled(reading):
    """What two readings in a row say: what is given back on threads is so whenever those have had their turn."""
    readings = [reading()]

    def alike():
        time.sleep(0.3)
        readings.append(reading())
        return readings[-1] == readings[-2]
    wait_until(alike, what="a reading that stays as it is")
    return readings[-1]


def suspend(pid):
    """SIGSTOP, and until it is so: the signal reaches one thread, and the others may run until that one has had a turn."""
    def stopped():
        try:
            return {(task / "stat").read_text().rsplit(")", 1)[1].split()[0]
                    for task in pathlib.Path(f"/proc/{pid}/task").iterdir()} == {"T"}
        except (FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            return False

    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(stopped, what=f"that {pid} stops")
    except AssertionError:
        os.kill(pid, signal.SIGCONT)
        raise


def needs(module):
    """A module of tests/requirements.txt; where it is missing the test is skipped, and in CI it fails, unless the Python
    package is tried in an environment of its own."""
    if importlib.util.find_spec(module) is None:
        wanted = os.environ.get("CI") == "true" and not os.environ.get("KLD_PYTHON_INSTALLED")
        (pytest.fail if wanted else pytest.skip)(f"{module} is not installed (tests/requirements.txt)")


def each_key_once(pairs):
    keys = [key for key, _ in pairs]
    assert len(set(keys)) == len(keys), f"a key is there twice: {keys}"
    return dict(pairs)


SILENT = b"the worker is not ready; try again"


class Server:
    """One kld-server with a folder of its own. flags: {"log_level": "debug", ...}; http="" for none."""

    def __init__(self, backend="cpu", environment=None, wait=True, arguments=(), limit=None, within=(), **flags):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="kld-test-"))
        self.log_path = self.folder / "log"
        flags.setdefault("http", "127.0.0.1:0")
        flags.setdefault("unix", str(self.folder / "kld.sock"))
        flags.setdefault("backend", backend)
        flags.setdefault("keep_buffer_ms", 500)  # tests wait for free memory; measurements give None, for the default
        flags.setdefault("worker_wait_ms", 20000)  # a busy machine keeps any worker silent for longer than the default
        for name, value in json.loads(os.environ.get("TEST_FLAGS", "{}")).items():  # as of a larger machine: README.md
            flags.setdefault(name, value)
        if "TEST_SANDBOX" in os.environ:  # make coverage: counters are files
            flags.setdefault("sandbox", os.environ["TEST_SANDBOX"])
        self.flags = flags
        # limit: of descriptors, the hard one too.
        self.arguments = ["prlimit", f"--nofile={limit}:{limit}"] * (limit is not None)
        self.arguments += [*within, str(BIN / "kld-server")]  # within: a command that executes it
        self.arguments += [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()
                           if value is not None]
        self.arguments += list(arguments)
        self.environment = clean_environment(**(environment or {}))
        self.process, self.may_crash = None, False
        self.address = self.http = self.unix = self.url_unix = self.backend = None
        self.start(wait)

    def start(self, wait=True):
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(self.arguments, stdout=subprocess.PIPE, stderr=log,
                                            stdin=subprocess.DEVNULL, env=self.environment)
        if wait:
            self.wait_ready()

    def wait_ready(self, seconds=START_SECONDS, line=None):
        """Reads the ready line, if it was not yet read; fails with the log if there is none."""
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        self.ready_line = (line or self.process.stdout.readline()).decode()
        timer.cancel()
        match = re.fullmatch(r"ready http=(\S*) unix=(\S+) backend=(\w+) devices=(\d+)\n",
                             self.ready_line)
        assert match, f"no ready line but {self.ready_line!r}; log:\n{self.log()}"
        self.address, self.unix, self.backend = match.groups()[:3]
        self.http = f"http://{self.address}"
        self.url_unix = f"unix:{self.unix}"
        return self

    def wait_linked(self):
        """The gateway reports after a second even if it has no worker yet: a busy machine may be that slow."""
        wait_until(lambda: self.request("/v2/health/ready")[0] == 200, START_SECONDS, "readiness")
        return self

    def log(self):
        return self.log_path.read_text(errors="replace")

    def log_lines(self, begin=0):
        """Of a log in JSON: what each line says. A key that is there twice fails: readers keep either."""
        return [json.loads(line, object_pairs_hook=each_key_once) for line
                in self.log()[begin:].rpartition("\n")[0].splitlines()]  # the last may just be being written

    @property
    def pid(self):
        return self.process.pid

    def child(self, role, seconds=START_SECONDS):
        """The pid of "worker", "worker1" or "gateway", waiting for one if it is just being replaced."""
        return wait_until(lambda: children_of(self.pid).get(role), seconds, f"a {role}")

    def kill_child(self, role, signal_number=signal.SIGKILL):
        """Kills it; returns its pid once it is gone."""
        pid = self.child(role)
        os.kill(pid, signal_number)
        wait_until(lambda: children_of(self.pid).get(role) != pid, START_SECONDS, f"the end of {role}")
        return pid

    def request(self, path, data=None, headers=None, method=None, timeout=60):
        """One HTTP request -> (status, headers, body as bytes); an error status is no exception."""
        request = urllib.request.Request(self.http + path, data=data, headers=headers or {},
                                         method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return reply.status, reply.headers, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read()

    def heard(self, *what, **more):
        """The same, again while the gateway says that its worker is not ready: lost, or silent for too long."""
        def answer():
            reply = self.request(*what, **more)
            return None if reply[0] == 503 and SILENT in reply[2] else reply
        return wait_until(answer, what="a worker that is heard")

    def json(self, path, body=None, **more):
        """The same with JSON in and out -> (status, object)."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        status, _, reply = self.request(path, data, headers, **more)
        return status, json.loads(reply) if reply else None

    def metrics(self, headers=None):
        """/metrics as {name with labels: value}; headers: whose right it is."""
        status, _, body = self.request("/metrics", None, headers)
        assert status == 200
        lines = [line for line in body.decode().splitlines() if line and line[0] != "#"]
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def connect(self):
        """A raw connection on the Unix socket."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(60)
        connection.connect(self.unix)
        return connection

    def stop(self, signal_number=signal.SIGTERM, seconds=60):
        """Ends it; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.process.stdout.close()
        return status

    def remove(self):
        """Ends it whatever its state and removes its folder."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


SANITIZER = re.compile(r"ERROR: (Address|Leak|Thread)Sanitizer|WARNING: ThreadSanitizer|runtime error:"
                       r"|SUMMARY: \w+Sanitizer")


# Of which the supervisor makes another one, and nobody else would tell.
CRASH = re.compile(r"child died.*?\bsignal\"?[=:](4|6|7|8|11)\b")


def trouble(server):
    """What its log says that is wrong whatever was tested."""
    log = server.log()
    return (["a sanitizer report"] * bool(SANITIZER.search(log)) +
            ["a child crashed"] * bool(CRASH.search(log) and not server.may_crash))


@pytest.fixture(scope="session")
def backend(request):
    return request.config.getoption("--backend")


@pytest.fixture
def make_server(backend):
    """make_server(log_level="debug", ...) -> Server. Those still running at the end of the test must
    stop with status 0, no sanitizer may have said anything, and no child may have crashed."""
    servers = []

    def make(**arguments):
        servers.append(Server(**{"backend": backend, **arguments}))
        return servers[-1]

    yield make
    problems = []
    for server in servers:
        try:
            running = server.process.poll() is None
            if running and server.stop() != 0:
                problems.append(f"exit status {server.process.returncode}")
            if not running and server.process.returncode not in (0, 1, 2, -signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT):
                problems.append(f"ended with {server.process.returncode}")
            problems.extend(trouble(server))
            if problems:
                problems.append(server.log())
        finally:
            server.remove()
    assert not problems, "\n".join(problems)


def end_well(one):
    """Ends a server that tests have left serving."""
    alive = one.process.poll() is None
    status = one.stop() if alive else one.process.returncode
    log, problems = one.log(), trouble(one)
    one.remove()
    assert alive, f"the server ended during the tests, status {status}:\n{log}"
    assert status == 0, log
    assert not problems, f"{problems}\n{log}"


@pytest.fixture(scope="module")
def server(backend):
    """One server for all tests of a file; they must leave it serving."""
    one = Server(backend=backend).wait_linked()
    yield one
    end_well(one)


@pytest.fixture
def cli(backend):
    """cli("div", "a.npy", ...) -> CompletedProcess of the kld tool, text in and out."""
    def run(*arguments, environment=None, timeout=120, **more):
        return subprocess.run([str(BIN / "kld"), *map(str, arguments)], capture_output=True, text=True,
                              timeout=timeout, env=clean_environment(**(environment or {})), **more)
    return run


@pytest.fixture(scope="module")
def servers(backend):
    """Three that are alike, none of which is to end before its tests do."""
    made = [Server(backend=backend, threads=1) for _ in range(3)]
    yield made
    for one in made:
        end_well(one)
