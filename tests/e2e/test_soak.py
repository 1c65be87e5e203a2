"""A short soak: 32 clients of every kind, some of them killed all the time (tests/bench/soak.py)."""
import json
import pathlib
import subprocess
import sys

import soaklib
from conftest import BIN, clean_environment

SCRIPT = pathlib.Path(__file__).parents[1] / "bench/soak.py"


def test_a_short_soak(backend):
    result = subprocess.run([sys.executable, SCRIPT, "--backend", backend, "--seconds", "12"], capture_output=True,
                            text=True, timeout=300, env=clean_environment(KLD_BIN=BIN))
    assert result.returncode == 0, result.stdout[:5000] + result.stderr[-20000:]
    found = json.loads(result.stdout)
    assert found["met"] and found["wrong"] == found["lost"] == 0 and found["left_behind"] == {}
    answered = found["right"] + found["taken_back"] + found["left_by_the_dead"]
    assert found["asked"] == answered and found["right"] > 300 and found["clients_killed"] > 10
    assert sum(found["clients"].values()) == len(soaklib.KINDS) == 32


def test_what_it_would_find():
    """A wrong answer, and one that never came, are in the ledger."""
    small, _ = soaklib.make_jobs()
    ledger = soaklib.Ledger(1)
    client = soaklib.Client("unix", 0, ledger, None, (small, []), 0)
    truth = {name: value.astype(small[0].q.dtype) for name, value in small[0].truth.items()}
    ledger.rows[0][0] = 3
    client.judge(small[0], truth)
    client.judge(small[0], {**truth, "loss": truth["loss"] * 1.00001})

    def unix():
        client.note("asked")
        ledger.stop[0] = 1
        raise TimeoutError
    client.unix = unix
    client.run()
    ledger.bury(0)
    assert ledger.sums() == {"asked": 4, "right": 1, "wrong": 1, "lost": 1, "taken_back": 0, "left_by_the_dead": 1}
    assert len(ledger.told()) >= 2
