#!/usr/bin/env python3
"""Distils a teacher into a student on real handwritten digits, twice from the same seed: through kld and through
PyTorch's own kl_div. The two curves of losses are one, and so is what the student can do in the end.

  distil_digits.py [--server URL] [--device cuda] [--plot FILE.svg]

Without a server kld computes in this process. Exit status 1 where the curves part by more than 1e-5."""
import argparse
import sys

import torch

import digits
import kld.nn

TEMPERATURE = 3.0


def draw(path, curves):
    """Loss against step, an SVG. curves: name -> losses."""
    top, width, height = max(map(max, curves.values())), 640, 380
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
             f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>',
             f'<text x="50" y="20">distillation loss against step; the largest difference is '
             f'{max(abs(a - b) for a, b in zip(*curves.values())):.1e}</text>']
    for share in (0, 0.5, 1):
        y = 330 - 290 * share
        parts.append(f'<path d="M50 {y}H{width - 20}" stroke="#ddd"/><text x="44" y="{y + 4}" text-anchor="end">'
                     f'{top * share:.2f}</text>')
    steps = len(next(iter(curves.values())))
    parts.append(f'<text x="{(30 + width) / 2}" y="370" text-anchor="middle">training step</text>')
    for step in range(0, steps, max(1, steps // 6)):
        x = 50 + (width - 70) * step / (steps - 1)
        parts.append(f'<path d="M{x:.1f} 330v5" stroke="#888"/><text x="{x:.1f}" y="349" text-anchor="middle">{step}</text>')
    for (name, losses), (color, line, stroke) in zip(curves.items(), (("#c2571a", "", 5), ("#1b6ca8", "6 4", 2))):
        points = " ".join(f"{50 + (width - 70) * step / (steps - 1):.1f},{330 - 290 * loss / top:.1f}"
                          for step, loss in enumerate(losses))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{stroke}" '
                     f'stroke-dasharray="{line}"/>')
    for number, (name, color) in enumerate(zip(curves, ("#c2571a", "#1b6ca8"))):
        parts.append(f'<text x="{width - 30}" y="{60 + 18 * number}" text-anchor="end" fill="{color}">{name}</text>')
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(parts) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plot")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    (pixels, _), _ = digits.load(args.device)
    teacher = digits.trained_teacher(args.device)
    targets = (teacher(pixels) / TEMPERATURE).softmax(-1)
    connection = kld.connect(args.server) if args.server else None
    # One request a step: the student's logits as they are, the temperature and its square as parameters.
    mine = kld.nn.KLDivLoss(reduction="batchmean", input_form="logits", temperature=TEMPERATURE,
                            scale=TEMPERATURE**2, connection=connection)
    theirs = torch.nn.KLDivLoss(reduction="batchmean")
    ways = {"kld": lambda logits: mine(logits, targets),
            "PyTorch": lambda logits: TEMPERATURE**2 * theirs((logits / TEMPERATURE).log_softmax(-1), targets)}
    curves, scores = {}, {}
    for name, distance in ways.items():
        student = digits.new_student(args.device)
        curves[name] = digits.train(student, distance, args.device)
        scores[name] = digits.accuracy(student, args.device)
        print(f"{name:8} loss {curves[name][0]:.6f} -> {curves[name][-1]:.6f}, "
              f"{scores[name]:.4f} of the other digits right")
    apart = max(abs(a - b) for a, b in zip(*curves.values()))
    print(f"the curves differ by at most {apart:.2e}")
    if args.plot:
        draw(args.plot, curves)
    return int(not apart <= 1e-5 or scores["kld"] != scores["PyTorch"])


if __name__ == "__main__":
    sys.exit(main())
