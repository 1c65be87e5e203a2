"""The tables of tests/README.md (Soak and saturation): each row is what the results of tests/bench/soak.py and
saturation.py give. When they change, the failure prints the rows as they should be."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOAK, SATURATION = (json.loads((ROOT / f"tests/bench/results/{name}-cpu.json").read_text()) for name in ("soak", "saturation"))
CASES = {"small": "16 elements in the body, 4,000 connections", "clients": "the same, 320 connections",
         "computed": "2 x 2 Mi elements on the device", "unix": "16 elements, Unix socket"}


def rows_of_the_soak():
    yield (f"| {SOAK['commit']} | {SOAK['seconds']:.0f} s | {SOAK['asked']:,} | {SOAK['right']:,} | {SOAK['wrong']} | {SOAK['lost']} | "
           f"{SOAK['taken_back']:,} | {SOAK['left_by_the_dead']:,} of {SOAK['clients_killed']:,} |")
    for role, flat in SOAK["flat"].items():
        cells = [f"{flat[what][0]:,.0f}, {flat[what][1]:,.0f}" for what in ("own_kib", "fds", "mappings", "threads")]
        rest = SOAK["anonymous_kib_at_rest"][role]
        yield f"| {role} | {' | '.join(cells)} | {rest[0]:,}, {rest[1]:,} |"


def judged(case):
    """What came of each aim; None: nothing was measured against it, nobody was refused, say."""
    aims, took = SATURATION["aims"], {kind: case[f"{kind}_p99_us"] / 1000 for kind in ("refused", "answered")}
    return {"share": case["share"] >= aims["share"],
            **{f"{kind}_p99_ms": took[kind] <= aims[f"{kind}_p99_ms"] if took[kind] else None for kind in took}}


def rows_of_saturation():
    for name, what in (CASES | {"hello": "the first on a bare libmicrohttpd \"hello\""}).items():
        case = SATURATION[name]
        refused = f"{case['refused_p99_us'] / 1000:.0f}" if case["refused_p99_us"] else "none"
        share = f"{case['share']:.2f} ({min(case['shares']):.2f} to {max(case['shares']):.2f})"
        met = "-"
        if name in CASES:
            found = [one for one in judged(case).values() if one is not None]
            met = f"{sum(found)} of {len(found)}"
        yield (f"| {what} | {case['peak_per_s']:,.0f} | {case['answered_per_s']:,.0f} | {share} | {refused} | "
               f"{case['answered_p99_us'] / 1000:.0f} | {met} |")


def test_the_readme_has_every_row():
    text = (ROOT / "tests/README.md").read_text()
    missing = [row for row in (*rows_of_the_soak(), *rows_of_saturation()) if row not in text]
    assert not missing, "\n" + "\n".join(missing)
    assert SATURATION["commit"] in text


def test_the_soak_met_what_it_says():
    assert SOAK["met"] and SOAK["wrong"] == SOAK["lost"] == 0 and not SOAK["left_behind"] and not SOAK["problems"]
    assert SOAK["asked"] == SOAK["right"] + SOAK["taken_back"] + SOAK["left_by_the_dead"] and SOAK["seconds"] >= 1800
    assert sum(SOAK["clients"].values()) == 32


def test_what_was_aimed_at_is_what_it_says():
    """Records of before had an aim that nothing was measured against as met."""
    for name in CASES:
        case = SATURATION[name]
        assert case["met"] in (judged(case), {aim: True if met is None else met for aim, met in judged(case).items()})


def bench(*arguments, **environment):
    return subprocess.run([sys.executable, "-B", *arguments], cwd=ROOT / "tests/bench", capture_output=True, text=True,
                          env={**os.environ, **environment})


def test_an_aim_that_nothing_was_measured_against_is_not_met():
    """It was: where nobody was refused, 0 ms until a refusal are less than 500."""
    script = "import json, saturation, sys; print(json.dumps([saturation.judge(one)['met'] for one in json.loads(sys.argv[1])]))"
    cases = [SATURATION[name] for name in CASES] + [{"share": 0.0, "refused_p99_us": 600000, "answered_p99_us": 0}]
    said = bench("-c", script, json.dumps(cases))
    assert said.returncode == 0, said.stderr
    met = json.loads(said.stdout)
    assert met == [judged(case) for case in cases]
    assert [one["refused_p99_ms"] for one in met] == [None, None, True, None, False] and met[-1]["answered_p99_ms"] is None


@pytest.mark.parametrize("arguments", [["gateway.py"], ["saturation.py"], ["gateway_cpu.py", "/none/old", "/none/new"],
                                       ["soak.py"], ["faults.py"], ["memory.py", "/none/build"]],
                         ids=lambda arguments: arguments[0])
def test_what_is_missing_is_named(arguments, tmp_path):
    """Before anything is measured; it was a TypeError, or an empty list of results behind a status of 1."""
    said = bench(*arguments, KLD_BIN=str(tmp_path))
    assert said.returncode == 1 and said.stdout == "" and said.stderr.startswith(f"{arguments[0]}: there is no "), said
    assert "/kld-server" in said.stderr and "make all bench-programs" in said.stderr and "Traceback" not in said.stderr
    assert ("/bench/http_load" in said.stderr) == (arguments[0] in ("gateway.py", "saturation.py", "gateway_cpu.py"))
    assert bench(arguments[0], "--help", KLD_BIN=str(tmp_path)).returncode == 0


@pytest.mark.parametrize("arguments, expected", [
    (["saturation.py", "--flags", "x"], "'x': expected NAME=VALUE"),
    (["saturation.py", "--flags", "=2"], "'=2': expected NAME=VALUE"),
    (["saturation.py", "--rounds", "0"], "'0': expected a whole number, at least 1"),
    (["saturation.py", "--seconds", "nan"], "'nan': expected seconds, more than 0"),
    (["gateway.py", "--rounds", "-1"], "'-1': expected a whole number"),
    (["gateway_cpu.py", "--seconds", "1m", "a", "b"], "'1m': expected seconds"),
    (["soak.py", "--seconds", "0"], "'0': expected seconds"), (["soak.py", "--backend", "x"], "invalid choice: 'x'"),
    (["faults.py", "--count", "0"], "'0': expected a whole number"),
    (["faults.py", "--backend", "x"], "invalid choice: 'x'"),
    (["memory.py", "--clients", "many", "/none"], "'many': expected a whole number"),
    (["fences.py", "--steps", "0", "/none"], "'0': expected a whole number"),
    (["compute_sanitizer.py", "--tools", "memchek"], "there is no memchek; expected some of memcheck,"),
], ids=lambda one: " ".join(one) if isinstance(one, list) else "")
def test_wrong_arguments_are_one_line(arguments, expected, tmp_path):
    """They were a traceback, some when all had been measured."""
    said = bench(*arguments, KLD_BIN=str(tmp_path))
    assert said.returncode == 2 and said.stdout == "" and "Traceback" not in said.stderr, said
    assert expected in said.stderr.splitlines()[-1], said


def test_what_a_gpu_is_needed_for_is_one_line(tmp_path):
    for arguments, expected in ((["fences.py", "/none"], "/none: expected the Unix socket of a kld-server that runs"),
                                (["compute_sanitizer.py", "--table", "/none"], "there is no /none: `make /none`")):
        said = bench(*arguments, KLD_BIN=str(tmp_path))
        assert (said.returncode, said.stdout, said.stderr.count("\n")) == (1, "", 1) and expected in said.stderr, said
