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
def test_the_program_of_the_top_readme(server):
    program, = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert "unix:/tmp/kld.sock" in program
    result = subprocess.run([sys.executable, "-c", program.replace("unix:/tmp/kld.sock", server.url_unix)],
                            capture_output=True, text=True, timeout=120, env=environment())
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.split()[0]) == pytest.approx(0.2138333, rel=1e-6)


@pytest.mark.skipif(not (ROOT / "tests/bench/results").exists() or README is None, reason="needs the sources")
def test_the_measured_numbers():
    """Those of the README are the ones of the checked-in results, and whether an aim is met follows from them."""
    results = ROOT / "tests/bench/results"
    ms = json.loads((results / "python-h200.json").read_text())["ms"]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in README.read_text().splitlines()
            if line.startswith("|")]

    def row(beginning):
        return next(cells[1:] for cells in rows if cells[0].startswith(beginning))

    def said(measure):
        return [", ".join(measure(ms[f"{where} {what}"], ms[f"eager {what}"]) for what in ("forward", "both"))
                for where in ("local", "server")]

    per_call = said(lambda mine, eager: f"{mine['times_eager']:.2f}")
    assert row("5 times eager") == [*per_call, "missed but by `local:` with the gradient"]
    assert [figure >= "5" for figure in re.findall(r"\d\.\d+", str(per_call))] == [False, True, False, False]
    in_a_row = said(lambda mine, eager: f"{eager['step'] / mine['step']:.2f}")
    assert row("the same, calls") == [*in_a_row, "met"] and min(re.findall(r"\d\.\d+", str(in_a_row))) > "5"
    over = said(lambda mine, eager: f"{mine['step_over_bare']:+.1%}".replace("%", " %"))
    assert row("at most 2 %") == [*over, "missed by the server, with the gradient"]
    assert ms["local both"]["step_over_bare"] <= 0.02 < ms["server both"]["step_over_bare"]
    assert row("forward, calls") == [f"{ms[f'{who} forward']['step']:.3f}" for who in ("eager", "local", "server")]
    assert row("forward, one") == [f"{ms[f'{who} forward']['call']:.3f}" for who in ("eager", "local", "server")]
    step = json.loads((results / "python-overhead-cpu.json").read_text())["added_us"]["torch, step"]
    assert step > 60 and f"training step, too: {step:.0f} us more than C's call, where 60" in README.read_text()
