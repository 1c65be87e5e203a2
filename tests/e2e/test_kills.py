"""Every process of a server is killed at random, over and over, under load: the others go on, nothing is answered wrongly,
everybody is answered or told, and nothing is left behind in /dev/shm or on disk."""
import contextlib
import os
import pathlib
import random
import re
import signal
import socket
import time
import types

import pytest

import soaklib
from conftest import children_of, wait_until
from httplib import PREFIX

KINDS = ["http_json", "http_binary", "http_binary", "http_shm", "http_tensors", "unix", "unix", "unix_share"]
SECONDS, KILLS = 5, 6  # at least


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Crowd:
    """A process for each client. No threads here: they are forked."""

    def __init__(self, server, roles):
        self.ledger, jobs, self.pids = soaklib.Ledger(len(KINDS)), soaklib.make_jobs(), {}
        for index, kind in enumerate(KINDS):
            pid = os.fork()
            if pid == 0:
                try:
                    one = types.SimpleNamespace(address=server.address, unix=server.unix + ".1" * (index % 2))
                    soaklib.Client(kind, index, self.ledger, one, jobs, 0.002, under_fire=roles).run()
                finally:
                    os._exit(0)
            self.pids[pid] = f"{kind} {index}"

    def right(self):
        return self.ledger.rows[:, soaklib.FIELDS.index("right")].copy()

    def all_go_on(self):
        """Each of them gets right answers again."""
        before = self.right()
        wait_until(lambda: self.ledger.told() or (self.right() > before).all(), 40, "right answers to each client")
        assert not self.ledger.told()

    def stop(self):
        self.ledger.stop[0] = 1
        end, there = time.monotonic() + 90, dict(self.pids)
        while there and time.monotonic() < end:
            there = {pid: name for pid, name in there.items() if not os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.02)
        for pid in there:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pid in self.pids:
            soaklib.sweep(pid)
        return list(there.values())


def restart(server):
    """Its supervisor is killed; another one starts on the same socket and port while the clients keep asking."""
    children = list(children_of(server.pid).values())
    server.process.kill()
    server.process.wait()
    server.process.stdout.close()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children), 20, "the end of the children")
    server.start()


def left_on_disk(server):
    return sorted(path.name for path in pathlib.Path(server.folder).iterdir())


def in_shm():
    """What has a name there and is not another test's."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("kld") and not name.startswith(PREFIX[1:])}


@pytest.mark.parametrize("roles", [["worker", "worker1"], ["gateway"], ["worker", "worker1", "gateway", "supervisor"]],
                         ids=["workers", "gateway", "all"])
def test_killed_at_random(make_server, roles):
    shm = in_shm()
    server = make_server(http=f"127.0.0.1:{free_port()}", device="0,0", threads=1, restart_ms_max=200, shm_prefix=PREFIX,
                         staging_bytes_max="64M", staging_request_bytes_max="1M", pool_bytes_max="128M")
    crowd, chosen, killed = Crowd(server, roles), random.Random(len(roles)), []
    try:
        crowd.all_go_on()
        begun = time.monotonic()
        while time.monotonic() < begun + SECONDS or len(killed) < KILLS:
            assert time.monotonic() < begun + 60, f"{len(killed)} of {KILLS} killed"
            role = chosen.choice(roles)
            pid = server.pid if role == "supervisor" else children_of(server.pid).get(role)
            if role == "supervisor":
                restart(server)
            elif pid in killed:  # it takes its time to die
                pid = None
            elif pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed += [pid] if pid else []
            time.sleep(chosen.uniform(0.05, 0.5))
            assert not crowd.ledger.told(), crowd.ledger.told()
        crowd.all_go_on()
    finally:
        waiting = crowd.stop()
    assert not waiting, f"wait for an answer that does not come: {waiting}"
    sums = crowd.ledger.sums()
    assert not crowd.ledger.told() and sums["wrong"] == sums["lost"] == 0, crowd.ledger.told()
    assert sums["right"] > 50, (sums, killed)

    def died():
        return {int(pid): int(number) for pid, number
                in re.findall(r"child died child=\S+ child_pid=(\d+) signal=(\d+)", server.log())}
    wait_until(lambda: "supervisor" in roles or len(died()) >= len(killed), what="the deaths")
    assert set(died()) <= set(killed) and set(died().values()) <= {9}, (died(), killed)
    assert " warn  supervisor: child exited" not in server.log(), server.log()

    def nothing_held():
        metrics = server.metrics()
        return all(metrics[name] == 0 for name in ("kld_staging_bytes", "kld_http_requests_in_flight")) and \
            pathlib.Path(f"/proc/{server.child('worker')}/maps").read_text().count("memfd:kld-test") == 0
    wait_until(nothing_held, 20, "nothing being held")
    assert left_on_disk(server) == ["kld.sock", "kld.sock.1", "log"]
    assert server.stop() == 0
    assert left_on_disk(server) == ["log"] and in_shm() <= shm
