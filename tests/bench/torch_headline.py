#!/usr/bin/env python3
"""The headline job against eager PyTorch on the same card, in one run.

predictions = softmax(rand * s), targets = softmax(rand), FP32, 16384 x 16384, forward_kl, batchmean;
loss, and loss with the gradient of predictions. kld runs it twice: in this process on PyTorch's own
memory (local:cuda), and in a server that opened the memory by CUDA IPC handle (--server unix:PATH).
Two processes on one GPU take turns unless MPS runs, which costs the server some 0.3 ms a request.
Rounds are paired: each round times every contender once; medians are reported.

Checks, with exit status 1 on a miss: loss within 1e-6 relative of PyTorch's, gradient within 4 ulp of it.
Writes JSON with --json FILE.
"""

import argparse
import ctypes as c
import json
import platform
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import kldlib
from argumentlib import how_many


def ipc(tensor):
    """(handle, base_bytes, offset_bytes) of the allocation under a CUDA tensor."""
    cuda = c.CDLL("libcuda.so.1")
    base, size = c.c_uint64(), c.c_size_t()
    if cuda.cuMemGetAddressRange_v2(c.byref(base), c.byref(size), c.c_uint64(tensor.data_ptr())):
        raise RuntimeError("cuMemGetAddressRange failed")
    handle = c.create_string_buffer(64)
    if cuda.cuIpcGetMemHandle(handle, base):
        raise RuntimeError("cuIpcGetMemHandle failed")
    return handle.raw, size.value, tensor.data_ptr() - base.value


def milliseconds(function):
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def ulps(got, want):
    """Largest distance in units of the last place of FP32, row block by row block."""
    worst = 0
    for a, b in zip(got.split(1024), want.split(1024)):
        x, y = a.view(torch.int32).long(), b.view(torch.int32).long()
        x, y = (torch.where(v < 0, -(v & 0x7FFFFFFF), v) for v in (x, y))
        worst = max(worst, (x - y).abs().max().item())
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", help="unix:PATH of a running kld-server on this card")
    parser.add_argument("--mps", action="store_true", help="say that an MPS server is running")
    parser.add_argument("--rows", type=how_many, default=16384)
    parser.add_argument("--columns", type=how_many, default=16384)
    parser.add_argument("--rounds", type=how_many, default=21)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json")
    args = parser.parse_args()
    kldlib.need()
    shape, count = (args.rows, args.columns), args.rows * args.columns

    torch.manual_seed(1)
    predictions = torch.softmax(torch.rand(shape, device="cuda") * 3, dim=1)
    targets = torch.softmax(torch.rand(shape, device="cuda"), dim=1)
    gradient = torch.full_like(predictions, float("nan"))
    uuid = bytes(torch.cuda.get_device_properties(0).uuid.bytes)

    def eager_loss():
        return F.kl_div(torch.log(predictions), targets, reduction="batchmean")

    def eager_both():
        leaf = predictions.detach().requires_grad_(True)
        loss = F.kl_div(torch.log(leaf), targets, reduction="batchmean")
        loss.backward()
        return loss, leaf.grad

    contenders = {"eager": (eager_loss, eager_both)}
    connections = {"local": kldlib.Connection("local:cuda")}
    if args.server:
        connections["server"] = kldlib.Connection(args.server)
    results = {}
    for name, connection in connections.items():
        places = {"predictions": predictions, "targets": targets, "grad_predictions": gradient}
        if name == "local":
            where = {k: v.data_ptr() for k, v in places.items()}
        else:
            where = {}
            for key, tensor in places.items():
                handle, base_bytes, offset = ipc(tensor)
                where[key] = connection.import_cuda_ipc(handle, uuid, base_bytes, offset,
                                                        tensor.numel() * 4)
        loss_only = {k: v for k, v in where.items() if k != "grad_predictions"}
        a = kldlib.request(shape, "float32", loss_only)
        b = kldlib.request(shape, "float32", where)

        def run(request, label, connection=connection, name=name):
            result = connection.run(request)
            results.setdefault((name, label), []).append(result)
            return result

        contenders[name] = (lambda a=a, run=run: run(a, "loss"), lambda b=b, run=run: run(b, "both"))

    failures = []
    want_loss = eager_loss().item()
    exact = sum(F.kl_div(torch.log(p.double()), t.double(), reduction="sum").item()
                for p, t in zip(predictions.split(512), targets.split(512))) / shape[0]
    _, want_gradient = eager_both()
    checks = {"eager": {"loss": want_loss, "loss_fp64": exact}}
    for name in connections:
        gradient.fill_(float("nan"))
        torch.cuda.synchronize()
        loss = contenders[name][0]().loss
        both = contenders[name][1]().loss
        distance = ulps(gradient, want_gradient)
        checks[name] = {"loss": loss, "relative_to_eager": abs(loss - want_loss) / abs(want_loss),
                        "relative_to_fp64": abs(loss - exact) / abs(exact),
                        "gradient_ulp_to_eager": distance, "same_loss_with_gradient": loss == both}
        if checks[name]["relative_to_eager"] > 1e-6 or distance > 4 or loss != both:
            failures.append(f"{name}: {checks[name]}")
    del want_gradient

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    eager_loss()
    extra = {"eager loss": torch.cuda.max_memory_allocated() - before}
    torch.cuda.reset_peak_memory_stats()
    eager_both()
    extra["eager both"] = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    for name in connections:
        for label, function in zip(("loss", "both"), contenders[name]):
            function()
            free = torch.cuda.mem_get_info()[0]
            for _ in range(5):
                function()
            extra[f"{name} {label}"] = max(0, free - torch.cuda.mem_get_info()[0])

    times = {name: {"loss": [], "both": []} for name in contenders}
    results.clear()
    for number in range(args.rounds + 3):
        for name, functions in contenders.items():
            for label, function in zip(("loss", "both"), functions):
                took = milliseconds(function)
                if number >= 3:
                    times[name][label].append(took)

    read, read_write = connections["local"].ceiling(count * 4)
    floors = {"loss": 2 * count * 4 / read * 1e3, "both": 3 * count * 4 / read_write * 1e3}
    report = {
        "what": "headline", "shape": shape, "dtype": "FP32", "commit": args.commit,
        "card": torch.cuda.get_device_name(0), "torch": torch.__version__,
        "driver": subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=False).stdout.strip(),
        "system": platform.platform(), "rounds": args.rounds,
        "mps": args.mps, "ceiling_read_bytes_per_s": read, "ceiling_read_write_bytes_per_s": read_write,
        "checks": checks, "extra_device_bytes": extra, "ms": {}}
    print(f"{'what':8} {'loss ms':>9} {'x eager':>8} {'of floor':>9}   "
          f"{'loss+grad':>9} {'x eager':>8} {'of floor':>9}")
    for name, measured in times.items():
        line, cells = {}, []
        for label in ("loss", "both"):
            median = statistics.median(measured[label])
            ratio = statistics.median(e / m for e, m in
                                      zip(times["eager"][label], measured[label]))
            line[label] = {"median": median, "min": min(measured[label]), "times_eager": ratio,
                           "fraction_of_floor": floors[label] / median}
            cells.append(f"{median:9.3f} {ratio:8.2f} {floors[label] / median:9.3f}")
            runs = results.get((name, label))
            if runs:
                kernel = statistics.median(r.kernel_ns for r in runs[3:]) / 1e6
                line[label]["kernel_ms"] = kernel
                line[label]["kernel_fraction_of_floor"] = floors[label] / kernel
                cells[-1] += f" (kernel {kernel:.3f})"
        report["ms"][name] = line
        print(f"{name:8} " + "   ".join(cells))
        if name != "eager" and min(line[x]["times_eager"] for x in line) < 4:
            failures.append(f"{name}: less than 4 times as fast as eager PyTorch")
    print(json.dumps(checks))
    print("extra device MiB:", {k: round(v / 2**20, 1) for k, v in extra.items()})
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(report, out, indent=1)
            out.write("\n")
    for connection in connections.values():
        connection.close()
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
