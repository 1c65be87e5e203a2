"""The threat model in server/README.md: each of its claims names tests, and there are tests of these names."""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]


def rows():
    """(claim, names of its tests) of each line of its tables."""
    text = (ROOT / "server/README.md").read_text().split("\n## Threat model\n")[1].split("\n## ")[0]
    for line in re.findall(r"^\|(.+)\|$", text, re.M):
        cells = [cell.strip() for cell in line.split("|")]
        if cells[0] != "claim" and not set(cells[0]) <= set("-"):
            assert len(cells) == 3 and all(cells), line
            yield cells[0], re.findall(r"`(\w+)`", cells[2])


def known():
    tests = ROOT / "tests"
    in_c = (name for path in tests.rglob("*.c") for name in re.findall(r"^START_TEST\((\w+)\)", path.read_text(), re.M))
    in_python = (name for path in tests.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.M))
    return {*in_c, *in_python}


def test_each_claim_has_tests_that_exist():
    found, there = list(rows()), known()
    assert len(found) > 30
    for claim, names in found:
        assert names, claim
        assert not set(names) - there, (claim, set(names) - there)
