#!/usr/bin/env python3
"""What two builds of the server cost, side by side: CPU time and context switches of gateway and worker, for each
GiB of an upload and for each small request. Their servers run at once and take turns, so what else runs on the
machine hits both. Give it one build twice to see what a difference is worth: on two busy cores medians of five
pairs were then 0.92 to 1.02 for the gateway's CPU, single pairs 0.5 to 1.6, and 0.97 to 1.34 for the rates.

  tests/bench/gateway_cpu.py OLD_BUILD NEW_BUILD [--rounds N] [--seconds S]

For each number: medians of both, and median, lowest and highest of new / old over the pairs.
"""
import argparse
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/e2e"), str(ROOT / "tests/bench")]
import conftest  # noqa: E402
import oip  # noqa: E402
from argumentlib import how_long, how_many, need  # noqa: E402
from gateway import GIB  # noqa: E402
from httplib import probabilities  # noqa: E402
from loadlib import post  # noqa: E402

DEFAULT = {"keep_buffer_ms": None}
WHOLE = {"staging_bytes_max": "4G", "staging_request_bytes_max": "2G", **DEFAULT}
ROWS = 1 << 12
IDLE = 2000
CASES = {"upload_whole": (GIB, WHOLE), "upload_pieces": (GIB, DEFAULT), "json_1": (1, DEFAULT), "binary_1": (1, DEFAULT),
         "json_64": (64, DEFAULT), "binary_64": (64, DEFAULT), "gradient_1": (1, DEFAULT), "gradient_64": (64, DEFAULT),
         "json_64_idle": (64, DEFAULT)}


def usage(server, role):
    """(ns of CPU, times it slept, times it was taken off) of all threads that live."""
    ns = slept = taken = 0
    for task in pathlib.Path(f"/proc/{server.child(role)}/task").iterdir():
        ns += int((task / "schedstat").read_text().split()[0])
        lines = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        slept += int(lines["voluntary_ctxt_switches"])
        taken += int(lines["nonvoluntary_ctxt_switches"])
    return ns, slept, taken


def request_of(case):
    if case.startswith("upload"):
        inputs = [{"name": n, "shape": [ROWS, GIB // 8 // ROWS], "datatype": "FP32",
                   "parameters": {"binary_data_size": GIB // 2}} for n in ("predictions", "targets")]
        text = json.dumps({"inputs": inputs}).encode()
        return post({oip.LENGTH: len(text)}, text, len(text) + GIB)
    tensors = {"predictions": probabilities((2, 8), 1), "targets": probabilities((2, 8), 2)}
    if case.startswith("gradient"):  # as bytes in the reply, too
        return post(*oip.body(tensors, {name: {"binary_data": True} for name in ("loss", "grad_predictions")}))
    return post(*oip.body(tensors, binary=case.startswith("binary")))


def run(options, case, server, request):
    """{number: value} of one run, for each GiB or request."""
    port, count = int(server.address.rsplit(":", 1)[1]), CASES[case][0]
    upload = case.startswith("upload")
    arguments = ["stream", port, count] if upload else ["load", port, count, options.seconds]
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(IDLE * case.endswith("idle"))]
    time.sleep(0.3 * bool(silent))
    try:
        before = {role: usage(server, role) for role in ("gateway", "worker")}
        out = subprocess.run([options.new / "bench/http_load", *map(str, arguments)], input=request,
                             capture_output=True, check=True)
        after = {role: usage(server, role) for role in before}
    finally:
        for one in silent:
            one.close()
    found = json.loads(out.stdout)
    done = 1 if upload else found["requests"]
    result = {"GiB/s" if upload else "requests/s": 1 / found["sent_s"] if upload else found["requests_per_s"]}
    for role, was in before.items():
        ns, slept, taken = (b - a for a, b in zip(was, after[role]))
        result |= {f"{role} CPU us": ns / done / 1e3, f"{role} slept": slept / done, f"{role} taken off": taken / done}
    return result


def compare(options, case, servers):
    request = request_of(case)
    for server in servers:  # warm
        run(options, case, server, request)
    pairs = []
    for i in range(options.rounds):
        found = {j: run(options, case, servers[j], request) for j in ((0, 1) if i % 2 else (1, 0))}
        pairs.append((found[0], found[1]))
    for key in pairs[0][0]:
        old, new = (statistics.median(pair[side][key] for pair in pairs) for side in (0, 1))
        ratios = [b[key] / a[key] for a, b in pairs if a[key]] or [float("nan")]
        print(f"{case:14} {key:18} {old:12.4g} {new:12.4g}  {statistics.median(ratios):.3f} "
              f"({min(ratios):.3f} to {max(ratios):.3f})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("new", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--rounds", type=how_many, default=5)
    parser.add_argument("--seconds", type=how_long, default=2)
    parser.add_argument("--case", action="append", choices=CASES, help="one of the cases; again for more")
    options = parser.parse_args()
    need(options.old / "kld-server", options.new / "kld-server", options.new / "bench/http_load")
    for case in options.case or CASES:
        servers = []
        try:
            for build in (options.old, options.new):
                conftest.BIN = build
                servers.append(conftest.Server(**CASES[case][1]))
            compare(options, case, servers)
        finally:
            for server in servers:
                server.stop()
                server.remove()


if __name__ == "__main__":
    main()
