#!/usr/bin/env python3
"""What a step costs whose stream waits for a fence, against one whose stream waits for a done event: the bare step of
libkld (tests/e2e/fencelib.py: 64 x 1024, FP32, a gradient), and, with a torch, kl_div() forward and backward of the Python
package (KLD_DONE). Both ways are in one process, against one server, in rounds that take turns. `step`: so many behind each
other, until the stream has ended, per step; `host`: until the host had control back after the last of them. Medians and
the least, in microseconds.

    tests/bench/fences.py PATH [--rounds N] [--steps N]     PATH: of the server's Unix socket; KLD_LIBRARY: libkld"""
import argparse
import json
import os
import pathlib
import statistics
import sys
import time

from argumentlib import how_many, stop

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = next(p for p in (HERE.parents[1] / "client/python", HERE.parents[1] / "python") if (p / "kld").is_dir())
sys.path[:0] = [str(HERE.parent / "e2e"), str(PACKAGE)]


def measured(step, finish, steps):
    finish()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    host = time.perf_counter()
    finish()
    return (time.perf_counter() - start) / steps * 1e6, (host - start) / steps * 1e6


def compare(what, ways, args):
    """ways: name -> (step, finish)."""
    found = {name: [] for name in ways}
    for name, (step, finish) in ways.items():
        measured(step, finish, 200)
    for _ in range(args.rounds):
        for name, (step, finish) in ways.items():
            found[name].append(measured(step, finish, args.steps))
    for name, times in found.items():
        whole, host = zip(*times)
        print(json.dumps({"what": what, "waits_for": name, "step_us": round(statistics.median(whole), 2),
                          "step_us_least": round(min(whole), 2), "host_us": round(statistics.median(host), 2)}), flush=True)
    ratio = statistics.median(a[0] / b[0] for a, b in zip(found["fence"], found["event"]))
    print(json.dumps({"what": what, "fence_over_event": round(ratio, 4)}), flush=True)


def bare(args):
    import fencelib
    ways = {}
    for name in ("event", "fence"):
        trainer = fencelib.Trainer(args.path, fence=name == "fence")
        ways[name] = trainer.step, trainer.finish
    compare("libkld", ways, args)


def package(args):
    import torch

    import kld
    from kld import functional
    ways = {}

    def way(connection, shape):
        q = torch.randn(*shape, device="cuda", requires_grad=True)
        p = torch.randn(*shape, device="cuda")

        def step():
            q.grad = None
            functional.kl_div(q, p, reduction="batchmean", input_form="logits", target_form="logits",
                              connection=connection).backward()
        return step, torch.cuda.synchronize

    connections = {}
    for shape in ((64, 1024), (4096, 32000)):
        for name in ("event", "fence"):
            os.environ["KLD_DONE"] = name
            if name not in connections:
                connections[name] = kld.connect(f"unix:{args.path}")
            ways[name] = way(connections[name], shape)
            ways[name][0]()
        compare(f"kl_div {shape[0]}x{shape[1]}", ways, args)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--rounds", type=how_many, default=15)
    parser.add_argument("--steps", type=how_many, default=1000)
    args = parser.parse_args()
    if not pathlib.Path(args.path).is_socket():
        stop(f"{args.path}: expected the Unix socket of a kld-server that runs")
    bare(args)
    try:
        import torch
        has_torch = torch.cuda.is_available()
    except ImportError:
        has_torch = False
    if has_torch:
        package(args)


if __name__ == "__main__":
    main()
