"""`kld div --split`: rows over three servers, and the bits of one of them; what becomes of a job one of whose
servers is killed in the middle of it. The matrix of parameters is in test_python_split.py."""
import json
import os
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

from conftest import BIN, clean_environment, suspend, wait_until
from httplib import Late, unless_late

KLD = str(BIN / "kld")


def kld(*arguments, code=0, **environment):
    done = subprocess.run([KLD, *map(str, arguments)], capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL, env=clean_environment(**environment))
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def urls(servers):
    """Over both fronts."""
    return ",".join(one.url_unix if i == 1 else one.http for i, one in enumerate(servers))


def save(folder, rows, classes, seed=1, dtype=np.float32):
    random = np.random.default_rng(seed)
    for name in ("q", "p"):
        np.save(folder / f"{name}.npy", random.normal(0, 2, (rows, classes)).astype(dtype))
    np.save(folder / "mask.npy", random.random(rows) < 0.7)
    np.save(folder / "weights.npy", random.random(rows).astype(np.float32))
    return [folder / "q.npy", folder / "p.npy", "--predictions-form", "logits", "--targets-form", "logits"]


FILES = ("loss", "row-loss", "grad-predictions", "grad-targets")


def outputs(folder, to, reduction):
    files = FILES if reduction in ("none", "row") else FILES[1:]
    return [word for name in files for word in (f"--{name}", folder / f"{to}-{name}.npy")]


@pytest.mark.parametrize("rows,classes", [(1, 40), (2, 40), (211, 37), (64, 3000)])
@pytest.mark.parametrize("reduction", ["batchmean", "sum", "mean", "rowmean", "row", "none"])
def test_the_result_is_that_of_one_server(servers, tmp_path, rows, classes, reduction):
    job = ["div", *save(tmp_path, rows, classes), "--reduction", reduction, "--scale", "0.3", "--temperature", "1.7",
           "--row-mask", tmp_path / "mask.npy", "--row-weights", tmp_path / "weights.npy", "--json"]
    one = kld(*job, "--server", servers[0].url_unix, *outputs(tmp_path, "one", reduction))
    many = kld(*job, "--split", urls(servers), "--part-bytes", "20000", *outputs(tmp_path, "many", reduction))
    losses = [json.loads(done.stdout).get("loss") for done in (one, many)]
    if servers[0].backend == "cpu":
        assert losses[0] == losses[1]
    elif losses[0] is not None:
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name in FILES[reduction not in ("none", "row"):]:
        assert (tmp_path / f"one-{name}.npy").read_bytes() == (tmp_path / f"many-{name}.npy").read_bytes(), name


def computed(server):
    """Requests that its worker has answered."""
    return sum(value for name, value in server.metrics().items()
               if name.startswith("kld_requests_total{front=\"unix\"") and "status=\"ok\"" in name)


def test_every_server_has_its_share(servers, tmp_path):
    before = [computed(one) for one in servers]
    kld("div", *save(tmp_path, 900, 500), "--split", urls(servers), "--part-bytes", "100000")
    # Each gets two at first; then whoever is free.
    assert all(computed(one) - count >= 2 for one, count in zip(servers, before))


@pytest.mark.parametrize("front", ["http", "unix"])
@unless_late
def test_a_server_is_killed_in_the_middle(make_server, servers, tmp_path, front):
    doomed = make_server(threads=1)
    at = doomed.http if front == "http" else doomed.url_unix
    job = ["div", *save(tmp_path, 4000, 1000), "--divergence", "js", "--json"]
    one = kld(*job, "--server", servers[0].url_unix, "--grad-predictions", tmp_path / "one.npy")
    kld(*job, "--server", at)  # what it does the first time only is behind it
    killed, before = threading.Event(), computed(doomed)

    def kill():
        wait_until(lambda: computed(doomed) >= before + 2, 60, "its first parts")
        doomed.process.kill()
        killed.set()

    killer = threading.Thread(target=kill)
    killer.start()
    # Parts of 2 rows: two thousand round trips, of which the first few are over when it dies.
    many = kld(*job, "--split", f"{servers[0].http},{at},{servers[1].url_unix}", "--part-bytes", "24000",
               "--grad-predictions", tmp_path / "many.npy")
    killer.join()
    assert killed.is_set()
    answers = [json.loads(done.stdout) for done in (one, many)]
    if servers[0].backend == "cpu":
        assert answers[0]["loss"] == answers[1]["loss"]
    assert (tmp_path / "one.npy").read_bytes() == (tmp_path / "many.npy").read_bytes()
    if answers[1]["attempts"] == 1:
        raise Late("it was killed behind its last part")


def test_workers_and_gateways_die(servers, make_server, tmp_path):
    """What the servers mend themselves."""
    mortal = [make_server(threads=1) for _ in range(2)]
    job = ["div", *save(tmp_path, 3000, 1000), "--divergence", "js", "--json", "--quiet"]
    one = kld(*job, "--server", servers[0].url_unix, "--grad-targets", tmp_path / "one.npy")
    done = threading.Event()

    def kill():
        for role in ("worker", "gateway", "worker"):
            if not done.wait(0.15):
                mortal[0].kill_child(role)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        many = kld(*job, "--split", f"{mortal[0].http},{mortal[1].url_unix}", "--part-bytes", "48000",
                   "--grad-targets", tmp_path / "many.npy")
    finally:
        done.set()
        killer.join()
    losses = [json.loads(answer.stdout)["loss"] for answer in (one, many)]
    assert losses[0] == (losses[1] if servers[0].backend == "cpu" else pytest.approx(losses[1], rel=1e-6))
    assert (tmp_path / "one.npy").read_bytes() == (tmp_path / "many.npy").read_bytes()


def test_a_server_that_stands_still(servers, make_server, tmp_path):
    """It takes connections and answers nothing: its part goes to another one after --part-timeout."""
    silent = make_server(threads=1)
    job = ["div", *save(tmp_path, 30, 100), "--json"]
    one = kld(*job, "--server", servers[0].url_unix)
    worker = silent.child("worker")  # the gateway still says who it is
    suspend(worker)
    try:
        start = time.monotonic()
        many = kld(*job, "--split", f"{silent.http},{servers[0].http}", "--part-timeout", "0.5", "--timeout", "60")
        took = time.monotonic() - start
    finally:
        os.kill(worker, signal.SIGCONT)
    assert 0.4 < took < 30 and json.loads(many.stdout)["attempts"] > 1
    assert json.loads(one.stdout)["loss"] == pytest.approx(json.loads(many.stdout)["loss"], rel=1e-6)


def test_what_is_wrong_is_said_with_its_address(servers, tmp_path):
    job = ["div", *save(tmp_path, 3, 10)]
    assert "--server and --split" in kld(*job, "--split", "local:", "--server", "local:", code=2).stderr
    said = kld(*job, "--split", "http://127.0.0.1:9,unix:/nowhere/kld.sock", "--timeout", "1", code=3).stderr
    assert "none of 2 servers is left" in said
    assert "http://127.0.0.1:9: no answer" in said and "unix:/nowhere/kld.sock" in said
    assert "unknown kind of server" in kld(*job, "--split", "ftp://a", code=2).stderr
    assert "URL of 0 bytes" in kld(*job, "--split", f"{servers[0].http},", code=2).stderr
    assert "--part-timeout" in kld(*job, "--split", "local:", "--part-timeout", "-1", code=2).stderr
    # One that is away does not keep the others from it.
    assert "2 servers" in kld(*job, KLD_SERVER=f"split:{urls(servers[:2])}").stderr
    assert "3 servers" in kld("status", "--server", f"split:{urls(servers)}").stdout
    assert "answer after" in kld("ping", "--server", f"split:{urls(servers)}").stdout


def test_a_server_that_was_never_there(servers, tmp_path):
    """The others do the job; it is neither counted nor passed over in silence."""
    job = ["div", *save(tmp_path, 3, 10), "--split", f"http://127.0.0.1:9,{servers[0].http},unix:/nowhere/kld.sock"]
    done = kld(*job)
    assert "1 of 3 servers: " in done.stderr
    warnings = [line for line in done.stderr.splitlines() if "warning" in line]
    assert len(warnings) == 2, done.stderr
    assert "http://127.0.0.1:9: no answer" in warnings[0] and "unix:/nowhere/kld.sock: " in warnings[1]
    whole = kld(*job[:-1], f"{servers[0].http},{servers[2].http}")
    assert "2 servers: " in whole.stderr and "warning" not in whole.stderr and whole.stdout == done.stdout
    done = kld(*job, "--json")
    assert json.loads(done.stdout)["device"].startswith("1 of 3 servers: ") and done.stderr.count("warning") == 2
    assert kld(*job, "--quiet").stderr == ""
    said = " ".join(kld("div", "--help").stdout.split())
    assert "On GPUs" in said and "last FP64 bit" in said


def test_a_wrong_token_is_said_at_once(servers, make_server, tmp_path):
    (tmp_path / "tokens").write_text("one " + "0" * 64 + " infer\n")
    locked = make_server(tokens=str(tmp_path / "tokens"))
    said = kld("div", *save(tmp_path, 3, 10), "--split", f"{servers[0].http},{locked.http}", code=3).stderr
    assert locked.http in said


def test_a_part_too_large_for_a_server(servers, make_server, tmp_path):
    """Its limit is named, and smaller parts fit."""
    small = make_server(body_bytes_max="64K", threads=1)
    job = ["div", *save(tmp_path, 100, 200), "--split", f"{small.http},{small.http}"]
    wide = [*save(tmp_path, 12, 20000, seed=2), "--split", small.http]
    assert small.http in kld("div", *wide, code=1).stderr
    job[1:7] = save(tmp_path, 100, 200)
    kld(*job, "--part-bytes", "40000")
