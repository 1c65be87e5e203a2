#!/usr/bin/env python3
"""What a PyTorch user gets on a GPU: KernelBench's problem 98 (client/python/examples/kernelbench_98.py) by eager
PyTorch and by kld, in this process (local:) and by a server (--server unix:PATH); the same with the gradient
of the predictions; and a training step against the bare kernel.

`call`: between two events around one call, the device idle before, as KernelBench measures. `step`: 50 calls
behind each other, per call. `bare`: as many calls of libkld behind each other, over local: on the current stream, without
autograd, whose answers are not waited for. `host`: how long the call keeps the CPU. Medians, in milliseconds; rounds are
paired. Extra memory of the first two calls after one of a few rows: the most that PyTorch allocates beyond the inputs
and, where it is wanted, their gradient, and what is then gone from the card, for good or until the connection is closed.
The environment's PYTORCH_CUDA_ALLOC_CONF (expandable_segments:True) chooses the allocator.
Status 1 where a loss or gradient is not eager's to 1e-4. Takes $KLD_LIBRARY, else build/libkld.so."""
import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import torch

import kldlib  # finds the package, too
from argumentlib import how_many

HERE = pathlib.Path(__file__).resolve().parent
for folder in (HERE.parents[1] / "client/python/examples", HERE.parents[1] / "python/examples"):
    sys.path.insert(0, str(folder))
import kernelbench_98 as task  # noqa: E402
import kld  # noqa: E402
import kld._autograd  # noqa: E402
import kld._request  # noqa: E402

STEPS = 50


def between_events(function, calls=1):
    torch.cuda.synchronize()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(calls):
        function()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / calls


def on_host(function):
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took * 1e3


def copied_by(connection, function):
    """Bytes a call: not 0 where memory has no one handle."""
    before = connection.copied_bytes
    function()
    return connection.copied_bytes - before


def free_memory():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def extra_memory(warm_up, function):
    """The warm-up has what any first call loads: kernels, and the segment of a small tensor."""
    warm_up()
    free = free_memory()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.max_memory_allocated() - allocated, "gone": max(0, free - free_memory())}


def bare_call(connection, predictions, targets, gradient):
    """The kernel and what launches it: a request of a loss and, where wanted, the gradient."""
    parameters = kld._request.Parameters(reduction="batchmean", predictions_form="probs", targets_form="probs")
    job = kld._autograd.Job(connection, parameters)
    return lambda: job.run((predictions, targets), (gradient, False))


def aims(line, checks, extra, name):
    """What is aimed at, what came of it, and whether that will do."""
    worst = max(abs(losses[name] / losses["eager"] - 1) for losses in checks.values())
    found = (("times eager, one call", 5, line["times_eager"], line["times_eager"] >= 5),
             ("times eager, calls behind each other", 5, line["step_times_eager"], line["step_times_eager"] >= 5),
             ("over the bare kernel", 0.02, line["step_over_bare"], line["step_over_bare"] <= 0.02),
             ("loss off eager's", 1e-4, worst, worst <= 1e-4),
             ("GiB beyond inputs and gradient", 1, max(extra.values()) / 2**30, max(extra.values()) < 2**30))
    return {what: {"aim": aim, "measured": measured, "met": met} for what, aim, measured, met in found}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server")
    parser.add_argument("--mps", action="store_true", help="say that MPS is running")
    parser.add_argument("--rows", type=how_many, default=16384)
    parser.add_argument("--rounds", type=how_many, default=15)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json")
    args = parser.parse_args()
    kldlib.need()
    task.batch_size, task.input_shape = args.rows, (args.rows,)
    torch.manual_seed(1)
    predictions, targets = (tensor.cuda() for tensor in task.get_inputs())
    leaf = predictions.detach().requires_grad_()
    connections = {"local": kld.connect("local:cuda")}
    if args.server:
        connections["server"] = kld.connect(args.server)
    models = {"eager": task.Model()}
    models.update((name, task.ModelNew(connection)) for name, connection in connections.items())

    def forward(model):
        with torch.no_grad():
            return model(predictions, targets)

    def both(model):
        leaf.grad = None
        model(leaf, targets).backward()

    def few(model):
        rows = predictions[:8].clone().requires_grad_()
        model(rows, targets[:8].clone()).backward()
        leaf.grad = torch.empty_like(leaf)

    jobs = {(name, what): (lambda f=f, model=model: f(model)) for name, model in models.items()
            for what, f in (("forward", forward), ("both", both))}
    # Before anything else has run on a connection: a buffer that stays would count as there from the start.
    extra = {" ".join(key): extra_memory(lambda key=key: few(models[key[0]]), job) for key, job in jobs.items()}

    checks = {}
    for what, *two in [("task", predictions, targets), *task.structured(args.rows, args.rows, "cuda")]:
        checks[what] = {name: task.compare(models[name], models["eager"], *two) for name in connections}
        with torch.no_grad():
            checks[what]["eager"] = float(models["eager"](*two))
        torch.cuda.empty_cache()
    copied = {" ".join(key): copied_by(connections[key[0]], job) for key, job in jobs.items() if key[0] in connections}
    times = {key: {"call": [], "step": [], "host": []} for key in jobs}
    launch = {"forward": bare_call(connections["local"], predictions, targets, False),
              "both": bare_call(connections["local"], predictions, targets, True)}
    bare = {"forward": [], "both": []}
    for _ in range(args.rounds):
        for key, job in jobs.items():
            job()
            times[key]["call"].append(between_events(job))
            times[key]["host"].append(on_host(job))
            times[key]["step"].append(between_events(job, STEPS if key[0] != "eager" else 5))
        leaf.grad = None  # so that the bare kernel's gradient lies where a step's does
        for what, job in launch.items():
            job()
            bare[what].append(between_events(job, STEPS))
    report = {"what": "python_gpu", "shape": [args.rows, args.rows], "dtype": "FP32", "commit": args.commit,
              "card": torch.cuda.get_device_name(0), "torch": torch.__version__, "mps": args.mps,
              "driver": subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                                       capture_output=True, text=True, check=False).stdout.strip(),
              "system": platform.platform(), "python": platform.python_version(), "rounds": args.rounds,
              "steps": STEPS, "losses": checks, "extra_bytes": extra,
              "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"), "copied_bytes": copied,
              "bare_kernel_ms": {what: statistics.median(all_) for what, all_ in bare.items()}, "ms": {}, "aims": {}}
    for (name, what), measured in times.items():
        line = {kind: statistics.median(values) for kind, values in measured.items()}
        line["times_eager"] = statistics.median(
            eager / mine for eager, mine in zip(times["eager", what]["call"], measured["call"]))
        line["step_times_eager"] = statistics.median(
            eager / mine for eager, mine in zip(times["eager", what]["step"], measured["step"]))
        line["step_over_bare"] = statistics.median(
            mine / kernel - 1 for mine, kernel in zip(measured["step"], bare[what]))
        report["ms"][f"{name} {what}"] = line
        if name in connections:
            report["aims"][f"{name} {what}"] = aims(line, checks, extra[f"{name} {what}"], name)
        print(f"{name:7} {what:8} call {line['call']:.3f} ({line['times_eager']:.2f} x eager)  step {line['step']:.4f} "
              f"({line['step_over_bare']:+.2%} over the bare kernel)  host {line['host']:.3f}  extra "
              f"{extra[f'{name} {what}']['allocated'] / 2**20:.1f} MiB")
    print("bare kernel", report["bare_kernel_ms"])
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    for connection in connections.values():
        connection.close()


if __name__ == "__main__":
    main()
