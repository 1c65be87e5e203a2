#!/usr/bin/env python3
"""What is answered where five times as much is asked as the server can take: the answered requests a second against the
peak, what the refused wait for their 503, and the p99 of the answered. The server has one core and the client the other
(taskset), so gateway and worker share one; where it is the worker that is to be the bottleneck, it has one for itself, and
the gateway is with the client. Pairs of peak and flood, one after the other; medians. Prints JSON; the exit
status says nothing of what was aimed at. Needs the programs in KLD_BIN, bench-programs among them.

  saturation.py [--rounds N] [--seconds S] [--flags NAME=VALUE ...]

Peak: 64 connections that ask again at once, the most of two runs. Flood: five times that rate, each request on one of 4,000
connections that waits for nothing; where there is none it is not sent (without_connection_per_s). small: 16 elements in
the body. computed: two tensors of 2 Mi elements that lie on the device, so that the worker is the bottleneck. unix: libkld,
4 processes with 4 requests in flight each, then 20 with 16; nothing is refused there below requests_max. hello: the requests
of small to a bare libmicrohttpd server on that core that answers five bytes: what the library keeps of its peak by itself."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from soak import commit, cpu_model  # and the path to the tests' own modules

import oip
from conftest import BIN, Server, children_of, clean_environment
from gateway import free_port, post
from httplib import probabilities

CONNECTIONS, TIMES = 4000, 5
AIMS = {"share": 0.9, "refused_p99_ms": 500, "answered_p99_ms": 1000}


def pin(server, worker_alone):
    for role, pid in {"supervisor": server.pid, **children_of(server.pid)}.items():
        core = "1" if role == "worker" or not worker_alone else "0"
        subprocess.run(["taskset", "-a", "-cp", core, str(pid)], stdout=subprocess.DEVNULL, check=True)


def load(server, request, *arguments):
    mode, *numbers = arguments
    command = ["taskset", "-c", "0", BIN / "bench/http_load", mode, server.address.rsplit(":", 1)[1], *map(str, numbers)]
    return json.loads(subprocess.run(command, input=request, capture_output=True, check=True).stdout)


def over_http(options, server, request):
    pairs = []
    load(server, request, "load", 64, 0.5)
    for _ in range(options.rounds):
        time.sleep(1)  # what the last flood left behind has gone
        peak = max(load(server, request, "load", 64, options.seconds / 2)["requests_per_s"] for _ in range(2))
        pairs.append((peak, load(server, request, "flood", CONNECTIONS, options.seconds, TIMES * peak)))
    found = {key: statistics.median(flood[key] for _, flood in pairs) for key in pairs[0][1]}
    return {"peak_per_s": statistics.median(peak for peak, _ in pairs), **found,
            "share": round(statistics.median(flood["answered_per_s"] / peak for peak, flood in pairs), 3),
            "shares": [round(flood["answered_per_s"] / peak, 3) for peak, flood in pairs]}


def small(options, server):
    return over_http(options, server, post(*oip.body({"predictions": probabilities((2, 8), 1),
                                                      "targets": probabilities((2, 8), 2)})))


class Hello:
    def __init__(self):
        self.address = f"127.0.0.1:{free_port()}"
        self.process = subprocess.Popen(["taskset", "-c", "1", BIN / "bench/http_load", "hello", self.address.rsplit(":", 1)[1]],
                                        stdout=subprocess.PIPE)
        assert self.process.stdout.readline().strip() == b"ready"

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.process.kill()
        self.process.wait()


def computed(options, server):
    shape = (512, 4096)
    for seed, name in enumerate(("q", "p")):
        status, _, reply = server.request(f"/v2/tensors/{name}?datatype=FP32&shape={shape[0]},{shape[1]}",
                                          probabilities(shape, seed).tobytes(), method="PUT")
        assert status == 200, reply
    inputs = [{"name": name, "shape": shape, "datatype": "FP32", "parameters": {"stored_tensor": stored}}
              for name, stored in (("predictions", "q"), ("targets", "p"))]
    return over_http(options, server, post({}, json.dumps({"inputs": inputs}).encode()))


def over_unix(options, server):
    def rate(processes, in_flight):
        command = ["taskset", "-c", "0", BIN / "kld", "bench", "--server", server.url_unix, "--shape", "2x8", "--in-flight",
                   str(in_flight), "--seconds", str(options.seconds), "--json"]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment())
                   for _ in range(processes)]
        found = [json.loads(one.communicate()[0]) for one in running]
        assert not any(one["failed"] or one["different"] for one in found), found
        return sum(one["losses_per_s"] for one in found), 1000 * max(one["p99_ms"] for one in found)
    pairs = [(rate(4, 4), rate(20, 16)) for _ in range(options.rounds)]
    shares = [round(flood[0] / peak[0], 3) for peak, flood in pairs]
    return {"peak_per_s": statistics.median(peak[0] for peak, _ in pairs),
            "answered_per_s": statistics.median(flood[0] for _, flood in pairs),
            "answered_p99_us": statistics.median(flood[1] for _, flood in pairs), "refused_p99_us": 0,
            "share": statistics.median(shares), "shares": shares}


def judge(case):
    measured = {"share": case["share"], "refused_p99_ms": case["refused_p99_us"] / 1000,
                "answered_p99_ms": case["answered_p99_us"] / 1000}
    case["met"] = {name: measured[name] >= aim if name == "share" else measured[name] <= aim for name, aim in AIMS.items()}
    return case


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--case", action="append", choices=["small", "computed", "unix", "hello"])
    parser.add_argument("--flags", nargs="*", default=[], help="NAME=VALUE of the server")
    options = parser.parse_args()
    flags = dict(flag.split("=") for flag in options.flags)
    results = {"commit": commit(), "cpu": cpu_model(), "cpus": os.cpu_count(), "rounds": options.rounds,
               "seconds": options.seconds, "flags": flags, "load_before": round(os.getloadavg()[0], 2), "aims": AIMS}
    for name, measure in (("small", small), ("computed", computed), ("unix", over_unix)):
        if options.case and name not in options.case:
            continue
        server = Server(threads=1, **flags)
        try:
            pin(server, name == "computed")
            results[name] = judge(measure(options, server))
        finally:
            server.stop()
            server.remove()
    if not options.case or "hello" in options.case:
        with Hello() as server:
            results["hello"] = small(options, server)
    print(json.dumps(results | {"load_after": round(os.getloadavg()[0], 2)}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
