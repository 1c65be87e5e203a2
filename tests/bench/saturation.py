#!/usr/bin/env python3
"""What is answered where five times as much is asked as the server can take: the answered requests a second against the
peak, what the refused wait for their 503, and the p99 of the answered. The server has one core and the client the other
so gateway and worker share one; where it is the worker that is to be the bottleneck, it has one for itself, and
the gateway is with the client. With eight cores or more (loadlib.py) client, gateway and worker have cores of their own. Pairs of
peak and flood, one after the other; medians. Prints JSON; the exit status says nothing of what was aimed at. Needs the programs
in KLD_BIN, bench-programs among them.

  saturation.py [--backend B] [--rounds N] [--seconds S] [--case C ...] [--flags NAME=VALUE ...]

Peak: 64 connections that ask again at once, the most of two runs. Flood: five times that rate, each request on one of 4,000
connections that waits for nothing; where there is none it is not sent (without_connection_per_s). small: 16 elements in
the body. computed: two tensors of 2 Mi elements that lie on the device, 64 Mi on a GPU, so that the worker is the bottleneck. unix: libkld,
4 processes with 4 requests in flight each, then 20 with 16; nothing is refused there below requests_max. hello: the requests
of small to a bare libmicrohttpd server on that core that answers five bytes: what the library keeps of its peak by itself."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from soak import cpu_model  # and the path to the tests' own modules

import oip
from argumentlib import how_long, how_many, need, setting, stop
from conftest import BIN, Server, clean_environment, wait_until
from httplib import probabilities
from loadlib import PROGRAM, Cores, commit, free_port, on, pin, post, room_for_connections, run_clients

CONNECTIONS, PEAK_CONNECTIONS, TIMES = 4000, 64, 5
AIMS = {"share": 0.9, "refused_p99_ms": 500, "answered_p99_ms": 1000}


def cores_of(name):
    cores = Cores()
    if not cores.apart:
        client, server = (cores.client * 2)[:2]
        cores.client, cores.gateway, cores.worker = [client], [client if name == "computed" else server], [server]
    return cores


def load(options, server, request, mode, connections, seconds, rate=None):
    return run_clients(options.cores.client, options.cores.clients, mode, server.address.rsplit(":", 1)[1], connections, seconds,
                       request=request, rate=rate)


def settle(server):
    """What the last flood left behind has gone."""
    time.sleep(1)
    if isinstance(server, Server):
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 0, 30, "the end of the last flood")


def over_http(options, server, request, connections=CONNECTIONS):
    pairs = []
    load(options, server, request, "load", PEAK_CONNECTIONS, 0.5)
    for _ in range(options.rounds):
        settle(server)
        peak = max(load(options, server, request, "load", PEAK_CONNECTIONS, options.seconds / 2)["requests_per_s"] for _ in range(2))
        pairs.append((peak, load(options, server, request, "flood", connections, options.seconds, rate=TIMES * peak)))
    found = {key: statistics.median(flood[key] for _, flood in pairs) for key in pairs[0][1]}
    return {"peak_per_s": statistics.median(peak for peak, _ in pairs), **found,
            "share": round(statistics.median(flood["answered_per_s"] / peak for peak, flood in pairs), 3),
            "shares": [round(flood["answered_per_s"] / peak, 3) for peak, flood in pairs]}


def small(options, server, connections=CONNECTIONS):
    return over_http(options, server, post(*oip.body({"predictions": probabilities((2, 8), 1),
                                                      "targets": probabilities((2, 8), 2)})), connections)


def clients(options, server):
    return small(options, server, TIMES * PEAK_CONNECTIONS)


class Hello:
    def __init__(self, cores):
        self.address = f"127.0.0.1:{free_port()}"
        with on(cores):
            self.process = subprocess.Popen([PROGRAM, "hello", self.address.rsplit(":", 1)[1]], stdout=subprocess.PIPE)
        assert self.process.stdout.readline().strip() == b"ready"

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.process.kill()
        self.process.wait()


def computed(options, server):
    shape = (512, 4096) if options.backend == "cpu" else (8192, 8192)
    for seed, name in enumerate(("q", "p")):
        status, _, reply = server.request(f"/v2/tensors/{name}?datatype=FP32&shape={shape[0]},{shape[1]}",
                                          probabilities(shape, seed).tobytes(), method="PUT")
        assert status == 200, reply
    inputs = [{"name": name, "shape": shape, "datatype": "FP32", "parameters": {"stored_tensor": stored}}
              for name, stored in (("predictions", "q"), ("targets", "p"))]
    return {"shape": shape, **over_http(options, server, post({}, json.dumps({"inputs": inputs}).encode()))}


def over_unix(options, server):
    def rate(processes, in_flight):
        command = [BIN / "kld", "bench", "--server", server.url_unix, "--shape", "2x8", "--in-flight",
                   str(in_flight), "--seconds", str(options.seconds), "--json"]
        with on(options.cores.client):
            running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment())
                       for _ in range(processes)]
        found = [json.loads(one.communicate()[0]) for one in running]
        assert not any(one["failed"] or one["different"] for one in found), found
        return sum(one["losses_per_s"] for one in found), 1000 * max(one["p99_ms"] for one in found)
    pairs = [(rate(4, 4), rate(20, 16)) for _ in range(options.rounds)]
    shares = [round(flood[0] / peak[0], 3) for peak, flood in pairs]
    return {"peak_per_s": statistics.median(peak[0] for peak, _ in pairs),
            "answered_per_s": statistics.median(flood[0] for _, flood in pairs),
            "answered_p99_us": statistics.median(flood[1] for _, flood in pairs), "refused_per_s": 0, "refused_p99_us": 0,
            "share": statistics.median(shares), "shares": shares}


def judge(case):
    """met: null where nothing was measured against the aim. Where nobody was refused, say, nobody waited for that."""
    case["met"] = {"share": case["share"] >= AIMS["share"]}
    for kind in ("refused", "answered"):
        took = case[f"{kind}_p99_us"] / 1000
        case["met"][f"{kind}_p99_ms"] = took <= AIMS[f"{kind}_p99_ms"] if took else None
    return case


def start(backend, flags):
    try:
        return Server(backend=backend, threads=1, **{"http_threads": 1, **flags})
    except AssertionError as error:  # with the server's log, which says what is wrong with the flags
        stop(error)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default=os.environ.get("KLD_BACKEND", "cpu"), choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=how_many, default=5)
    parser.add_argument("--seconds", type=how_long, default=2)
    parser.add_argument("--case", action="append", choices=["small", "clients", "computed", "unix", "hello"])
    parser.add_argument("--flags", nargs="*", type=setting, default=[], help="NAME=VALUE of the server")
    options = parser.parse_args()
    need(BIN / "kld-server", BIN / "kld", PROGRAM)
    room_for_connections()
    flags = dict(options.flags)
    results = {"commit": commit(), "cpu": cpu_model(), "cpus": os.cpu_count(), "backend": options.backend, "rounds": options.rounds,
               "cores": Cores().described(), "seconds": options.seconds, "flags": flags, "load_before": round(os.getloadavg()[0], 2),
               "aims": AIMS}
    for name, measure in (("small", small), ("clients", clients), ("computed", computed), ("unix", over_unix)):
        if options.case and name not in options.case:
            continue
        options.cores = cores_of(name)
        with on({*options.cores.gateway, *options.cores.worker}):
            server = start(options.backend, flags)
        try:
            pin(server, {"gateway": options.cores.gateway, "worker": options.cores.worker})
            results[name] = judge(measure(options, server))
        finally:
            server.stop()
            server.remove()
    if not options.case or "hello" in options.case:
        options.cores = cores_of("hello")
        with Hello(options.cores.gateway) as server:
            results["hello"] = small(options, server)
    print(json.dumps(results | {"load_after": round(os.getloadavg()[0], 2)}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
