#!/usr/bin/env python3
"""What HTTP costs: the gateway against a plain TCP stream, against a bare libmicrohttpd server and against what
one would write instead (aiohttp and FastAPI with PyTorch, each where it is installed), by the same client on the same
machine. Pairs, one after the other, medians of them.

  KLD_BIN=build build-venv/bin/python tests/bench/gateway.py [--backend B] [--rounds N] [--seconds S] [--only PART ...] \\
    > results/gateway-cpu.json

FastAPI runs under uvicorn: `build-venv/bin/pip install fastapi 'uvicorn[standard]'`. Tensors of 1 GiB come to it as bytes, as to
aiohttp.

Each server has one HTTP thread, as libmicrohttpd's has. With eight cores or more (loadlib.py) the client, the gateway and the
worker have cores of their own; a TCP sink and libmicrohttpd have the gateway's then, the two with PyTorch the gateway's
and the worker's, and four HTTP threads are measured beside four of libmicrohttpd's. "threads" has several HTTP threads beside
one of kld's own: four, or two where all share fewer cores, which then says what a second loop costs where it gets no core, and
not what it gains where it does. On a GPU PyTorch is there twice, on the CPU and
on the GPU. client_busy, hello_client_busy: the share of its time that the busiest of the client's processes was at work; near 1 it is
the client that was measured.
"""
import argparse
import contextlib
import http.client
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import traceback

from argumentlib import how_long, how_many, need
from loadlib import PROGRAM, Cores, commit, free_port, on, pin, post, room_for_connections, run_clients  # and the path

import oip  # of the tests' own
from conftest import BIN, Server
from httplib import probabilities

GIB = 1 << 30
IDLE = 2000
UPLOADS = 5  # pairs a round: they are short, and vary most
PEERS = {"aiohttp": '''
import torch
from aiohttp import web
def answer(q, p):
    return web.json_response({"loss": torch.nn.functional.kl_div(q.log(), p, reduction="batchmean").item()})
async def infer(request):
    return answer(*(torch.tensor(t["data"], device="%s").reshape(t["shape"]) for t in (await request.json())["inputs"]))
async def infer_bytes(request):
    body = bytearray(await request.read())
    return answer(*torch.frombuffer(body, dtype=torch.float32).to("%s").reshape(2, int(request.headers["X-Rows"]), -1))
app = web.Application(client_max_size=4 << 30)
app.router.add_post("/json", infer)
app.router.add_post("/bytes", infer_bytes)
web.run_app(app, host="127.0.0.1", port=%d, print=lambda *a: print("ready", flush=True))
''', "fastapi": '''
import contextlib
import torch
import uvicorn
from fastapi import FastAPI, Request
from pydantic import BaseModel
class Tensor(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    data: list
class Inputs(BaseModel):
    inputs: list[Tensor]
@contextlib.asynccontextmanager
async def ready(app):
    print("ready", flush=True)
    yield
app = FastAPI(lifespan=ready)
def answer(q, p):
    return {"loss": torch.nn.functional.kl_div(q.log(), p, reduction="batchmean").item()}
@app.post("/json")
async def infer(body: Inputs):
    return answer(*(torch.tensor(t.data, device="%s").reshape(t.shape) for t in body.inputs))
@app.post("/bytes")
async def infer_bytes(request: Request):
    body = bytearray(await request.body())
    return answer(*torch.frombuffer(body, dtype=torch.float32).to("%s").reshape(2, int(request.headers["X-Rows"]), -1))
uvicorn.run(app, host="127.0.0.1", port=%d, log_level="error")
'''}


class Bench:
    def __init__(self, options):
        self.options, self.cores, self.processes, self.servers, self.ports = options, Cores(), [], [], {}
        self.threads = 4 if self.cores.apart else 2

    def server(self, name, **flags):
        """A kld-server, its roles on their cores."""
        with on({*self.cores.gateway, *self.cores.worker}):
            server = Server(backend=self.options.backend, **{"http_threads": 1, **flags})
        self.servers.append(server)
        pin(server, {"gateway": self.cores.gateway, "worker": self.cores.worker})
        self.ports[name] = int(server.address.rsplit(":", 1)[1])

    def start(self, name, command, cores):
        """Something else to compare with; command(port)."""
        self.ports[name] = free_port()
        with on(cores):
            process = subprocess.Popen(command(str(self.ports[name])), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.processes.append(process)
        assert process.stdout.readline().strip(), command(self.ports[name])

    def end(self):
        for process in self.processes:
            process.kill()
        for server in self.servers:
            server.stop()
            server.remove()

    def stream(self, name, request):
        with on(self.cores.client):
            out = subprocess.run([PROGRAM, "stream", str(self.ports[name]), str(GIB)], input=request, capture_output=True, check=True)
        return json.loads(out.stdout)

    def load(self, name, connections, request):
        return run_clients(self.cores.client, min(self.cores.clients, connections), "load", self.ports[name], connections,
                           self.options.seconds, request=request)

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
    parser.add_argument("--backend", default=os.environ.get("KLD_BACKEND", "cpu"), choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=how_many, default=5)
    parser.add_argument("--seconds", type=how_long, default=2)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="some parts of it")
    options = parser.parse_args()
    need(BIN / "kld-server", PROGRAM)
    room_for_connections()
    bench = Bench(options)
    results = {"commit": commit(), "backend": options.backend, "cpus": os.cpu_count(), "cores": bench.cores.described(),
               "versions": versions(), "rounds": options.rounds, "load_before": os.getloadavg()[0]}
    folder = tempfile.TemporaryDirectory()
    try:
        start_all(bench, folder.name)
        for name in options.only:
            PARTS[name](bench, results)
    except BaseException:  # what was measured until then is worth keeping
        results["failed"] = traceback.format_exc()
    finally:
        bench.end()
        folder.cleanup()
    print(json.dumps(results | {"load_after": os.getloadavg()[0]}, indent=1))
    return 1 if "failed" in results else 0


def start_all(bench, folder):
    cores = bench.cores
    bench.server("kld", staging_bytes_max="4G", staging_request_bytes_max="2G", keep_buffer_ms=None)
    bench.server("bulk", keep_buffer_ms=None)
    bench.server("fresh", keep_buffer_ms=0)  # each request's buffer is new to it, as after ten seconds without one
    bench.start("hello", lambda port: [PROGRAM, "hello", port], cores.gateway)
    bench.start("sink", lambda port: [PROGRAM, "sink", port, str(GIB)], cores.gateway)
    bench.server(f"kld_{bench.threads}_threads", http_threads=bench.threads)
    if cores.apart:
        bench.start("hello_4_threads", lambda port: [PROGRAM, "hello", port, "4"], cores.gateway)
    for name, peer, device in peers(bench) if "over_pytorch" in bench.options.only else []:
        def script(port, name=name, peer=peer, device=device):
            path = f"{folder}/{name}.py"
            with open(path, "w") as file:
                file.write(PEERS[peer] % (device, device, int(port)))
            return [sys.executable, path]
        bench.start(name, script, {*cores.gateway, *cores.worker})


def versions():
    """Of the peers that are there, and of what they stand on."""
    found = {}
    for package in ("aiohttp", "fastapi", "uvicorn", "uvloop", "httptools", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def peers(bench):
    """[(its name in the results, which, where PyTorch computes)]"""
    devices = ["cpu"] if bench.options.backend == "cpu" else ["cpu", "cuda"]
    there = versions()
    return [(f"{peer}_torch" if device == "cpu" else f"{peer}_torch_{device}", peer, device)
            for peer in PEERS for device in devices if peer in there]


def large_request():
    """(rows, the head of a request of 1 GiB of tensors)."""
    rows = 1 << 12
    inputs = [{"name": n, "shape": [rows, GIB // 8 // rows], "datatype": "FP32",
               "parameters": {"binary_data_size": GIB // 2}} for n in ("predictions", "targets")]
    text = json.dumps({"inputs": inputs}).encode()
    return rows, post({oip.LENGTH: len(text)}, text, len(text) + GIB)


def small_requests():
    """{kind: (headers, body)}, and the tensors."""
    tensors = {"predictions": probabilities((2, 8), 1), "targets": probabilities((2, 8), 2)}
    return {kind: oip.body(tensors, binary=kind == "binary") for kind in ("json", "binary")}, tensors


def uploads(bench, results):
    _, head = large_request()
    for name, kind in (("kld", "staging"), ("bulk", "pieces"), ("fresh", "pieces_fresh")):
        pairs = bench.pairs(lambda n=name: bench.stream(n, head), lambda: bench.stream("sink", b""), UPLOADS)
        results[f"upload_1gib_{kind}"] = {
            "sent_gb_per_s": round(GIB / middle([a for a, _ in pairs], "sent_s") / 1e9, 3),
            "answered_s": round(middle([a for a, _ in pairs], "answered_s"), 3),
            "tcp_gb_per_s": round(GIB / middle([b for _, b in pairs], "sent_s") / 1e9, 3),
            "of_tcp": ratio(pairs, "sent_s", True)}


def small(bench, results):
    requests, _ = small_requests()
    for suffix in ("", "_4_threads") if bench.cores.apart else ("",):
        found = results[f"small{suffix}"] = {}
        for kind, parts in requests.items():
            for connections in (1, 64) if not suffix else (64,):
                pairs = bench.pairs(lambda: bench.load(f"kld{suffix}", connections, post(*parts)),
                                    lambda: bench.load(f"hello{suffix}", connections, post(*parts)))
                found[f"{kind}_{connections}"] = {
                    **{key: middle([a for a, _ in pairs], key) for key in ("requests_per_s", "p50_us", "p99_us")},
                    "client_busy": middle([a for a, _ in pairs], "busy"), "hello_client_busy": middle([b for _, b in pairs], "busy"),
                    "of_hello": ratio(pairs, "requests_per_s")}


def threads(bench, results):
    """Small requests by several HTTP threads and by one."""
    name = f"kld_{bench.threads}_threads"
    found = results["threads"] = {"http_threads": bench.threads, "cores_apart": bench.cores.apart}
    for kind, parts in small_requests()[0].items():
        pairs = bench.pairs(lambda: bench.load(name, 64, post(*parts)), lambda: bench.load("kld", 64, post(*parts)))
        found[f"{kind}_64"] = {
            "requests_per_s": middle([a for a, _ in pairs], "requests_per_s"),
            "one_thread_requests_per_s": middle([b for _, b in pairs], "requests_per_s"),
            "client_busy": middle([a for a, _ in pairs], "busy"), "of_one_thread": ratio(pairs, "requests_per_s")}


def over_pytorch(bench, results):
    rows, ours = large_request()
    theirs = post({"X-Rows": rows, "Content-Type": "application/octet-stream"}, b"", GIB, path="/bytes")
    ways = {"kld": "", "bulk": "_pieces"} if bench.cores.apart else {"kld": ""}
    for peer, _, _ in peers(bench):
        pairs = bench.pairs(lambda: {name: bench.stream(name, ours) for name in ways}, lambda: bench.stream(peer, theirs))
        for name, how in ways.items():
            results[f"answer_1gib{how}_over_{peer}"] = ratio([(a[name], b) for a, b in pairs], "answered_s", True)
        results[f"answer_1gib_{peer}_s"] = round(middle([b for _, b in pairs], "answered_s"), 3)
    requests, tensors = small_requests()
    bodies = {"json": post({"Content-Type": "application/json"}, requests["json"][1], path="/json"),
              "binary": post({"X-Rows": 2, "Content-Type": "application/octet-stream"}, b"".join(t.tobytes() for t in tensors.values()),
                             path="/bytes")}
    for peer, _, _ in peers(bench):
        for kind, body in bodies.items():
            pairs = bench.pairs(lambda: bench.load("kld", 64, post(*requests[kind])), lambda: bench.load(peer, 64, body))
            results[f"small_{kind}_over_{peer}"] = ratio(pairs, "requests_per_s")
            results[f"small_{kind}_{peer}_per_s"] = middle([b for _, b in pairs], "requests_per_s")


def idle(bench, results):
    """64 busy connections, with and without IDLE that have had an answer each, and are kept."""
    request = post(*small_requests()[0]["binary"])

    def alone():
        return bench.load("kld", 64, request)

    def among():
        silent = [http.client.HTTPConnection("127.0.0.1", bench.ports["kld"]) for _ in range(IDLE)]
        try:
            for one in silent:
                one.request("GET", "/v2/health/live")
                assert one.getresponse().read() == b"" and one.sock
            return alone()
        finally:
            for one in silent:
                one.close()
    pairs = bench.pairs(among, alone)
    results[f"with_{IDLE}_idle"] = {"of_rate_without": ratio(pairs, "requests_per_s"),
                                    "p99_us": middle([a for a, _ in pairs], "p99_us")}


PARTS = {part.__name__: part for part in (uploads, small, threads, over_pytorch, idle)}

if __name__ == "__main__":
    sys.exit(main())
