"""The tables of tests/bench/README.md that hold what was measured against what was aimed at (sharing-*.json,
gateway-*.json), and of README.md those of Over HTTP (gateway-*.json), of one job and of PyTorch's ways (Speed), and the
figure of its first screen (kernels-h200.json, python-h200.json, torch-peers-h200.json): each row is what the records give.
When one changes, the failure prints the rows as they should be."""
import json
import pathlib
import statistics

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CARDS = {card: json.loads((ROOT / f"tests/bench/results/sharing-{card.lower()}.json").read_text()) for card in ("H200", "H100")}
BENCH = (ROOT / "tests/bench/README.md").read_text()
HTTP = {name: json.loads((ROOT / f"tests/bench/results/gateway-{name}.json").read_text())
        for name in ("cpu", "h200", "h100")}
FOR_USERS = [HTTP[name] for name in ("cpu", "h100")]  # in the README
JOBS = {"headline": "loss", "headline_gradient": "with gradient"}


def by_todays_measure(card):
    """Runs that say how many streams a client's requests are on; those before them are in the results only."""
    return [run for run in CARDS[card]["sharing"] if "streams" in run["clients_1_beside_headline"]]


def heading(run):
    queues = " and 8 queues" if run["mps"] and run["CUDA_DEVICE_MAX_CONNECTIONS"] == 8 else ""
    return f"{run['host']}, {'MPS' + queues if run['mps'] else 'no MPS'}"


def row(runs, what, target, show):
    """A cell for each run, empty where it did not measure or nothing was aimed at."""
    found = [run["targets"][target]["met"] for run in runs if target in run["targets"]]
    cells = [show(run) if target in run["targets"] else "" for run in runs]
    return f"| {' | '.join([what, *cells, f'{sum(found)} of {len(found)}'])} |"


def over_kernel(runs, job, client):
    def show(run):
        one = run[f"{job}_client_{client}"]
        return f"{one['over_kernel_us_p50']:.0f} ({one['us_p50']:.0f}, {one['us_p99']:.0f})"

    what = f"{JOBS[job]}, client {client}: at most {25 if client == 'idle' else 45}"
    return row(runs, what, f"{job}_client_{client}_over_kernel_us", show)


def rate(runs, clients, beside):
    key = f"clients_{clients}{'_beside_headline' if beside else ''}"
    what = f"{clients} client{'s' if clients > 1 else ''}{' beside the headline loop' if beside else ''}"
    return row(runs, f"{what}: at least 50,000",
               f"{key}_per_s", lambda run: f"{run[key]['per_s']:,}")


def fairness(runs, clients):
    key = f"clients_{clients}_beside_headline"
    return row(runs, f"{clients} of them, busiest to least busy: at most 1.5", f"{key}_most_to_least",
               lambda run: f"{run[key]['most_to_least']:.2f}")


def rows_of_requests(runs):
    heads = " | ".join(["aim", *map(heading, runs), "met"])
    return [f"| {heads} |", *(over_kernel(runs, job, client) for client in ("idle", "busy") for job in JOBS),
            *(rate(runs, clients, beside) for beside in (False, True) for clients in (1, 4, 16)),
            *(fairness(runs, clients) for clients in (4, 16))]


def rows_of_faults(runs):
    if runs:
        yield "| fault | host | | queues | commit | median, ms | longest, ms | met |"
    for run in runs:
        times = run["answered_ms"]
        assert run["met"] == (statistics.median(times) <= 600)
        whose = {"killed": "a client killed", "other": "another client's"}.get(run.get("fault"), "the server's own")
        cells = [whose, run.get("host", ""), "MPS" if run["mps"] else "no MPS",
                 run["CUDA_DEVICE_MAX_CONNECTIONS"] or "not set",
                 run.get("commit", "")[:7], f"{statistics.median(times):.0f}", f"{max(times):.0f} of {len(times)}",
                 "yes" if run["met"] else "no"]
        yield f"| {' | '.join(map(str, cells))} |"


@pytest.mark.parametrize("card", CARDS)
def test_the_readme_has_every_row_and_no_other(card):
    shown = BENCH.split(f"## Another process on an {card}\n", 1)[1].split("\n#", 1)[0]
    rows = [line for line in shown.splitlines() if line.startswith("|") and not line.startswith("|---")]
    expected = [*rows_of_requests(by_todays_measure(card)), *rows_of_faults(CARDS[card]["faults"])]
    assert rows == expected, "\n" + "\n".join(expected)
    shown = " ".join(shown.split())
    for run in by_todays_measure(card):
        assert f"host {run['host']}" in shown and run["commit"][:7] in shown


def test_what_was_aimed_at_is_what_it_says():
    """The numbers in the first column, and each met, from the runs' own."""
    for run in (run for results in CARDS.values() for run in results["sharing"]):
        for name, target in run["targets"].items():
            limit = 25 if "idle" in name else 45 if "busy" in name else 1.5 if "least" in name else 50000
            word = "at least" if limit == 50000 else "at most"
            assert target["aim"] == f"{word} {limit}"
            measured = target["measured"]
            assert target["met"] == (measured >= limit if limit == 50000 else measured <= limit)


def rows_of_http(got):
    """On a GPU's host beside PyTorch on its CPU and on the card."""
    small, whole, pieces, idle = (got[k] for k in ("small", "upload_1gib_staging", "upload_1gib_pieces", "with_2000_idle"))
    fresh = got["upload_1gib_pieces_fresh"]
    ms = {key: f"p99 {one['p99_us'] / 1e3:.1f} ms" for key, one in {**small, "idle": idle}.items()}
    rate = {key: f"{one['requests_per_s']:,}" for key, one in small.items()}
    where = {"_torch": "PyTorch", "_torch_cuda": "PyTorch on the card"}

    def times(peer, on):
        return " and ".join(f"{got[f'small_{kind}_over_{peer}{on}']:.1f}" for kind in ("json", "binary"))
    yield (f"| small JSON, 64 connections | {rate['json_64']} a second, {ms['json_64']} "
           f"| {small['json_64']['of_hello']:.3f} of a bare libmicrohttpd \"hello\" | 0.5 |")
    yield (f"| small binary, 64 connections | {rate['binary_64']} a second, {ms['binary_64']} "
           f"| {small['binary_64']['of_hello']:.3f} of it | 0.5 |")
    yield (f"| small JSON, binary, one connection | {rate['json_1']}, {rate['binary_1']} a second "
           f"| {small['json_1']['of_hello']:.2f}, {small['binary_1']['of_hello']:.2f} of it | 0.5 |")
    for on, torch in where.items():
        if f"small_json_over_fastapi{on}" in got:
            yield (f"| small JSON and binary, 64 connections | | {times('fastapi', on)} times FastAPI with {torch}, "
                   f"{times('aiohttp', on)} times aiohttp with it | 10, either |")
    if four := got.get("small_4_threads"):
        rates, shares = (", ".join(form.format(one) for one in four.values())
                         for form in ("{0[requests_per_s]:,}", "{0[of_hello]:.2f}"))
        yield f"| small JSON, binary, 64 connections, four HTTP threads | {rates} a second | {shares} of it with four | 0.5 |"
    yield f"| 64 connections beside 2,000 idle ones | {ms['idle']} | {idle['of_rate_without']:.2f} of the rate without | 1 |"
    yield f"| upload of 1 GiB into staging | {whole['sent_gb_per_s']:.1f} GB/s | {whole['of_tcp']:.2f} of a plain TCP stream | 0.7 |"
    yield f"| the same piece by piece | {pieces['sent_gb_per_s']:.1f} GB/s | {pieces['of_tcp']:.2f} of it | 0.7 |"
    yield ("| piece by piece into memory that no request has just left "
           f"| {fresh['sent_gb_per_s']:.1f} GB/s | {fresh['of_tcp']:.2f} of it | 0.7 |")
    for on, torch in where.items():
        if f"answer_1gib_over_fastapi{on}" in got:
            yield (f"| 1 GiB to the answer | {whole['answered_s']:.2f} s "
                   f"| {got[f'answer_1gib_over_fastapi{on}']:.0f} times as fast as FastAPI with {torch}, "
                   f"{got[f'answer_1gib_over_aiohttp{on}']:.0f} times aiohttp with it | 1.5 |")


@pytest.mark.parametrize("name", HTTP)
def test_http_against_what_was_aimed_at(name):
    lines = BENCH.splitlines()
    wanted = list(rows_of_http(HTTP[name]))
    assert not [row for row in wanted if row not in lines], "\n".join(wanted)
    assert any(f"commit {HTTP[name]['commit'][:7]}" in line for line in lines)


def rows_for_users():
    def row(what, show):
        return f"| {what} | {' | '.join(show(got) for got in FOR_USERS)} |"

    def small(kind):
        return lambda got: (f"{got['small'][kind]['requests_per_s']:,} a second, p99 {got['small'][kind]['p99_us'] / 1e3:.1f} ms; "
                            f"{got['small'][kind]['of_hello']:.2f} of libmicrohttpd")

    def upload(kind):
        return lambda got: f"{got[kind]['sent_gb_per_s']:.1f} GB/s; {got[kind]['of_tcp']:.2f} of TCP"

    def times(got, what, form):
        return ", ".join(f"{got[f'{what}_over_{peer}_torch']:{form}} times {name}" for peer, name in (("fastapi", "FastAPI"), ("aiohttp", "aiohttp")))
    yield row("small requests, JSON, 64 connections", small("json_64"))
    yield row("small requests, binary, 64 connections", small("binary_64"))
    yield row("the same on one connection", small("binary_1"))
    yield row("small requests, binary, beside Python", lambda got: times(got, "small_binary", ".1f"))
    yield row("upload of 1 GiB, into staging", upload("upload_1gib_staging"))
    yield row("upload of 1 GiB, piece by piece to the device's pool", upload("upload_1gib_pieces"))
    yield row("1 GiB to the answer", lambda got: f"{got['upload_1gib_staging']['answered_s']:.2f} s; {times(got, 'answer_1gib', '.0f')}")
    yield row("64 connections beside 2,000 idle ones", lambda got: f"{got['with_2000_idle']['of_rate_without']:.2f} of the rate without")


def test_http_in_the_readme():
    lines = (ROOT / "README.md").read_text().splitlines()
    wanted = list(rows_for_users())
    assert not [row for row in wanted if row not in lines], "\n".join(wanted)


def result(name):
    return json.loads((ROOT / f"tests/bench/results/{name}.json").read_text())


def rows_of_one_job():
    """16384 x 16384 FP32 probabilities, by where the clock stands."""
    def row(what, loss, both, record=""):
        return f"| {what} | {loss} | {both} | {record and f'`{record}.json`'} |".replace("|  |", "| |")
    kernel = {r["gradient"]: r for r in result("kernels-h200")["results"]
              if (r["divergence"], r["form"], r["dtype"], r["rows"], r["alike"]) ==
              ("forward_kl", "probs", "FP32", 16384, False)}
    yield row("the kernel alone",
              f"{kernel[False]['ms']:.3f}, {kernel[False]['fraction_of_ceiling']:.2f} of what the memory allows",
              f"{kernel[True]['ms']:.3f}, {kernel[True]['fraction_of_ceiling']:.2f}", "kernels-h200")
    ms = result("python-h200")["ms"]

    def python(where, kind):
        return [f"{ms[f'{where} {what}'][kind]:.3f}" for what in ("forward", "both")]
    yield row("PyTorch calls `local:`, calls back to back", *python("local", "step"), "python-h200")
    yield row("the same through a server under MPS", *python("server", "step"))
    yield row("one call on an idle card, `local:`", *python("local", "call"))
    yield row("the same through a server under MPS", *python("server", "call"))
    peers = result("torch-peers-h200")["results"][0]
    yield row("one call, the clock of the host, the card synchronised before and after, in turn with PyTorch's ways",
              *(f"{peers[what]['kld']['ms']:.3f}" for what in ("loss", "both")), "torch-peers-h200")


PEERS = [("probs", "float32", 16384, "forward_kl"),
         *(("logits", "bfloat16", rows, "forward_kl") for rows in (8192, 4096, 2048)),
         ("logits", "float32", 4096, "forward_kl"), ("logits", "bfloat16", 8192, "js"), ("logits", "float32", 4096, "js")]


def peer(form, dtype, rows, divergence):
    return next(one for one in result("torch-peers-h200")["results"]
                if (one["form"], one["dtype"], one["shape"][0], one["divergence"]) == (form, dtype, rows, divergence))


def rows_of_peers():
    """PyTorch's ways upcast where the inputs are BF16."""
    for job in PEERS:
        one = peer(*job)
        dtype = {"float32": "FP32", "bfloat16": "BF16"}[job[1]]
        name = f"{job[0]} {dtype} {' x '.join(map(str, one['shape']))}, {'JS' if job[3] == 'js' else 'forward KL'}, loss"
        for label, words in (("loss", name), ("both", "with gradient")):
            ways = [one[label].get(f"{way} FP32", one[label].get(way)) for way in ("eager", "compile", "liger")]
            cells = [f"{figure(way['ms'])} ({way['times_kld']:.{0 if way['times_kld'] >= 9.95 else 1}f})" if way else
                     "not run" for way in ways]
            yield f"| {words} | {one[label]['kld']['ms']:.2f} | {' | '.join(cells)} |"


def figure(ms):
    return f"{ms:.1f}" if ms >= 9.995 else f"{ms:.2f}"


def test_speed_in_the_readme():
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    wanted = [*rows_of_one_job(), *rows_of_peers()]
    assert not [row for row in wanted if row not in lines], "\n".join(wanted)
    first = peer("logits", "bfloat16", 8192, "forward_kl")["both"]
    said = (f"loss and gradient of 8192 rows of BF16 logits over 32768 classes take {first['kld']['ms']:.2f} ms, where "
            f"PyTorch 2.11 takes {first['eager FP32']['ms']:.2f} ms (eager, upcast to FP32 as distillation code does) and "
            f"{first['compile FP32']['ms']:.2f} ms compiled")
    assert said in " ".join(text.split()), said
