"""run.sh of the tree that `make fuzz-dist` makes, over targets of a few lines: when it fails."""
import pathlib
import shutil
import subprocess

import pytest

RUN = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "fuzz-run.sh"
FINE = """for a in "$@"; do case $a in -merge=1) exit 0 ;; esac; done
echo "stat::number_of_executed_units: 5"
"""
CRASHES = """for a in "$@"; do case $a in -merge=1) exit 0 ;; -artifact_prefix=*) touch "${a#*=}crash-1" ;; esac; done
echo "stat::number_of_executed_units: 5"
exit 77
"""


def make_tree(folder, target):
    (folder / "bin").mkdir(parents=True)
    (folder / "corpus" / "one").mkdir(parents=True)
    for name in ("one", "npy"):  # by which it finds out what the sanitizers may do
        (folder / "bin" / name).write_text("#!/bin/sh\n" + target)
        (folder / "bin" / name).chmod(0o755)
    shutil.copy(RUN, folder / "run.sh")


@pytest.mark.parametrize("target, status, said", [
    (FINE, 0, ""),
    (CRASHES, 1, ""),
    ("exit 0\n", 1, "not executed once"),
    ("exit 127\n", 1, "ended with status 127"),
    (FINE.replace("exit 0", "exit 1") + "exit 3\n", 1, "ended with status 3")], ids=["fine", "crashes", "silent", "absent", "ends"])
def test_how_it_ends(tmp_path, target, status, said):
    make_tree(tmp_path, target)
    got = subprocess.run([tmp_path / "run.sh", "1", "1", tmp_path / "out", "one"], capture_output=True, text=True, timeout=60)
    assert got.returncode == status and said in got.stderr, got


def test_out_is_the_callers(tmp_path):
    """Relative: of where it was called, not of the tree."""
    make_tree(tmp_path / "tree", FINE)
    got = subprocess.run(["tree/run.sh", "1", "1", "out", "one"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert got.returncode == 0 and (tmp_path / "out/figures.txt").exists() and not (tmp_path / "tree/out").exists(), got
    got = subprocess.run(["tree/run.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert got.returncode == 2 and got.stderr.startswith("# run.sh SECONDS JOBS OUT"), got
