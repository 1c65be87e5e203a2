#!/usr/bin/env python3
"""A soak: 32 clients of every kind (tests/e2e/soaklib.py) on one server for a given time, each a process, some of which are
killed and replaced all the time. Every answer is compared with NumPy in FP64; memory, descriptors, mappings and threads of
every role are sampled and have to stay flat; in the end nothing of the clients may be left. Prints JSON; the exit status is
0 where all of that held. Needs the programs in KLD_BIN.

  soak.py [--seconds S] [--sample S] [--pause MS] [--death MS] [--seed N]

Flat: the median of the last quarter of the samples is at most that of the second one and an allowance. Of memory it is
judged from 300 s on: before that allocators have not seen all sizes on all threads yet. What is judged is resident memory
but for that which clients share (own_kib): their regions come and go, and with them ten megabytes of rss_kib; one that
stayed would show in the mappings, and in what is left behind. The process's own memory
(anonymous_kib) is judged at rest, when the last client has gone, against that before the first one came: with the CPU back
end the buffers of requests that run are in it."""
import argparse
import json
import os
import pathlib
import random
import re
import signal
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))
import oip  # noqa: E402
import soaklib  # noqa: E402
from argumentlib import how_long, need  # noqa: E402
from conftest import BIN, SANITIZER, Server, children_of, wait_until  # noqa: E402
from httplib import PREFIX  # noqa: E402
from loadlib import commit  # noqa: E402

# What the last quarter may have more than the second, and of memory a share of the second's as well. A worker starts
# and ends a thread on demand (server/worker/strays.c).
ALLOWANCE = {"own_kib": 1024, "fds": 4, "mappings": 8, "threads": 1}
MEMORY_SHARE = {"own_kib": 0.05}
# What a process's own memory may have grown by, at rest: the first burst leaves 4 to 5.5 MB with the gateway's allocator,
# later ones hardly more. Half an hour would make 16 bytes lost with each request stand out.
REST_KIB = 6144
MEMORY_SECONDS = 300
FLAGS = {"shm_prefix": PREFIX, "staging_bytes_max": "64M", "staging_request_bytes_max": "1M", "pool_bytes_max": "256M"}


def look_at(pid):
    """What a process holds."""
    here = pathlib.Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (here / "status").read_text().splitlines())
    kib = {name: int(status[name].split()[0]) for name in ("VmRSS", "RssAnon", "RssShmem")}
    return {"rss_kib": kib["VmRSS"], "own_kib": kib["VmRSS"] - kib["RssShmem"], "anonymous_kib": kib["RssAnon"],
            "fds": len(os.listdir(here / "fd")), "mappings": (here / "maps").read_text().count("\n"), "threads": int(status["Threads"])}


def roles_of(server):
    return {"supervisor": server.pid, **children_of(server.pid)}


class Crowd:
    """The clients' processes. No threads here: they are forked."""

    def __init__(self, options, server, jobs):
        self.options, self.server, self.jobs = options, server, jobs
        self.ledger = soaklib.Ledger(len(soaklib.KINDS))
        self.pids, self.killed = {}, 0
        self.mortal = range(0, len(soaklib.KINDS), 3)
        for index in range(len(soaklib.KINDS)):
            self.start(index)

    def start(self, index):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                client = soaklib.Client(soaklib.KINDS[index], index, self.ledger, self.server, self.jobs,
                                        self.options.pause / 1000)
                client.run()
                status = 0
            finally:
                os._exit(status)
        self.pids[index] = pid

    def kill_one(self, chosen):
        index = chosen.choice(self.mortal)
        pid = self.pids[index]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        soaklib.sweep(pid)
        self.ledger.bury(index)
        self.killed += 1
        self.start(index)

    def check(self):
        for index, pid in self.pids.items():
            if os.waitpid(pid, os.WNOHANG)[0]:
                raise RuntimeError(f"{soaklib.KINDS[index]} {index} ended by itself: {self.ledger.told()}")

    def stop(self, seconds=120):
        """True: all of them ended when they were told to."""
        self.ledger.stop[0] = 1
        end, there = time.monotonic() + seconds, dict(self.pids)
        while there and time.monotonic() < end:
            there = {index: pid for index, pid in there.items() if not os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.05)
        for index, pid in there.items():
            self.ledger.tell(f"{soaklib.KINDS[index]} {index} waits for an answer that does not come")
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            row = self.ledger.rows[index]
            row[3] += row[0] - row[1:].sum()
        for pid in self.pids.values():
            soaklib.sweep(pid)


def soak(options, server, crowd):
    """Until the time is over -> [{"s": seconds, role: look_at()}]."""
    chosen, begun, samples = random.Random(options.seed), time.monotonic(), []
    end, next_death, next_sample = begun + options.seconds, begun + 1, begun
    while (now := time.monotonic()) < end:
        crowd.check()
        if options.death and now >= next_death:
            crowd.kill_one(chosen)
            next_death = now + chosen.expovariate(1000 / options.death)
        if now >= next_sample:
            samples.append({"s": round(now - begun, 1), **{role: look_at(pid) for role, pid in roles_of(server).items()}})
            next_sample += options.sample
        time.sleep(0.01)
    return samples


def flatness(samples, seconds, sanitized):
    """{role: {what: [median of the second quarter, of the last one, is it flat]}}; None: not judged."""
    found, quarter = {}, len(samples) // 4
    for role in samples[0]:
        if role == "s":
            continue
        found[role] = {}
        for what, allowed in ALLOWANCE.items():
            second, last = (statistics.median(sample[role][what] for sample in part)
                            for part in (samples[quarter:2 * quarter], samples[-quarter:]))
            flat = last <= second + max(allowed, second * MEMORY_SHARE.get(what, 0))
            if (what in MEMORY_SHARE and seconds < MEMORY_SECONDS) or (sanitized and what in ("own_kib", "mappings")):
                flat = None
            found[role][what] = [second, last, flat]
    return found


GAUGES = ["kld_staging_bytes", "kld_http_requests_in_flight", "kld_http_regions", "kld_http_tensors", 'kld_pool_bytes{worker="0"}']


def held(server):
    """What clients may have left behind: descriptors and mappings of theirs, and what the gauges know."""
    metrics, pids = server.metrics(), roles_of(server)
    found = {name: metrics[name] for name in GAUGES}
    found["client_mappings"] = pathlib.Path(f"/proc/{pids['worker']}/maps").read_text().count("memfd:kld-test")
    for role, pid in pids.items():
        found[f"{role}_fds"] = len(os.listdir(f"/proc/{pid}/fd"))
    return found


def settle(server, before):
    """What is still held some time after the last client has gone and was not before -> {name: [before, after]}."""
    def more():
        now = held(server)
        return {name: [was, now[name]] for name, was in before.items() if now[name] > was}
    try:
        wait_until(lambda: not more(), 15)
    except AssertionError:
        pass
    return more()


def warm_up(server, jobs):
    """Every kind once and every job once, so that what is opened once and kept is no leak; and the oracle is right."""
    ledger = soaklib.Ledger(len(set(soaklib.KINDS)))
    for index, kind in enumerate(sorted(set(soaklib.KINDS))):
        client = soaklib.Client(kind, index, ledger, server, jobs, 0)
        try:
            getattr(client, kind)()
        except soaklib.Left:
            pass
    for job in jobs[0] + jobs[1]:
        asked = {name: {"binary_data": True} for name in soaklib.OUTPUTS}
        job.check(oip.infer(server, {"predictions": job.q, "targets": job.p}, asked, job.parameters)[1])
    if ledger.told() or ledger.sums()["wrong"]:
        raise RuntimeError(f"before the soak: {ledger.told()}")


def own_memory(server):
    return {role: look_at(pid)["anonymous_kib"] for role, pid in roles_of(server).items()}


def cpu_model():
    match = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return match.group(1).strip() if match else "unknown"


def packed(samples):
    """{role: {what: [values]}}, a tenth of the text."""
    roles = [role for role in samples[0] if role != "s"]
    return {"s": [sample["s"] for sample in samples],
            **{role: {what: [sample[role][what] for sample in samples] for what in (*ALLOWANCE, "rss_kib", "anonymous_kib")} for role in roles}}


def run(options, server):
    program = (BIN / "kld-server").read_bytes()
    sanitized = b"__asan_init" in program or b"__tsan_init" in program
    jobs, at = soaklib.make_jobs(), commit()
    warm_up(server, jobs)
    time.sleep(1)  # what the gateway keeps for the next request has gone
    before, pids, began, rest = held(server), roles_of(server), server.metrics(), own_memory(server)
    crowd = Crowd(options, server, jobs)
    try:
        samples = soak(options, server, crowd)
    finally:
        crowd.stop()
    left, metrics = settle(server, before), server.metrics()
    grown = {role: [rest[role], kib, None if sanitized else kib <= rest[role] + REST_KIB]
             for role, kib in own_memory(server).items() if role in rest}
    counts, flat = crowd.ledger.sums(), flatness(samples, options.seconds, sanitized)
    result = {
        "commit": at, "cpu": cpu_model(), "cpus": os.cpu_count(), "seconds": options.seconds,
        "clients": {kind: soaklib.KINDS.count(kind) for kind in dict.fromkeys(soaklib.KINDS)},
        "clients_killed": crowd.killed, **counts, "problems": crowd.ledger.told()[:20], "left_behind": left,
        "processes_replaced": roles_of(server) != pids,
        "server_counted": {name: metrics[name] - began.get(name, 0) for name in metrics
                           if name.startswith("kld_requests_total{") and metrics[name] != began.get(name, 0)},
        "flat": flat, "allowance": ALLOWANCE | {"share_of_own": MEMORY_SHARE["own_kib"], "at_rest_kib": REST_KIB},
        "anonymous_kib_at_rest": grown, "samples": packed(samples)}
    result["met"] = (counts["wrong"] == counts["lost"] == 0 and not result["problems"] and not left and not result["processes_replaced"]
                     and all(flat_one is not False for role in flat.values() for _, _, flat_one in role.values())
                     and all(same is not False for _, _, same in grown.values()))
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=how_long, default=60)
    parser.add_argument("--sample", type=float, default=0, help="seconds between samples; 0: 200 of them in all, at most one in 0.2 s")
    parser.add_argument("--pause", type=float, default=5, help="mean pause of a client between requests, ms")
    parser.add_argument("--death", type=float, default=300, help="mean time between two killed clients, ms; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    need(BIN / "kld-server")
    options.sample = options.sample or max(options.seconds / 200, 0.2)
    server = Server(backend=options.backend, **FLAGS)
    try:
        result = run(options, server)
        status = server.stop()
        result["server_status"], result["sanitizer"] = status, bool(SANITIZER.search(server.log()))
        result["met"] = result["met"] and status == 0 and not result["sanitizer"]
        if not result["met"]:
            print(server.log()[-20000:], file=sys.stderr)
    finally:
        server.remove()
    print(re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: "[" + re.sub(r",\s+", ", ", m.group(1)) + "]", json.dumps(result, indent=1)))
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
