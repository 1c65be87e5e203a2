"""A part of the end-to-end tests (tests/run --e2e-every): each test is in one of the N parts, and in no other."""
import importlib.util
import pathlib
import types

CONFTEST = pathlib.Path(__file__).resolve().parents[1] / "e2e" / "conftest.py"


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
