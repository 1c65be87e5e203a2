#!/usr/bin/env python3
"""What HTTP costs: the gateway against a plain TCP stream, against a bare libmicrohttpd server and against what
one would write instead (aiohttp with PyTorch), by the same client on the same machine. Pairs, one after the other,
medians of them.

  build-venv/bin/python tests/bench/gateway.py [--build DIR] [--rounds N] [--seconds S] > results/gateway-cpu.json
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))
GIB = 1 << 30
UPLOADS = 5  # pairs a round: they are short, and vary most
PEER = '''
import torch
from aiohttp import web
async def infer(request):
    if request.content_type == "application/json":
        q, p = (torch.tensor(t["data"]).reshape(t["shape"]) for t in (await request.json())["inputs"])
    else:
        body = bytearray(await request.read())
        q, p = torch.frombuffer(body, dtype=torch.float32).reshape(2, int(request.headers["X-Rows"]), -1)
    loss = torch.nn.functional.kl_div(q.log(), p, reduction="batchmean").item()
    return web.json_response({"loss": loss})
app = web.Application(client_max_size=4 << 30)
app.router.add_post("/v2/models/kl_div/infer", infer)
web.run_app(app, host="127.0.0.1", port=%d, print=lambda *a: print("ready", flush=True))
'''


def free_port():
    import socket
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def post(headers, data, length=None):
    lines = ["POST /v2/models/kl_div/infer HTTP/1.1", "Host: localhost", f"Content-Length: {length or len(data)}"]
    return "\r\n".join(lines + [f"{k}: {v}" for k, v in headers.items()] + ["", ""]).encode() + data


class Bench:
    def __init__(self, options):
        self.options, self.load = options, str(options.build / "bench/http_load")
        self.processes = []

    def start(self, *command):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.processes.append(process)
        assert process.stdout.readline().strip(), command
        return process

    def run(self, *arguments, request):
        out = subprocess.run([self.load, *map(str, arguments)], input=request, capture_output=True, check=True)
        return json.loads(out.stdout)

    def pairs(self, one, other, times=1):
        """[(one(), other())] of each round, or `times` as many, one after the other."""
        one(), other()  # warm
        return [(one(), other()) for _ in range(times * self.options.rounds)]


def ratio(pairs, key, inverse=False):
    found = [a[key] / b[key] for a, b in pairs]
    return round(statistics.median(1 / r if inverse else r for r in found), 3)


def middle(values, key):
    return sorted(v[key] for v in values)[len(values) // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    options = parser.parse_args()
    os.environ["KLD_BIN"] = str(options.build.resolve())
    import conftest
    import oip
    from httplib import probabilities
    bench = Bench(options)
    server = conftest.Server(staging_bytes_max="4G", staging_request_bytes_max="2G", keep_buffer_ms=None)
    bulk = conftest.Server(keep_buffer_ms=None)
    fresh = conftest.Server(keep_buffer_ms=0)  # each request's buffer is new to it, as after ten seconds without one
    results = {"commit": subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True,
                                        text=True).stdout.strip(),
               "cpus": os.cpu_count(), "rounds": options.rounds, "load_before": os.getloadavg()[0]}
    try:
        ports = {"kld": int(server.address.rsplit(":", 1)[1]), "bulk": int(bulk.address.rsplit(":", 1)[1]),
                 "fresh": int(fresh.address.rsplit(":", 1)[1]),
                 "hello": free_port(), "sink": free_port(), "peer": free_port()}
        bench.start(bench.load, "hello", str(ports["hello"]))
        bench.start(bench.load, "sink", str(ports["sink"]), str(GIB))
        with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
            script.write(PEER % ports["peer"])
            script.flush()
            bench.start(sys.executable, script.name)
            measure(bench, ports, results, oip, probabilities)
    finally:
        for process in bench.processes:
            process.kill()
        for one in (server, bulk, fresh):
            one.stop()
            one.remove()
    print(json.dumps(results | {"load_after": os.getloadavg()[0]}, indent=1))


def measure(bench, ports, results, oip, probabilities):
    # Zeros are fine probabilities for the time they take: the logarithm of none is asked for.
    rows = 1 << 12
    inputs = [{"name": n, "shape": [rows, GIB // 8 // rows], "datatype": "FP32",
               "parameters": {"binary_data_size": GIB // 2}} for n in ("predictions", "targets")]
    text = json.dumps({"inputs": inputs}).encode()
    head = post({oip.LENGTH: len(text)}, text, len(text) + GIB)
    for name, kind in (("kld", "staging"), ("bulk", "pieces"), ("fresh", "pieces_fresh")):
        pairs = bench.pairs(lambda n=name: bench.run("stream", ports[n], GIB, request=head),
                            lambda: bench.run("stream", ports["sink"], GIB, request=b""), UPLOADS)
        results[f"upload_1gib_{kind}"] = {
            "sent_gb_per_s": round(GIB / middle([a for a, _ in pairs], "sent_s") / 1e9, 3),
            "answered_s": round(middle([a for a, _ in pairs], "answered_s"), 3),
            "tcp_gb_per_s": round(GIB / middle([b for _, b in pairs], "sent_s") / 1e9, 3),
            "of_tcp": ratio(pairs, "sent_s", True)}
    head = post({"X-Rows": rows, "Content-Type": "application/octet-stream"}, b"", GIB)
    kld = post({oip.LENGTH: len(text)}, text, len(text) + GIB)
    pairs = bench.pairs(lambda: bench.run("stream", ports["kld"], GIB, request=kld),
                        lambda: bench.run("stream", ports["peer"], GIB, request=head))
    results["answer_1gib_over_aiohttp_torch"] = ratio(pairs, "answered_s", True)

    q, p = probabilities((2, 8), 1), probabilities((2, 8), 2)
    seconds, small = bench.options.seconds, {}
    for kind, binary in (("json", False), ("binary", True)):
        headers, data = oip.body({"predictions": q, "targets": p}, binary=binary)
        request = post(headers, data)
        for connections in (1, 64):
            def load(name, body=request, count=connections):
                return bench.run("load", ports[name], count, seconds, request=body)
            pairs = bench.pairs(lambda: load("kld"), lambda: load("hello"))
            small[f"{kind}_{connections}"] = {
                key: middle([a for a, _ in pairs], key) for key in ("requests_per_s", "p50_us", "p99_us")}
            small[f"{kind}_{connections}"]["of_hello"] = ratio(pairs, "requests_per_s")
    results["small"] = small
    json_headers, json_data = oip.body({"predictions": q, "targets": p}, binary=False)
    for kind, ours, theirs in (
            ("json", post(json_headers, json_data), post({"Content-Type": "application/json"}, json_data)),
            ("binary", request, post({"X-Rows": 2, "Content-Type": "application/octet-stream"},
                                     q.tobytes() + p.tobytes()))):
        pairs = bench.pairs(lambda r=ours: bench.run("load", ports["kld"], 64, seconds, request=r),
                            lambda r=theirs: bench.run("load", ports["peer"], 64, seconds, request=r))
        results[f"small_{kind}_over_aiohttp_torch"] = ratio(pairs, "requests_per_s")
        results[f"small_{kind}_aiohttp_torch_per_s"] = middle([b for _, b in pairs], "requests_per_s")
    idle(bench, ports, results, post(*oip.body({"predictions": q, "targets": p})))


def idle(bench, ports, results, request):
    """64 busy connections, with and without 2,000 that are silent."""
    import socket

    def alone():
        return bench.run("load", ports["kld"], 64, bench.options.seconds, request=request)

    def among():
        silent = [socket.create_connection(("127.0.0.1", ports["kld"])) for _ in range(2000)]
        try:
            return alone()
        finally:
            for one in silent:
                one.close()
    pairs = bench.pairs(among, alone)
    results["with_2000_idle"] = {"of_rate_without": ratio(pairs, "requests_per_s"),
                                 "p99_us": middle([a for a, _ in pairs], "p99_us")}


if __name__ == "__main__":
    main()
