#!/usr/bin/env python3
"""kld on a GPU against what a PyTorch user has there: eager, torch.compile, Liger's kernels.

kld runs in this process on PyTorch's own memory (local:cuda). Each round times every contender
once, in turn, by the wall clock with the device synchronised before and after; medians are
reported, and ratios are medians of the ratios of a round. Logits of 16 bits: PyTorch as written in
their type, and with log_softmax in FP32, as distillation code does it. A peer that cannot run is
named with its error and left out. Peak extra memory is all but the inputs: the gradient counts, for
kld as well.

Losses are held to an FP64 one of all rows, gradients (of the predictions) to FP64 ones of a few.
Exit status 1: kld did not run, or its value or gradient is off. Writes JSON (--json FILE) after
each case. --device cpu --rows-over 256 tries the script itself where there is no GPU.
"""

import argparse
import functools
import gc
import importlib.metadata
import json
import math
import platform
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import kldlib
from argumentlib import how_many

DIVERGENCES = {"forward_kl": 0, "js": 4}
FORMS = {"probs": 0, "logits": 2}
SHAPES = [("probs", "float32", 16384, 16384), ("logits", "bfloat16", 8192, 32768),
          ("logits", "bfloat16", 4096, 131072), ("logits", "bfloat16", 2048, 262144),
          ("logits", "float32", 4096, 32768)]
LABELS = ("loss", "both")
WARM_UP = 3
LN_HALF = math.log(0.5)
GRADIENT_OFF_MAX = {"float32": 1e-6, "bfloat16": 2.0**-7}


def kl(log_q, log_p):
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def loss_of(form, divergence, softmax_dtype=None):
    """The loss as one writes it in PyTorch: a function of (predictions, targets)."""
    def probs_kl(q, p):
        return F.kl_div(q.log(), p, reduction="batchmean")

    def probs_js(q, p):
        log_m = (0.5 * (p + q)).log()
        return 0.5 * (F.kl_div(log_m, p, reduction="batchmean")
                      + F.kl_div(log_m, q, reduction="batchmean"))

    def logits_kl(q, p):
        return kl(F.log_softmax(q, -1, dtype=softmax_dtype),
                  F.log_softmax(p, -1, dtype=softmax_dtype))

    def logits_js(q, p):  # as TRL's generalized_jsd_loss at beta 0.5
        log_q = F.log_softmax(q, -1, dtype=softmax_dtype)
        log_p = F.log_softmax(p, -1, dtype=softmax_dtype)
        log_m = torch.logsumexp(torch.stack([log_q + LN_HALF, log_p + LN_HALF]), dim=0)
        terms = (0.5 * F.kl_div(log_m, log_p, reduction="none", log_target=True)
                 + 0.5 * F.kl_div(log_m, log_q, reduction="none", log_target=True))
        return terms.sum() / terms.size(0)

    return {"probs forward_kl": probs_kl, "probs js": probs_js, "logits forward_kl": logits_kl,
            "logits js": logits_js}[f"{form} {divergence}"]


def chosen():
    """Newer ones have several implementations of JS and take the best that is installed."""
    try:
        from liger_kernel.backends import available_impls
        return f" (js: {(available_impls('jsd_loss_and_grad') or ['none'])[0]})"
    except ImportError:
        return ""


@functools.cache
def liger():
    """(version, LigerKLDIVLoss, LigerJSD), or None after saying why not."""
    try:
        from liger_kernel.transformers.jsd import LigerJSD
        from liger_kernel.transformers.kl_div import LigerKLDIVLoss
        return f"{importlib.metadata.version('liger_kernel')}{chosen()}", LigerKLDIVLoss, LigerJSD
    except Exception as error:  # it imports much: anything may be missing
        print(f"liger: left out: {said(error)}", flush=True)
        return None


def liger_loss_of(form, divergence, softmax_dtype=None):
    """Liger's losses take logarithms; what turns the inputs into them is PyTorch's."""
    _, kl_class, js_class = liger()
    kl_probs = kl_class(reduction="batchmean")
    kl_logs = kl_class(reduction="batchmean", log_target=True)
    js = js_class(beta=0.5)
    if form == "probs":
        return {"forward_kl": lambda q, p: kl_probs(q.log(), p),
                "js": lambda q, p: js(q.log(), p.log())}[divergence]
    loss = {"forward_kl": kl_logs, "js": js}[divergence]
    return lambda q, p: loss(F.log_softmax(q, -1, dtype=softmax_dtype),
                             F.log_softmax(p, -1, dtype=softmax_dtype))


def said(error):
    """An error in one line of bearable length."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def with_gradient(loss, predictions, targets):
    leaf = predictions.detach().requires_grad_(True)
    value = loss(leaf, targets)
    value.backward()
    return value, leaf.grad


def peers_of(form, divergence, predictions, targets, compile_mode):
    """Name -> label -> function that returns (loss, gradient or None)."""
    variants = {"": None}
    if form == "logits" and predictions.element_size() == 2:
        variants[" FP32"] = torch.float32
    found = {}
    for suffix, dtype in variants.items():
        ways = {"eager": loss_of(form, divergence, dtype)}
        if compile_mode:
            ways["compile"] = torch.compile(ways["eager"], dynamic=False, mode=compile_mode)
        if liger():
            ways["liger"] = liger_loss_of(form, divergence, dtype)
        for name, way in ways.items():
            found[name + suffix] = {
                "loss": lambda way=way: (way(predictions, targets), None),
                "both": lambda way=way: with_gradient(way, predictions, targets)}
    return found


def kld_of(connection, form, dtype, divergence, predictions, targets, gradient, runs):
    shape, places = tuple(predictions.shape), {"predictions": predictions.data_ptr(),
                                               "targets": targets.data_ptr()}
    numbers = (DIVERGENCES[divergence], 0, FORMS[form], FORMS[form])
    requests = {"loss": kldlib.request(shape, dtype, places, *numbers),
                "both": kldlib.request(shape, dtype,
                                       {**places, "grad_predictions": gradient.data_ptr()},
                                       *numbers)}

    def run(label):
        runs[label].append(connection.run(requests[label]))
        return runs[label][-1].loss, gradient

    return {label: functools.partial(run, label) for label in LABELS}


def inputs(form, dtype, rows, columns, device):
    torch.manual_seed(1)
    if form == "probs":
        return (torch.softmax(torch.rand(rows, columns, device=device) * 3, dim=1),
                torch.softmax(torch.rand(rows, columns, device=device), dim=1))
    kind = getattr(torch, dtype)
    return tuple((torch.randn(rows, columns, device=device) * 2).to(kind) for _ in range(2))


def truth(form, divergence, predictions, targets):
    """In FP64: the loss of all rows, which rows' gradients are looked at, and these."""
    loss, total, (rows, columns) = loss_of(form, divergence), 0.0, predictions.shape
    step = max(1, (1 << 24) // columns)
    for q, p in zip(predictions.split(step), targets.split(step)):
        total += loss(q.double(), p.double()).item() * q.shape[0]
    some = sorted({0, 1 % rows, rows // 2, rows - 1})
    _, gradient = with_gradient(loss, predictions[some].double(), targets[some].double())
    return total / rows, some, gradient * (len(some) / rows)


def check(outcome, exact):
    value, gradient = outcome
    value = value.item() if isinstance(value, torch.Tensor) else value
    loss, rows, want = exact
    off = (gradient[rows].double() - want).abs() / want.abs().amax(dim=1, keepdim=True)
    return {"loss": value, "relative_to_fp64": abs(value - loss) / abs(loss),
            "gradient_off_of_largest": off.max().item()}


def tidy(device):
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(function, device):
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def peak_extra(function, device):
    """Most bytes that PyTorch's allocator held at once beyond what it holds now."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kld_extra(function, device, own):
    """kld's pool keeps what it once took, so a look afterwards sees the peak. own: the gradient."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        function()
    return max(0, free - torch.cuda.mem_get_info()[0]) + own


def try_out(ways, exact, gradient, device):
    """Checks and memory of those that run; takes the others out of ways. First calls compile."""
    checks, extra, errors = {}, {}, {}
    for name in list(ways):
        at = ways[name]
        try:
            if name == "kld":
                size = gradient.numel() * gradient.element_size()
                extra[name] = {"loss": kld_extra(at["loss"], device, 0),
                               "both": kld_extra(at["both"], device, size)}
                gradient.fill_(float("nan"))
                synchronize(device)
            value = float(at["loss"]()[0])
            checks[name] = check(at["both"](), exact)
            # not the same bits: what is asked for chooses the kernel
            checks[name]["same_loss_with_gradient"] = (
                abs(value - checks[name]["loss"]) <= 1e-6 * abs(value))
            if name != "kld":
                extra[name] = {label: peak_extra(at[label], device) for label in LABELS}
        except Exception as error:  # a peer that fails must not take the others' figures along
            errors[name] = said(error)
            del ways[name]
        if name in errors:
            tidy(device)  # only now: the exception held on to the tensors of its frames
    return checks, extra, errors


def rounds_of(ways, args, errors):
    times = {name: {label: [] for label in LABELS} for name in ways}
    for number in range(args.rounds + WARM_UP):
        for name in list(ways):
            try:
                for label in LABELS:
                    took = milliseconds(ways[name][label], args.device)
                    if number >= WARM_UP:
                        times[name][label].append(took)
            except Exception as error:
                errors[name] = said(error)
                del ways[name], times[name]
    return times


def measure(connection, shape, divergence, compile_mode, args):
    form, dtype, rows, columns = shape
    predictions, targets = inputs(*shape, args.device)
    gradient = torch.empty_like(predictions)
    runs = {label: [] for label in LABELS}
    exact = truth(form, divergence, predictions, targets)
    ways = {"kld": kld_of(connection, form, dtype, divergence, predictions, targets, gradient,
                          runs)}
    ways.update(peers_of(form, divergence, predictions, targets, compile_mode))
    checks, extra, errors = try_out(ways, exact, gradient, args.device)
    for of_label in runs.values():
        of_label.clear()
    times = rounds_of(ways, args, errors)
    result = {"form": form, "dtype": dtype, "shape": [rows, columns], "divergence": divergence,
              "tensor_bytes": predictions.numel() * predictions.element_size(),
              "compile_mode": compile_mode, "loss_fp64": exact[0], "checks": checks,
              "errors": errors}
    for label in LABELS:
        result[label] = {}
        for name, of_name in times.items():
            took = of_name[label]
            at = result[label][name] = {"ms": statistics.median(took), "min_ms": min(took)}
            if "kld" in times:
                ours = times["kld"][label]
                at["times_kld"] = statistics.median(a / b for a, b in zip(took, ours))
            if extra[name][label] is not None:
                at["extra_mib"] = round(extra[name][label] / 2**20, 1)
            if name == "kld":
                kernel = statistics.median(r.kernel_ns for r in runs[label][WARM_UP:])
                at["kernel_ms"] = kernel / 1e6
    return result


def failures_of(result):
    head = f"{result['form']} {result['dtype']} {result['shape']} {result['divergence']}"
    if "kld" in result["errors"]:
        return [f"{head}: {result['errors']['kld']}"]
    at = result["checks"]["kld"]
    fine = (at["relative_to_fp64"] <= 1e-6 and at["same_loss_with_gradient"]
            and at["gradient_off_of_largest"] <= GRADIENT_OFF_MAX[result["dtype"]])
    return [] if fine else [f"{head}: {at}"]


def show(result, seconds):
    print(f"{result['form']} {result['dtype']} {result['shape'][0]} x {result['shape'][1]} "
          f"{result['divergence']} ({seconds:.0f} s)")
    print(f"  {'':13}" + "".join(f"{label + ' ms':>10} {'x kld':>6} {'+MiB':>8}  "
                                 for label in LABELS) + f"{'loss off':>9} {'grad off':>9}")
    for name, checked in result["checks"].items():
        if name in result["errors"]:
            continue
        cells = [f"{at['ms']:10.3f} {at.get('times_kld', math.nan):6.2f} "
                 f"{at.get('extra_mib', math.nan):8.1f}  "
                 for at in (result[label][name] for label in LABELS)]
        print(f"  {name:13}" + "".join(cells) + f"{checked['relative_to_fp64']:9.1e} "
              f"{checked['gradient_off_of_largest']:9.1e}")
    for name, text in result["errors"].items():
        print(f"  {name:13} left out: {text}")
    sys.stdout.flush()


def add_ceilings(connection, results):
    """Last of all: the arrays it reads stay with kld's pool and would hide what requests take."""
    ceilings = {}
    for result in results:
        size = result["tensor_bytes"]
        if size not in ceilings:
            ceilings[size] = connection.ceiling(size)
        read, read_write = ceilings[size]
        result["ceiling_read_bytes_per_s"] = read
        result["ceiling_read_write_bytes_per_s"] = read_write
        floors = {"loss": 2e3 * size / read, "both": 3e3 * size / read_write}
        result["floor_ms"] = floors
        cells = []
        for label in LABELS:
            ours = result[label].get("kld")
            if ours:
                ours["share_of_ceiling"] = floors[label] / ours["ms"]
                cells.append(f"{label}: floor {floors[label]:.3f} ms, "
                             f"kld at {ours['share_of_ceiling']:.3f} of the ceiling")
        print(f"{result['form']} {result['dtype']} {result['shape']} {result['divergence']}:",
              "; ".join(cells))


def plain(value):
    """JSON knows no NaN and no infinity: those as text."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def driver():
    try:
        return subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return "unknown: no nvidia-smi"


def machine(args):
    found = {"card": None, "driver": None}
    if args.device == "cuda":
        found = {"card": torch.cuda.get_device_name(0), "driver": driver()}
    try:
        found["triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        found["triton"] = None
    return {**found, "torch": torch.__version__, "liger": liger()[0] if liger() else None,
            "system": platform.platform()}


def write(args, head, results):
    if not args.json:
        return
    with open(args.json, "w", encoding="utf-8") as out:
        json.dump(plain({**head, "results": results}), out, indent=1)
        out.write("\n")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=how_many, default=15)
    parser.add_argument("--cases", default="",
                        help="those that read so, as 'logits bfloat16 4096 131072 js'")
    parser.add_argument("--skip-compile", action="store_true")
    parser.add_argument("--compile-mode", default="default",
                        help="torch.compile's: default, max-autotune-no-cudagraphs, ...")
    parser.add_argument("--compile-until", type=float, default=110, metavar="SECONDS",
                        help="cases that begin later do without torch.compile (%(default)g)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rows-over", type=how_many, default=1, metavar="N",
                        help="N times fewer rows, for a trial")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json")
    args = parser.parse_args()
    kldlib.need()
    return args


def main():
    args = arguments()
    began = time.monotonic()
    cases = [((form, dtype, max(1, rows // args.rows_over), columns), divergence)
             for divergence in DIVERGENCES for form, dtype, rows, columns in SHAPES
             if args.cases in f"{form} {dtype} {rows} {columns} {divergence}"]
    if not cases:
        print(f"no case reads '{args.cases}'", file=sys.stderr)
        return 2
    if args.device == "cuda":
        torch.zeros(1, device="cuda")  # PyTorch's context before kld joins it
    connection = kldlib.Connection(f"local:{args.device}")
    head = {"what": "torch_peers", "commit": args.commit, **machine(args), "rounds": args.rounds,
            "timed": "wall clock, device synchronised before and after"}
    results, failures = [], []
    for shape, divergence in cases:
        at = time.monotonic()
        late = at - began > args.compile_until
        mode = None if args.skip_compile or late else args.compile_mode
        result = measure(connection, shape, divergence, mode, args)
        if late and not args.skip_compile:
            result["errors"]["compile"] = f"{args.compile_until:g} s (--compile-until) had passed"
        torch.compiler.reset()
        tidy(args.device)
        show(result, time.monotonic() - at)
        results.append(result)
        failures += failures_of(result)
        write(args, head, results)
    try:
        add_ceilings(connection, results)
    except kldlib.KldError as error:
        failures.append(f"no ceilings: {said(error)}")
    write(args, head, results)
    connection.close()
    for failure in failures:
        print("FAILED", failure)
    print(f"{time.monotonic() - began:.0f} s in all")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
