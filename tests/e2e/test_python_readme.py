"""Every program in client/python/README.md is run, in order, in one interpreter, and that of the top
README.md; its measured numbers are those of tests/bench/results. The commands that install are
test_python_wheel.py's."""
import json
import re
import subprocess
import sys

import pytest

from conftest import ROOT
from pythonlib import PACKAGE, environment, import_kld, import_torch

kld = import_kld()
import_torch()
README = PACKAGE / "README.md" if PACKAGE else None


@pytest.mark.skipif(README is None, reason="needs the package's README")
@pytest.mark.parametrize("server_of", ["KLD_SERVER", "local:"])
def test_every_program(server, server_of, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)
    assert len(blocks) >= 4
    url = server.url_unix if server_of == "KLD_SERVER" else "local:"
    program = "\n".join(blocks).replace('kld.connect("local:")', f"kld.connect({url!r})")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
                            env=environment(KLD_SERVER=url), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    loss, shape = result.stdout.split(" ", 1)
    assert 0 < float(loss) < 1 and shape.strip() == "(64, 1000)"


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="needs the sources")
def test_the_programs_of_the_top_readme(server):
    first, program = (text for text in re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
                      if "import kld" in text)  # the other one is test_http_replies.py's
    assert "unix:/tmp/kld.sock" in program and '"local:"' in first
    result = subprocess.run([sys.executable, "-c", program.replace("unix:/tmp/kld.sock", server.url_unix)],
                            capture_output=True, text=True, timeout=120, env=environment())
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.split()[0]) == pytest.approx(0.2138333, rel=1e-6)
    shown = (ROOT / "README.md").read_text().split(first)[1].split("```text\n")[1].split("```")[0]
    result = subprocess.run([sys.executable, "-c", first], capture_output=True, text=True, timeout=120, env=environment())
    said, meant = ([float(number) for number in re.findall(r"-?\d+\.\d+", text)] for text in (result.stdout, shown))
    assert len(meant) == 7 and said == pytest.approx(meant, rel=1e-5), result


@pytest.mark.skipif(not (ROOT / "tests/bench/results").exists() or README is None, reason="needs the sources")
def test_the_measured_numbers():
    """Those of the README and of tests/bench/README.md are the ones of the checked-in results, and whether an aim is met
    follows from them."""
    aims = (ROOT / "tests/bench/README.md").read_text().split("\n## The Python package\n")[1].split("\n## ")[0]
    both = README.read_text() + aims
    results = ROOT / "tests/bench/results"
    run = json.loads((results / "python-h200.json").read_text())
    ms = run["ms"]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in both.splitlines()
            if line.startswith("|")]

    def row(beginning):
        return next(cells[1:] for cells in rows if cells[0].startswith(beginning))

    def figures(cells):
        return [float(figure) for cell in cells for figure in re.findall(r"[-+]?\d+\.?\d*", cell)]

    def measured(measure):
        return [measure(ms[f"{where} {what}"], what) for where in ("local", "server") for what in ("forward", "both")]

    def holds(beginning, values, digits, aim, verdict):
        """The figures are those; which of them meet the aim; what is said of it."""
        cells = row(beginning)
        assert figures(cells[:-1]) == [round(value, digits) for value in values] and cells[-1] == verdict
        return [aim(value) for value in values]

    assert holds("5 times eager", measured(lambda mine, _: mine["times_eager"]), 2, lambda value: value >= 5,
                 "met by `local:` with backward, else missed") == [False, True, False, False]
    assert all(holds("the same, calls", measured(lambda mine, what: ms[f"eager {what}"]["step"] / mine["step"]), 2,
                     lambda value: value >= 5, "met"))
    over = measured(lambda mine, _: 100 * mine["step_over_bare"])
    assert holds("at most 2 %", over, 1, lambda value: value <= 2,
                 "met by `local:`, missed by the server") == [True, True, False, False]
    text = " ".join(both.split())
    bare = run["bare_kernel_ms"]
    assert f"({bare['forward']:.3f} ms, {bare['both']:.3f} with the gradient)" in text
    for beginning, what, kind in (("forward, calls", "forward", "step"), ("forward and backward, likewise", "both", "step"),
                                  ("forward, one", "forward", "call")):
        assert figures(row(beginning)) == [round(ms[f"{who} {what}"][kind], 3) for who in ("eager", "local", "server")]
    second = [cells[1:] for cells in rows if cells[0] == "forward and backward, likewise"][1]  # of one call
    assert figures(second) == [round(ms[f"{who} both"]["call"], 3) for who in ("eager", "local", "server")]
    extra = run["extra_bytes"]
    assert figures(row("memory beyond")) == [extra["eager forward"]["allocated"] / 2**30,
                                             extra["eager both"]["allocated"] / 2**30, 0, 0]
    assert max(extra[f"{who} {what}"]["allocated"] for who in ("local", "server") for what in ("forward", "both")) <= 1024
    other, expandable = (json.loads((results / f"python-h100{kind}.json").read_text()) for kind in ("", "-expandable"))
    for one in (other, expandable):
        assert one["mps"] and not any(one["copied_bytes"].values())
    mine, its = expandable["ms"]["server both"], other["ms"]["server both"]
    pieces = json.loads((results / "python-h200-expandable.json").read_text())
    assert pieces["mps"] and run["mps"] and not any(pieces["copied_bytes"].values())
    here, there = pieces["ms"]["server both"], run["ms"]["server both"]
    assert (f"On an H200 it is {here['step']:.2f} and {there['step']:.2f} ms, one call {here['call']:.2f} and {there['call']:.2f} "
            f"(`python-h200-expandable.json`, `python-h200.json`)" in text)
    assert (f"take {mine['step']:.2f} ms with expandable segments over `unix:`, calls behind each other, where they take "
            f"{its['step']:.2f} without, and one call on an idle card {mine['call']:.2f} and {its['call']:.2f}" in text)
    ms, bare = other["ms"], other["bare_kernel_ms"]
    assert (f"one call on an idle card is {ms['local forward']['times_eager']:.2f} and {ms['local both']['times_eager']:.2f} times as "
            f"fast as eager over `local:`, {ms['server forward']['times_eager']:.2f} and {ms['server both']['times_eager']:.2f} by the "
            f"server, and calls behind each other are {100 * ms['server forward']['step_over_bare']:.1f} and "
            f"{100 * ms['server both']['step_over_bare']:.1f} % over the bare kernel there, whose {bare['forward']:.3f} and "
            f"{bare['both']:.3f} ms are longer" in text)
    overhead = json.loads((results / "python-overhead-cpu.json").read_text())
    added = overhead["added_us"]
    assert (f"takes {added['numpy, new']:.0f} to {added['numpy']:.0f} us more than the same call of libkld from C "
            f"({overhead['median_us']['libkld']:.0f} us here), `kld.functional.kl_div` {added['torch']:.0f}, and "
            f"{added['torch, step']:.0f} for a whole step, where 60 is the aim; an autograd function that calls libkld and does "
            f"nothing else takes {added['torch, least']:.0f} (") in text
    assert (f"takes {added['torch']:.0f} us more than the same call of libkld from C, and {added['torch, step']:.0f} for a whole "
            "step") in text
    assert f"of commit {overhead['commit'][:7]};" in text and overhead["awake"]
    assert max(added.values()) <= 60  # the aim is met
