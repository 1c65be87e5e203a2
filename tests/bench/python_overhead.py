#!/usr/bin/env python3
"""What Python adds to a request over CPU shared memory: kl_div() of this package against kld_run() of libkld, both on
the same tensors in shared memory, in turns.

  python_overhead.py --server unix:PATH [--rows 16] [--classes 256] [--awake] [--json FILE]

`libkld` is the C call on a request that was made before (through ctypes, some 2 us); `numpy` is Connection.kl_div()
with loss and gradient into arrays of the caller's, `numpy, new` into new ones; `torch` is kld.functional.kl_div() without
gradient, `torch, step` forward and backward; `torch, least` a step, too, of an autograd function around libkld's call
that makes room for a loss and a gradient and does nothing else. Medians, in microseconds; what is added, of the
differences to the libkld of the same round. Behind a wait all code runs at half its speed or less, caches and branches
being cold, and the core of a virtual machine takes as long as a request to wake up: with --awake a process of the class
that runs when nobody else does (SCHED_IDLE) keeps each core from sleeping. Exit status 1 where one of these takes over
60 us more than libkld."""
import argparse
import contextlib
import ctypes as c
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import numpy as np

from argumentlib import how_many
import kldlib  # finds the package and the library
import kld
from kld import _library

LIMIT_US = 60


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def bare(connection, arrays):
    places = {}
    for name, array in arrays.items():
        address = array.__array_interface__["data"][0]
        span = connection._memory.find(address, array.nbytes)
        places[name] = span.region
        assert span.address == address
    made = kldlib.request(next(iter(arrays.values())).shape, "float32", places)
    result, error, run = _library.Result(), _library.Error(), _library.library().kld_run
    handle, arguments = connection._handle, (c.byref(made), c.byref(result), c.byref(error))

    def call():
        if run(handle, *arguments):
            raise SystemExit(error.text.decode())
    return call, made


def contenders(connection, shape):
    rng = np.random.default_rng(1)
    arrays = {name: connection.empty(shape) for name in ("predictions", "targets", "grad_predictions")}
    for name in ("predictions", "targets"):
        values = rng.random(shape) + 0.05
        arrays[name][:] = values / values.sum(-1, keepdims=True)
    q, p, out = arrays.values()
    call, _ = bare(connection, arrays)
    found = {"libkld": call,
             "numpy": lambda: connection.kl_div(q, p, out={"grad_predictions": out}),
             "numpy, new": lambda: connection.kl_div(q, p)}
    try:
        import torch
        from kld import functional
    except ImportError:
        return found
    torch.set_num_threads(1)
    q_, p_ = (functional.empty(shape, connection=connection).copy_(torch.from_numpy(np.array(x))) for x in (q, p))
    leaf = q_.detach().requires_grad_()

    def loss(tensor):
        return functional.kl_div(tensor, p_, reduction="batchmean", input_form="probs", connection=connection)

    def step():
        leaf.grad = None
        loss(leaf).backward()

    class Least(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            ctx.gradient, loss_ = torch.empty(shape), torch.empty(())
            call()
            return loss_

        @staticmethod
        def backward(ctx, grad_output):
            gradient, ctx.gradient = ctx.gradient, None  # as a step does: autograd keeps it then, and copies nothing
            return gradient

    def least():
        leaf.grad = None
        Least.apply(leaf).backward()
    found.update({"torch": lambda: loss(q_), "torch, step": step, "torch, least": least})
    return found


@contextlib.contextmanager
def awake(wanted):
    """No core sleeps."""
    idle = ("import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nos.sched_setaffinity(0, {%d})\n"
            "while True: pass")
    cores = os.sched_getaffinity(0) if wanted else ()
    running = [subprocess.Popen([sys.executable, "-c", idle % core]) for core in cores]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--rows", type=how_many, default=16)
    parser.add_argument("--classes", type=how_many, default=256)
    parser.add_argument("--rounds", type=how_many, default=4000)
    parser.add_argument("--awake", action="store_true")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json")
    args = parser.parse_args()
    kldlib.need()
    with awake(args.awake), kld.connect(args.server) as connection:
        jobs = contenders(connection, (args.rows, args.classes))
        for job in jobs.values():
            for _ in range(300):
                job()
        times = {name: [] for name in jobs}
        for _ in range(args.rounds):
            for name, job in jobs.items():
                times[name].append(seconds(job) * 1e6)
    medians = {name: statistics.median(values) for name, values in times.items()}
    added = {name: statistics.median(mine - bare for mine, bare in zip(values, times["libkld"]))
             for name, values in times.items()}
    torch = sys.modules.get("torch")
    report = {"what": "python_overhead", "shape": [args.rows, args.classes], "dtype": "FP32", "commit": args.commit,
              "python": platform.python_version(), "numpy": np.__version__,
              "torch": torch.__version__ if torch else None, "machine": processor(),
              "cores": len(os.sched_getaffinity(0)), "awake": args.awake, "rounds": args.rounds,
              "median_us": medians, "added_us": added}
    for name, median in medians.items():
        print(f"{name:12} {median:7.1f} us  {added[name]:+6.1f}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return int(any(added.get(name, 0) > LIMIT_US for name in ("numpy", "numpy, new", "torch", "torch, step")))


def processor():
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
