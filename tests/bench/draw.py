#!/usr/bin/env python3
"""Draws the pictures of the READMEs from measured results: tests/bench/results/*.json to *.svg.

    draw.py            writes the pictures
    draw.py --check    says whether those checked in are what the results give; exit status 1: not

classes-h200.svg: the share of the floor against the number of classes (kernels --classes).
peers-h200.svg: how many times as long as kld other ways take (torch_peers.py). Standard library
only; computes nothing that the JSON does not say.
"""

import json
import math
import pathlib
import sys

RESULTS = pathlib.Path(__file__).parent / "results"
FONT = 'font-family="sans-serif" font-size="12" fill="#333"'
BOLD = 'font-weight="bold"'
COLORS = ["#1b6ca8", "#7fb2d9", "#c2571a", "#eba97f", "#777777"]


def text(x, y, what, anchor="start", extra=""):
    what = what.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {FONT} {extra}>{what}</text>'


def line(x1, y1, x2, y2, color="#ddd", width=1):
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{color}" stroke-width="{width}"/>')


def page(width, height, parts):
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                      f'width="{width}" height="{height}">',
                      f'<rect width="{width}" height="{height}" fill="white"/>', *parts,
                      "</svg>", ""])


def draw_classes(data):
    """One line for each dtype and job: forward KL of logits."""
    left, top, width, height = 75, 65, 600, 280
    rows = [r for r in data["results"] if r["divergence"] == "forward_kl"]
    low = math.log2(min(r["classes"] for r in rows))
    high = math.log2(max(r["classes"] for r in rows))

    def place(r):
        x = left + width * (math.log2(r["classes"]) - low) / (high - low)
        return x, top + height * (1 - r["fraction_of_ceiling"])

    elements = max(r["rows"] * r["classes"] for r in rows)
    parts = [text(15, 20, "Forward KL of logits: share of what the card's memory allows", extra=BOLD),
             text(15, 37, f'{data["card"]}, commit {data["commit"]}; 1.0 is one read of the inputs '
                  "and one write of the gradient"),
             text(15, 54, f"rows: 2^{elements.bit_length() - 1} elements a tensor / classes in a row "
                  f"({max(r['rows'] for r in rows):,} to {min(r['rows'] for r in rows):,} rows)"),
             text(20, top + height / 2, "share of memory ceiling", "middle",
                  f'transform="rotate(-90 20 {top + height / 2:.1f})"')]
    for tenth in range(0, 11, 2):
        y = top + height * (1 - tenth / 10)
        parts += [line(left, y, left + width, y),
                  text(left - 8, y + 4, f"{tenth / 10:.1f}", "end")]
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = left + width * (power - low) / (high - low)
        parts += [line(x, top, x, top + height),
                  text(x, top + height + 18, f"{2 ** power}", "middle")]
    parts.append(text(left + width / 2, top + height + 38, "classes in a row", "middle"))
    series = [(dtype, gradient) for dtype in ("BF16", "FP32") for gradient in (False, True)]
    for color, (dtype, gradient) in zip(COLORS, series):
        points = sorted(place(r) for r in rows if (r["dtype"], r["gradient"]) == (dtype, gradient))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        at = top + 20 + 20 * series.index((dtype, gradient))
        parts += [line(left + width + 15, at - 4, left + width + 40, at - 4, color, 3),
                  text(left + width + 46, at,
                       dtype + (", loss + gradient" if gradient else ", loss"))]
    return page(850, top + height + 55, parts)


def bars_of(result, label):
    """(name, times as long as kld) of each way; 16-bit peers as distillation code has them."""
    times = {name: way["times_kld"] for name, way in result[label].items()}
    bars = []
    for name in ("compile", "liger", "eager"):
        upcast = times.get(f"{name} FP32")
        value = upcast if upcast is not None else times.get(name)
        if value is not None:
            bars.append((name, value))
    return bars


def draw_peers(data):
    left, top, bar, width = 365, 90, 13, 420
    names = {"compile": "torch.compile", "liger": "Liger", "eager": "PyTorch, eager"}
    color_of = dict(zip(("compile", "liger", "eager"), (COLORS[0], COLORS[2], COLORS[4])))
    values = [value for result in data["results"] for label in ("loss", "both")
              for _, value in bars_of(result, label)]
    low, high = (round_to(math.log2(limit(*values, 1))) for limit, round_to in
                 ((min, math.floor), (max, math.ceil)))

    def place(value):
        return left + width * (math.log2(value) - low) / (high - low)

    parts, y = [], top
    for result in data["results"]:
        dtype = {"float32": "FP32", "bfloat16": "BF16"}[result["dtype"]]
        shape = " x ".join(str(extent) for extent in result["shape"])
        job = f'{result["form"]} {dtype} {shape}, {result["divergence"]}'
        for label, words in (("loss", "loss"), ("both", "loss + gradient")):
            bars = bars_of(result, label)
            middle = y + bar * len(bars) / 2 + 4
            parts.append(text(left - 12, middle, f"{job}, {words}", "end"))
            for name, value in bars:
                start, end = sorted((place(1), place(value)))
                parts.append(f'<rect x="{start:.1f}" y="{y:.1f}" width="{end - start:.1f}" '
                             f'height="{bar - 2}" fill="{color_of[name]}"/>')
                parts.append(text(end + 5, y + bar - 3, f"{value:.1f}"))
                y += bar
            y += 8
    grid = []
    for power in range(low, high + 1):
        x = place(2.0 ** power)
        grid += [line(x, top - 8, x, y, "#888" if power == 0 else "#ddd"),
                 text(x, top - 14, f"{2.0 ** power:g}x", "middle"),
                 text(x, y + 16, f"{2.0 ** power:g}x", "middle")]
    head = [text(10, 20, "How many times slower than kld (log scale; 1x: as fast as kld)",
                 extra=BOLD),
            text(10, 37, f'{data["card"]}, PyTorch {data["torch"]}, Liger {data["liger"]}, '
                 f'commit {data["commit"]}')]
    for i, name in enumerate(names):
        x = left + 130 * i
        head += [f'<rect x="{x}" y="47" width="12" height="12" fill="{color_of[name]}"/>',
                 text(x + 18, 57, names[name])]
    return page(850, int(y) + 28, head + grid + parts)


PICTURES = {"classes-h200": draw_classes, "peers-h200": draw_peers}
SOURCES = {"peers-h200": "torch-peers-h200"}


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(__doc__.strip())
        return
    if sys.argv[1:] and not check:
        sys.exit(__doc__)
    stale = 0
    for name, draw in PICTURES.items():
        source = RESULTS / f"{SOURCES.get(name, name)}.json"
        picture = draw(json.loads(source.read_text()))
        at = RESULTS / f"{name}.svg"
        if not check:
            at.write_text(picture)
        elif not at.exists() or at.read_text() != picture:
            print(f"{at.name} is not what {source.name} gives: run tests/bench/draw.py")
            stale += 1
    sys.exit(1 if stale else 0)


if __name__ == "__main__":
    main()
