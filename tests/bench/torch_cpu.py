#!/usr/bin/env python3
"""kld's CPU back end against PyTorch on the same CPU and threads: eager and torch.compile.

Each round times every contender once, each round another one first; medians are reported, and ratios are
medians of the ratios of a round, so that a busy machine slows all alike. PyTorch's threads do not spin
between operations. kld runs in this process (local:cpu) on PyTorch's own memory; its gradient is a new tensor
each time, as autograd's is, but in cpu_per_thread one that is there. Logits of 16 bits: PyTorch as written in their type, and upcast to FP32 first.
torch.compile needs a C++ compiler. Checks values against FP64 PyTorch. Writes JSON (--json FILE).
The ceilings, too, are measured again for each case. On a busy machine the ratios stand; what kld
takes on cores of its own is its CPU time over the threads (cpu_per_thread).

Exit status 1: kld's value or gradient is off, or with --strict kld is slower than torch.compile or
less than 3 times as fast as eager.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time

# PyTorch's threads would spin on behind its last operation, for 8 to 13 ms, and take the cores from whoever is
# timed next. libgomp reads this when it is loaded.
os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")

import torch
import torch.nn.functional as F

import kldlib
from argumentlib import how_many

DIVERGENCES = {"forward_kl": 0, "reverse_kl": 1, "js": 4, "tv": 7, "cross_entropy": 8}
FORMS = {"probs": 0, "logprobs": 1, "logits": 2}
# 1/16 of the rows of the shapes that the CUDA back end is measured at.
SHAPES = [("probs", "float32", 1024, 16384), ("logits", "bfloat16", 512, 32768),
          ("logits", "bfloat16", 256, 131072), ("logits", "bfloat16", 128, 262144),
          ("logits", "float32", 256, 32768)]
# What else is common: other divergences, logarithms, rows that agree (the noise between the two
# sides' logits makes a KL of 0.005), short rows.
MORE = [(("probs", "float32", 1024, 16384), "reverse_kl", 0),
        (("logprobs", "float32", 1024, 16384), "forward_kl", 0),
        (("logits", "float32", 256, 32768), "reverse_kl", 0),
        (("logits", "float32", 256, 32768), "cross_entropy", 0),
        (("logits", "float32", 256, 32768), "tv", 0),
        (("logits", "bfloat16", 512, 32768), "cross_entropy", 0),
        (("logits", "float32", 256, 32768), "forward_kl", 0.1),
        (("logits", "float32", 256, 32768), "reverse_kl", 0.1),
        (("logits", "float32", 400000, 10), "forward_kl", 0),
        (("logits", "float32", 65536, 64), "forward_kl", 0)]
WARM_UP = 2


def kl(log_q, log_p):
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def loss_of(form, divergence):
    """The loss as one writes it in PyTorch: a function of (predictions, targets)."""
    def probs_kl(q, p):
        return F.kl_div(q.log(), p, reduction="batchmean")

    def probs_js(q, p):
        log_m = (0.5 * (p + q)).log()
        return 0.5 * (F.kl_div(log_m, p, reduction="batchmean")
                      + F.kl_div(log_m, q, reduction="batchmean"))

    def probs_reverse(q, p):
        return F.kl_div(p.log(), q, reduction="batchmean")

    def logits_reverse(q, p):
        return kl(F.log_softmax(p, -1), F.log_softmax(q, -1))

    def logits_tv(q, p):
        return 0.5 * (F.softmax(q, -1) - F.softmax(p, -1)).abs().sum(-1).mean()

    def logits_cross_entropy(q, p):
        return F.cross_entropy(q, F.softmax(p, -1))

    def logits_kl(q, p):
        return kl(F.log_softmax(q, -1), F.log_softmax(p, -1))

    def logits_js(q, p):
        log_q, log_p = F.log_softmax(q, -1), F.log_softmax(p, -1)
        log_m = torch.logaddexp(log_q, log_p) - 0.6931471805599453
        return 0.5 * (kl(log_m, log_p) + kl(log_m, log_q))

    return {"probs forward_kl": probs_kl, "probs js": probs_js, "logits forward_kl": logits_kl,
            "logits js": logits_js, "probs reverse_kl": probs_reverse, "logprobs forward_kl": kl,
            "logits reverse_kl": logits_reverse, "logits tv": logits_tv,
            "logits cross_entropy": logits_cross_entropy}[f"{form} {divergence}"]


def with_gradient(loss, predictions, targets):
    leaf = predictions.detach().requires_grad_(True)
    value = loss(leaf, targets)
    value.backward()
    return value, leaf.grad


def contenders_of(form, divergence, predictions, targets, compile_too):
    plain = loss_of(form, divergence)
    written = {"": plain}
    if predictions.element_size() == 2:
        written[" FP32"] = lambda q, p: plain(q.float(), p.float())
    found = {}
    for suffix, function in written.items():
        ways = {"eager": function}
        if compile_too:
            ways["compile"] = torch.compile(function, dynamic=False)
        for name, way in ways.items():
            found[name + suffix] = (
                lambda way=way: way(predictions, targets),
                lambda way=way: with_gradient(way, predictions, targets))
    return found


def inputs(form, dtype, rows, columns, noise=0):
    torch.manual_seed(1)
    if form == "probs":
        return (torch.softmax(torch.rand(rows, columns) * 3, dim=1),
                torch.softmax(torch.rand(rows, columns), dim=1))
    kind = getattr(torch, dtype)
    predictions, targets = (torch.randn(rows, columns) * 2 for _ in range(2))
    if noise:
        targets = predictions + targets * (noise / 2)
    if form == "logprobs":
        predictions, targets = F.log_softmax(predictions, -1), F.log_softmax(targets, -1)
    return predictions.to(kind), targets.to(kind)


def truth(form, divergence, predictions, targets):
    """Loss of all rows and the gradient of the first few, in FP64."""
    loss, total, rows = loss_of(form, divergence), 0.0, predictions.shape[0]
    for q, p in zip(predictions.split(32), targets.split(32)):
        total += loss(q.double(), p.double()).item() * q.shape[0]
    _, gradient = with_gradient(loss, predictions[:4].double(), targets[:4].double())
    return total / rows, gradient * (4 / rows)


def milliseconds(function):
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def cpu_milliseconds(connection, request):
    """CPU time of a run over the threads: what it takes on cores of its own. Nothing else runs."""
    times = []
    for _ in range(5 + WARM_UP):
        start = time.process_time()
        connection.run(request)
        times.append((time.process_time() - start) * 1e3)
    return statistics.median(times[WARM_UP:]) / torch.get_num_threads()


def requests_of(shape, divergence, predictions, targets, gradient):
    form, dtype, rows, columns = shape
    places = {"predictions": predictions.data_ptr(), "targets": targets.data_ptr()}
    numbers = (DIVERGENCES[divergence], 0, FORMS[form], FORMS[form])
    return [kldlib.request((rows, columns), dtype, places, *numbers),
            kldlib.request((rows, columns), dtype,
                           {**places, "grad_predictions": gradient.data_ptr()}, *numbers)]


def check(connection, requests, gradient, exact, exact_gradient):
    values = [connection.run(r).loss for r in requests]
    largest = exact_gradient.abs().amax(dim=1, keepdim=True)
    off = ((gradient[:4].double() - exact_gradient).abs() / largest).max().item()
    allowed = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
    relative = abs(values[0] - exact) / abs(exact)
    return {"loss": values[0], "relative_to_fp64": relative, "gradient_off_of_largest": off,
            "same_loss_with_gradient": values[0] == values[1],
            "fine": relative < 1e-6 and off < allowed[gradient.dtype] and values[0] == values[1]}


def measure(connection, shape, divergence, noise, args):
    form, dtype, rows, columns = shape
    predictions, targets = inputs(*shape, noise)
    gradient = torch.empty_like(predictions)
    requests = requests_of(shape, divergence, predictions, targets, gradient)
    cpu_ms = [cpu_milliseconds(connection, request) for request in requests]
    checks = check(connection, requests, gradient, *truth(form, divergence, predictions, targets))
    contenders = contenders_of(form, divergence, predictions, targets, not args.no_compile)

    def both():
        made = torch.empty_like(predictions)
        connection.run(requests_of(shape, divergence, predictions, targets, made)[1])

    contenders["kld"] = (lambda: connection.run(requests[0]), both)
    times = {name: {"loss": [], "both": []} for name in contenders}
    for number in range(args.rounds + WARM_UP):
        names = list(contenders)
        for name in names[number % len(names):] + names[:number % len(names)]:
            for label, function in zip(("loss", "both"), contenders[name]):
                took = milliseconds(function)
                if number >= WARM_UP:
                    times[name][label].append(took)
    if not args.no_compile:
        torch.compiler.reset()
    ceilings = connection.ceiling(256 << 20)
    nbytes = predictions.numel() * predictions.element_size()
    result = {"form": form, "dtype": dtype, "shape": [rows, columns], "divergence": divergence,
              "noise": noise, "checks": checks, "ceiling_read_bytes_per_s": ceilings[0],
              "ceiling_read_write_bytes_per_s": ceilings[1], "ms": {}}
    floors = (2 * nbytes / ceilings[0], 3 * nbytes / ceilings[1])
    for label, floor, cpu in zip(("loss", "both"), floors, cpu_ms):
        ours = times["kld"][label]
        line = {name: {"median": statistics.median(t[label]), "min": min(t[label]),
                       "times_kld": statistics.median(a / b for a, b in zip(t[label], ours))}
                for name, t in times.items()}
        line["kld"]["share_of_ceiling"] = floor * 1e3 / line["kld"]["median"]
        line["kld"]["cpu_per_thread"] = cpu
        result["ms"][label] = line
    return result


def show(result):
    head = f"{result['form']} {result['dtype']} {result['shape'][0]} x {result['shape'][1]}"
    head += " close" if result["noise"] else ""
    for label, line in result["ms"].items():
        cells = [f"{name} {at['median']:.2f}"
                 + ("" if name == "kld" else f" ({at['times_kld']:.2f}x)")
                 for name, at in line.items()]
        print(f"{head:38} {result['divergence']:13} {label:5}", " | ".join(cells),
              f"| {line['kld']['share_of_ceiling']:.2f} of ceiling", flush=True)
    if not result["checks"]["fine"]:
        print("   ", result["checks"], flush=True)


def slower(result):
    for label, line in result["ms"].items():
        for name, at in line.items():
            least = 3 if name.startswith("eager") else 1
            if name != "kld" and at["times_kld"] < least:
                yield (f"{result['shape']} {result['divergence']} {label}: "
                       f"{at['times_kld']:.2f} x {name}")


def cpu_model():
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = (x.split(":")[1].strip() for x in lines if x.startswith("model name"))
        return next(names, "unknown")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=how_many, default=15)
    parser.add_argument("--only", default="", help="shapes that read so, as 'logits float32'")
    parser.add_argument("--divergence", action="append", choices=list(DIVERGENCES))
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json")
    args = parser.parse_args()
    kldlib.need()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    connection = kldlib.Connection("local:cpu")
    results, failures = [], []
    cases = [(shape, divergence, 0) for shape in SHAPES for divergence in ("forward_kl", "js")]
    for shape, divergence, noise in cases + MORE:
        if args.only not in " ".join(str(x) for x in shape):
            continue
        if args.divergence and divergence not in args.divergence:
            continue
        result = measure(connection, shape, divergence, noise, args)
        show(result)
        results.append(result)
        if not result["checks"]["fine"]:
            failures.append(f"{shape} {divergence}: {result['checks']}")
        if args.strict:
            failures += slower(result)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump({"what": "torch_cpu", "commit": args.commit, "cpu": cpu_model(),
                       "threads": threads, "torch": torch.__version__,
                       "capability": torch.backends.cpu.get_cpu_capability(),
                       "system": platform.platform(), "rounds": args.rounds,
                       "results": results}, out, indent=1)
            out.write("\n")
    connection.close()
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
