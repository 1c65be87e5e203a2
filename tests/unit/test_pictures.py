"""The pictures of the READMEs are what the measured results beside them give."""
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_pictures_are_drawn_from_the_results():
    run = subprocess.run([sys.executable, "-B", ROOT / "tests/bench/draw.py", "--check"],
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("argument, status", [("--help", 0), ("-h", 0), ("--chek", 1)])
def test_what_it_says_of_itself(argument, status):
    run = subprocess.run([sys.executable, "-B", ROOT / "tests/bench/draw.py", argument], capture_output=True, text=True)
    assert run.returncode == status and "draw.py --check" in (run.stderr if status else run.stdout), run


def test_the_readmes_show_every_picture():
    pictures = sorted(path.name for path in (ROOT / "tests/bench/results").glob("*.svg"))
    assert pictures
    shown = (ROOT / "README.md").read_text() + (ROOT / "kernels/README.md").read_text()
    assert [name for name in pictures if name not in shown] == []
