"""What kernels/README.md says of the kernels on a card is what kernels-*.json and classes-*.json have: the ceilings, both
tables, the shares of the floor by lengths of a row and the times that are named as today's. When one changes, the failure
prints what should be there."""
import fnmatch
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "kernels/README.md").read_text()
TEXT = " ".join(README.split())
CARDS = ("h200", "h100")
COLUMNS = [(divergence, gradient) for divergence in ("forward_kl", "reverse_kl", "js") for gradient in (False, True)]
HEADS = {"h200": "NVIDIA H200, driver 580, medians of 20;", "h100": "The same on an NVIDIA H100,"}


def record(name):
    return json.loads((ROOT / f"tests/bench/results/{name}.json").read_text())


def rows(card):
    """Of the README's table."""
    shown = README.split(HEADS[card], 1)[1].split("\n| case |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines()[2:]]


def row(card, name):
    """As the record has it; name: form or `alike`, data type, rows x classes."""
    what, dtype, count, _, classes = name.split()
    found = {(one["divergence"], one["gradient"]): f"{one['ms']:.3g} {one['fraction_of_ceiling']:.2f}"
             for one in record(f"kernels-{card}")["results"]
             if (one["dtype"], one["rows"], one["classes"]) == (dtype, int(count), int(classes))
             and one["alike"] == (what == "alike") and one["form"] == ("logits" if what == "alike" else what)}
    return [name, *(found[column] for column in COLUMNS)]


@pytest.mark.parametrize("card", CARDS)
def test_the_table_is_the_record(card):
    shown = rows(card)
    wanted = [row(card, cells[0]) for cells in shown]
    assert len(shown) == 7
    assert shown == wanted, "\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in wanted)


def test_the_ceilings_are_the_records():
    for card in CARDS:
        got = record(f"kernels-{card}")
        read, both = (f"{got[key] / 1e12:.2f}" for key in ("read_bytes_per_s", "read_write_bytes_per_s"))
        shown = TEXT.split(HEADS[card], 1)[1].split("| case |", 1)[0]
        assert f"read ceiling {read} TB/s, read and write {both}" in shown, (card, read, both)
        assert f"`, commit {got['commit']}" in shown or f"`, commit {got['commit'][:7]})" in shown
        assert f"kernels-{card}.json" in shown


def by_classes(card, dtype, divergence, gradient, key="fraction_of_ceiling"):
    return {one["classes"]: one[key] for one in record(f"classes-{card}")["results"]
            if (one["dtype"], one["divergence"], one["gradient"]) == (dtype, divergence, gradient) and not one["alike"]}


def spread(least, *tables, but=()):
    """The lowest and the highest from so many classes up."""
    some = [share for shares in tables for classes, share in shares.items() if classes >= least and classes not in but]
    return f"{min(some):.2f} to {max(some):.2f}"


def losses(card):
    """Of a KL: a table by length for each data type and direction."""
    return [by_classes(card, dtype, divergence, False) for dtype in ("BF16", "FP32")
            for divergence in ("forward_kl", "reverse_kl")]


def test_shares_by_length_are_the_records():
    half, single = (by_classes("h200", dtype, "forward_kl", True) for dtype in ("BF16", "FP32"))
    wanted = [f"The loss of a KL has {spread(2048, *losses('h200'))} of the floor from 2,048 classes up.",
              f"Of q - p BF16 has {spread(8192, half, but=(50257, 151936))} from 8,192 classes up (50,257, which are odd: "
              f"{half[50257]:.2f}; 151,936, of which a block's slice is three quarters full: {half[151936]:.2f}), "
              f"FP32 {spread(8192, single)}.",
              f"`classes-h200.json`, commit {record('classes-h200')['commit'][:7]};"]
    half, single = (by_classes("h100", dtype, "forward_kl", True) for dtype in ("BF16", "FP32"))
    wanted.append(f"(`classes-h100.json`) the loss of a KL has {spread(2048, *losses('h100'), but=(50257,))} of the floor "
                  f"from 2,048 classes up (50,257: "
                  f"{by_classes('h100', 'BF16', 'forward_kl', False)[50257]:.2f}), q - p of BF16 "
                  f"{spread(2048, half)}, of FP32 {spread(2048, single)}.")
    assert not [one for one in wanted if one not in TEXT], "\n".join(wanted)


def test_times_of_short_rows_are_the_records():
    mixture, reverse = (by_classes("h200", "FP32", divergence, True, "ms") for divergence in ("js", "reverse_kl"))
    wanted = [f"`js` with its gradient takes {mixture[512]:.2f} ms at 512 classes, {mixture[1000]:.2f} at 1,000, "
              f"{mixture[1024]:.2f} at 1,024 (", f"reverse KL {reverse[512]:.2f} and {reverse[1000]:.2f} at 512 and 1,000 ("]
    assert not [one for one in wanted if one not in TEXT], "\n".join(wanted)


def test_every_record_is_named():
    """By a text, or by a test that compares a text with it: else nobody knows what it is of."""
    texts = [ROOT / "README.md", *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md"), *ROOT.glob("tests/unit/test_*.py")]
    texts = [path for path in texts if not path.relative_to(ROOT).parts[0].startswith("build")]
    names = {name for path in texts for name in re.findall(r"[\w*-]+\.(?:json|svg)", path.read_text())
             if not name.startswith("*.")}
    unnamed = [path.name for path in sorted((ROOT / "tests/bench/results").iterdir())
               if not any(fnmatch.fnmatch(path.name, name) for name in names)]
    assert not unnamed
