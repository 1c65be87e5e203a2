"""A part of the end-to-end tests (tests/run --e2e-every): each test is in one of the N parts, and in no other. Which part
it is goes by the commit, in a shallow clone too."""
import importlib.machinery
import importlib.util
import pathlib
import subprocess
import types

TESTS = pathlib.Path(__file__).resolve().parents[1]
CONFTEST = TESTS / "e2e" / "conftest.py"


def parts_of(names, every):
    spec = importlib.util.spec_from_file_location("e2e_conftest", CONFTEST)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for first in range(every):
        options = {"--every": every, "--every-from": first}
        hook = types.SimpleNamespace(pytest_deselected=lambda items: None)
        items = [types.SimpleNamespace(nodeid=name) for name in names]
        module.pytest_collection_modifyitems(types.SimpleNamespace(getoption=options.get, hook=hook), items)
        yield [item.nodeid for item in items]


def test_each_is_in_one_part():
    names = [f"test_{number // 7}.py::test_it[{number}]" for number in range(700)]
    assert list(parts_of(names, 1)) == [names]
    parts = list(parts_of(names, 3))
    assert sorted(sum(parts, [])) == sorted(names)
    assert all(180 < len(part) < 290 for part in parts)


def git(folder, *arguments):
    settings = "user.name=a", "user.email=a@localhost", "commit.gpgsign=false", "protocol.file.allow=always"
    command = ["git", *(word for setting in settings for word in ("-c", setting)), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_which_part_goes_by_the_commit(tmp_path, monkeypatch):
    loader = importlib.machinery.SourceFileLoader("tests_run", str(TESTS / "run"))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("tests_run", loader))
    loader.exec_module(module)
    whole = tmp_path / "whole"
    git(tmp_path, "init", "-q", whole)
    numbers = {"whole": [], "shallow": []}
    for count in range(6):
        git(whole, "commit", "-q", "--allow-empty", "-m", str(count))
        shallow = tmp_path / f"shallow-{count}"
        git(tmp_path, "clone", "-q", "--depth=1", f"file://{whole}", shallow)
        for name, folder in ("whole", whole), ("shallow", shallow):
            monkeypatch.setattr(module, "ROOT", folder)
            numbers[name].append(module.number_of_commit())
            assert module.number_of_commit() == numbers[name][-1]
    assert numbers["whole"] == [1, 2, 3, 4, 5, 6]
    assert len(set(numbers["shallow"])) == 6 and min(numbers["shallow"]) >= 0, "it was 1 of every commit"
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert module.number_of_commit() == 0, "no commit at all"
