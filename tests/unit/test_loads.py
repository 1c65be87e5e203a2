"""The tables of tests/README.md (Soak and saturation): each row is what the results of tests/bench/soak.py and
saturation.py give. When they change, the failure prints the rows as they should be."""
import json
import pathlib

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


def rows_of_saturation():
    for name, what in (CASES | {"hello": "the first on a bare libmicrohttpd \"hello\""}).items():
        case = SATURATION[name]
        refused = f"{case['refused_p99_us'] / 1000:.0f}" if case["refused_p99_us"] else "none"
        share = f"{case['share']:.2f} ({min(case['shares']):.2f} to {max(case['shares']):.2f})"
        met = f"{sum(case['met'].values())} of 3" if name in CASES else "-"
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
    for name in CASES:
        case, aims = SATURATION[name], SATURATION["aims"]
        assert case["met"] == {"share": case["share"] >= aims["share"],
                               "refused_p99_ms": case["refused_p99_us"] / 1000 <= aims["refused_p99_ms"],
                               "answered_p99_ms": case["answered_p99_us"] / 1000 <= aims["answered_p99_ms"]}
