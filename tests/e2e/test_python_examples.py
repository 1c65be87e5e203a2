"""The examples of the Python package, client/python/examples: each does what it says, on this back end."""
import importlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree

import numpy as np
import pytest

from conftest import DATA
from pythonlib import PACKAGE, environment, import_kld, import_torch

import_kld()
torch = import_torch()
EXAMPLES = PACKAGE / "examples" if PACKAGE else None
pytestmark = pytest.mark.skipif(EXAMPLES is None, reason="needs the examples")


@pytest.fixture
def device(backend):
    if backend == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a torch with CUDA")
    return backend


def run(name, *arguments, status=0, **more):
    result = subprocess.run([sys.executable, EXAMPLES / name, *map(str, arguments)], capture_output=True, text=True,
                            timeout=200, env=environment(KLD_DIGITS=str(DATA / "digits/images.npz"),
                                                         CUBLAS_WORKSPACE_CONFIG=":4096:8", **more))
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def distilled(server, backend, tmp_path_factory):
    """What distil_digits.py said, by a server, and its plot."""
    plot = tmp_path_factory.mktemp("plot") / "curves.svg"
    return run("distil_digits.py", "--server", server.url_unix, "--device", backend, "--plot", plot), plot


def test_distillation_is_pytorchs(device, distilled):
    said, plot = distilled
    assert float(re.search(r"differ by at most (\S+)", said)[1]) <= 1e-5
    lines = re.findall(r"loss (\S+) -> (\S+), (\S+) of the other", said)
    assert lines[0][2] == lines[1][2] and float(lines[0][2]) > 0.8
    assert float(lines[0][1]) < 0.3 * float(lines[0][0])
    drawn = xml.etree.ElementTree.parse(plot).getroot()
    curves = [one.get("points").split() for one in drawn.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(curves) == 2 and len(curves[0]) == len(curves[1]) == 120
    assert curves[0][0] != curves[0][-1]
    words = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "training step" in words and {"0", "20", "100"} <= set(words)


def test_distillation_in_this_process(device):
    said = run("distil_digits.py", "--device", device, KLD_SERVER="" if device == "cpu" else f"local:{device}")
    assert float(re.search(r"differ by at most (\S+)", said)[1]) <= 1e-5


def test_a_student_learns_from_another_process(server, device, distilled):
    said = run("teacher_student.py", server.url_unix, device)
    assert "teacher: published (899, 10)" in said and "teacher: done" in said
    first, last, score = map(float, re.search(r"loss (\S+) -> (\S+), (\S+) of", said).groups())
    assert last < 0.3 * first and score > 0.8
    # The same student as one process makes of it.
    alone = re.search(r"kld +loss (\S+) -> (\S+), (\S+) of", distilled[0])
    right = [float(x) for x in alone.groups()]
    assert first == pytest.approx(right[0], rel=1e-5)
    # 120 steps on: float32's roundings of another order, 1.3e-4 on a CPU; and at most two of the other digits.
    assert last == pytest.approx(right[1], rel=5e-4) and score == pytest.approx(right[2], abs=2.5 / 898)


def test_kernelbench(server, device):
    """On the task's inputs and on others, by a server and in this process."""
    for more in ({}, {"KLD_SERVER": server.url_unix}):
        said = run("kernelbench_98.py", 600, **more)
        assert len(re.findall(r"loss \d", said)) == 5, said


@pytest.mark.parametrize("factor, good", [(1, True), (0, False), (1.01, False)])
def test_kernelbench_tells_gradients_apart(monkeypatch, factor, good):
    """With as many rows as the task has: elements of 6e-5."""
    monkeypatch.syspath_prepend(EXAMPLES)
    task = importlib.import_module("kernelbench_98")
    theirs = task.Model()

    def mine(predictions, targets):
        given = predictions.clone()
        given.register_hook(lambda gradient: gradient * factor)
        return task.ModelNew()(given, targets)

    torch.manual_seed(0)
    predictions, targets = ((torch.rand(task.batch_size, 8) / 4).softmax(-1) for _ in range(2))
    if good:
        task.compare(mine, theirs, predictions, targets)
    else:
        with pytest.raises(AssertionError, match="not close"):
            task.compare(mine, theirs, predictions, targets)


def test_kernelbench_looks_at_small_gradients(monkeypatch):
    """Those of peaked targets are up to 1e13 times smaller than others."""
    monkeypatch.syspath_prepend(EXAMPLES)
    task = importlib.import_module("kernelbench_98")
    torch.manual_seed(0)

    def mine(predictions, targets):
        given = predictions.clone()
        given.register_hook(lambda gradient: gradient * (gradient.abs() > 1e-4 * gradient.abs().max()))
        return task.ModelNew()(given, targets)

    pairs = {what: pair for what, *pair in task.structured(300, 300, "cpu")}
    for what in ("peaked targets", "rows that differ"):
        task.compare(task.ModelNew(), task.Model(), *pairs[what])
        with pytest.raises(AssertionError, match="not close"):
            task.compare(mine, task.Model(), *pairs[what])


@pytest.mark.parametrize("name, arguments, digits", [("distil_digits.py", [], None), (
    "teacher_student.py", ["unix:/nowhere/kld.sock"], "/nowhere/images.npz")], ids=["unset", "wrong"])
def test_without_digits_it_is_said_what_to_set(tmp_path, name, arguments, digits):
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    result = subprocess.run([sys.executable, tmp_path / "examples" / name, *arguments], capture_output=True, text=True,
                            timeout=100, env=environment(**({"KLD_DIGITS": digits} if digits else {})))
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert f"environment's KLD_DIGITS to name that file, not {digits!r}\n" in result.stderr, result.stderr


def test_drift_over_http(server, tmp_path):
    rng = np.random.default_rng(5)
    predictions = np.load(DATA / "digits/teacher.npy")
    shuffled = predictions[rng.permutation(len(predictions))]
    few = shuffled[np.isin(shuffled.argmax(axis=1), (1, 4, 7))]
    worse = np.concatenate([shuffled[:448], np.resize(few, (len(shuffled) - 448, 10))])  # few classes, from a day on
    for name, array in (("reference", predictions[rng.permutation(len(predictions))]), ("same", shuffled),
                        ("worse", worse)):
        np.save(tmp_path / f"{name}.npy", array)
    fine = run("drift.py", server.http, tmp_path / "reference.npy", tmp_path / "same.npy")
    assert " 0 of 14 buckets drifted" in fine
    found = run("drift.py", server.http, tmp_path / "reference.npy", tmp_path / "worse.npy")
    assert re.findall("DRIFT|fine", found) == ["fine"] * 7 + ["DRIFT"] * 7, found
    limit = float(re.search(r"^limit (\S+) \(3 x chance\)", found, re.M)[1])
    for value, word in re.findall(r"bucket +\d+: (\S+) (DRIFT|fine)", found):
        assert (float(value) > limit) == (word == "DRIFT"), found
    told = subprocess.run([sys.executable, EXAMPLES / "drift.py"], capture_output=True, text=True, env=environment())
    assert "drift.py http://HOST:PORT" in told.stderr and "Traceback" not in told.stderr
