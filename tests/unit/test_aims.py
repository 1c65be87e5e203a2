"""The tables of README.md (In another process) that hold what was measured against what was aimed at: each row is
what tests/bench/results/sharing-h200.json gives. When it changes, the failure prints the rows as they should be."""
import json
import pathlib
import statistics

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = json.loads((ROOT / "tests/bench/results/sharing-h200.json").read_text())
JOBS = {"headline": "loss", "headline_gradient": "with gradient"}


def heading(run):
    queues = " and 8 queues" if run["mps"] and run["CUDA_DEVICE_MAX_CONNECTIONS"] == 8 else ""
    return f"{run['host']}, {'MPS' + queues if run['mps'] else 'no MPS'}"


def row(what, target, show):
    """A cell for each run, empty where it did not measure or nothing was aimed at."""
    runs = RESULTS["sharing"]
    found = [run["targets"][target]["met"] for run in runs if target in run["targets"]]
    cells = [show(run) if target in run["targets"] else "" for run in runs]
    return f"| {' | '.join([what, *cells, f'{sum(found)} of {len(found)}'])} |"


def over_kernel(job, client):
    def show(run):
        one = run[f"{job}_client_{client}"]
        return f"{one['over_kernel_us_p50']:.0f} ({one['us_p50']:.0f}, {one['us_p99']:.0f})"

    what = f"{JOBS[job]}, client {client}: at most {25 if client == 'idle' else 45}"
    return row(what, f"{job}_client_{client}_over_kernel_us", show)


def rate(clients, beside):
    key = f"clients_{clients}{'_beside_headline' if beside else ''}"
    what = f"{clients} client{'s' if clients > 1 else ''}{' beside the headline loop' if beside else ''}"
    return row(f"{what}: at least 50,000",
               f"{key}_per_s", lambda run: f"{run[key]['per_s']:,}")


def fairness(clients):
    key = f"clients_{clients}_beside_headline"
    return row(f"{clients} of them, busiest to least busy: at most 1.5", f"{key}_most_to_least",
               lambda run: f"{run[key]['most_to_least']:.2f}")


def rows_of_requests():
    heads = " | ".join(["aim", *map(heading, RESULTS["sharing"]), "met"])
    return [f"| {heads} |", *(over_kernel(job, client) for client in ("idle", "busy") for job in JOBS),
            *(rate(clients, beside) for beside in (False, True) for clients in (1, 4, 16)),
            *(fairness(clients) for clients in (4, 16))]


def rows_of_faults():
    for run in RESULTS["faults"]:
        times = run["answered_ms"]
        assert run["met"] == (statistics.median(times) <= 600)
        whose = "a client killed" if run.get("fault") == "killed" else "the server's own"
        cells = [whose, run.get("host", ""), "MPS" if run["mps"] else "no MPS",
                 run["CUDA_DEVICE_MAX_CONNECTIONS"] or "not set",
                 run.get("commit", "")[:7], f"{statistics.median(times):.0f}", f"{max(times):.0f} of {len(times)}",
                 "yes" if run["met"] else "no"]
        yield f"| {' | '.join(map(str, cells))} |"


def test_the_readme_has_every_row_and_no_other():
    shown = (ROOT / "README.md").read_text().split("#### What was aimed at", 1)[1].split("\n#", 1)[0]
    rows = [line for line in shown.splitlines() if line.startswith("|") and not line.startswith("|---")]
    expected = [*rows_of_requests(),
                "| fault | host | | queues | commit | median, ms | longest, ms | met |", *rows_of_faults()]
    assert rows == expected, "\n" + "\n".join(expected)
    shown = " ".join(shown.split())
    for run in RESULTS["sharing"]:
        assert f"host {run['host']}" in shown and run["commit"][:7] in shown


def test_what_was_aimed_at_is_what_it_says():
    """The numbers in the first column, and each met, from the runs' own."""
    for run in RESULTS["sharing"]:
        for name, target in run["targets"].items():
            limit = 25 if "idle" in name else 45 if "busy" in name else 1.5 if "least" in name else 50000
            word = "at least" if limit == 50000 else "at most"
            assert target["aim"] == f"{word} {limit}"
            measured = target["measured"]
            assert target["met"] == (measured >= limit if limit == 50000 else measured <= limit)
