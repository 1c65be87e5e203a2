"""What gateway.py and saturation.py share: who runs where, and the clients' programs. With eight cores or more client,
gateway and worker have their own (a half, a quarter, a quarter of them), and what takes the gateway's place in a comparison
has the gateway's; with fewer they share, as each measurement says. Nothing is measured here."""
import contextlib
import json
import os
import pathlib
import resource
import socket
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))
from conftest import BIN, children_of  # noqa: E402

APART_CORES = 8
PROGRAMS = BIN / "bench/http_load", BIN.parent / "libexec/http_load"  # of a build, of the tarball
PROGRAM = next((path for path in PROGRAMS if path.exists()), PROGRAMS[0])
MINE = frozenset(os.sched_getaffinity(0))


class Cores:
    """client, gateway, worker: sets of cores; clients: how many processes the client may be without standing in its own way."""

    def __init__(self):
        cores = sorted(MINE)
        self.apart = len(cores) >= APART_CORES
        if self.apart:
            half, quarter = len(cores) // 2, len(cores) // 4
            self.client, self.gateway, self.worker = cores[:half], cores[half:half + quarter], cores[half + quarter:]
        else:
            self.client = self.gateway = self.worker = cores
        self.clients = max(len(self.client) // 2, 1) if self.apart else 1

    def described(self):
        return {"client": self.client, "gateway": self.gateway, "worker": self.worker} if self.apart else None


@contextlib.contextmanager
def on(cores):
    """What is started inside has these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin(server, cores_of):
    """Every thread of a running server; cores_of: {role: cores}, those that it does not name have the worker's."""
    for role, pid in {"supervisor": server.pid, **children_of(server.pid)}.items():
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), cores_of.get(role, cores_of["worker"]))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def post(headers, data, length=None, path="/v2/models/kl_div/infer"):
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length or len(data)}"]
    return "\r\n".join(lines + [f"{k}: {v}" for k, v in headers.items()] + ["", ""]).encode() + data


def room_for_connections():
    """As many descriptors as this process may have; those that it starts have them too."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run_clients(cores, count, mode, port, connections, *numbers, request, rate=None):
    """`count` http_loads at once with equal parts of the connections, and of the rate: their sums, the median of their
    medians, the highest of their p99s, and the share of its time that the busiest was at work."""
    command = [str(PROGRAM), mode, str(port), str(connections // count), *map(str, numbers)]
    if rate is not None:
        command.append(str(rate / count))
    with on(cores):
        running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    for one in running:
        one.stdin.write(request)
        one.stdin.close()
    found = [json.loads(one.stdout.read()) for one in running]
    assert not any(one.wait() for one in running), command
    join = {"p50_us": statistics.median, "p99_us": max, "busy": max}
    return {key: next((how for end, how in join.items() if key.endswith(end)), sum)([one[key] for one in found]) for key in found[0]}


def commit():
    """Of the checkout, or of the tarball's tree."""
    told = ROOT / "share/kld/VERSION"
    if told.is_file():
        return told.read_text().split()[1]
    result = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or "unknown"
