"""The N-th of everything fails in the kld tool: it does what it was asked to, or ends with a status other than 0 and a
line on stderr that says why; results are whole or not there, and beside them is nothing. FAIL_NTH_EVERY=1
(make fail-nth) takes every N.
"""
import collections
import os
import subprocess

import pytest

import faillib
from conftest import BIN, DATA, Server, clean_environment, end_well, wait_until

EVERY = int(os.environ.get("FAIL_NTH_EVERY", 0))
KINDS = ["memory", "map", "descriptor", "send", "receive", "file", "epoll", "thread", "interrupt", "option", "connect"]
STEP = {"memory": 331, "interrupt": 7}  # of a sample; of other kinds 3
FEW_STEP = {"memory": 3, "interrupt": 3}  # where nothing starts libcurl, and with it OpenSSL
PAIR = [str(DATA / "digits" / "student.npy"), str(DATA / "digits" / "teacher.npy")]
RESULTS = ["--grad-predictions", "gradient.npy", "--row-loss", "rows.npy"]
COMMANDS = {"div": ["div", *PAIR, *RESULTS, "--quiet"], "status": ["status", "--json"], "ping": ["ping", "--count=2"],
            "tensors": ["div", *PAIR, "--grad-predictions", "gradient.safetensors", "--json"]}
ASKED = [("div", "unix"), ("div", "http"), ("div", "local"), ("div", "split"), ("tensors", "local"), ("status", "unix"),
         ("status", "http"), ("ping", "unix")]
pytestmark = faillib.needs(faillib.LIBRARY)


@pytest.fixture(scope="module")
def server(backend):
    one = Server(backend=backend, http_threads=1, threads=2)
    one.rest = faillib.at_rest(one)[1]
    yield one
    end_well(one)


@pytest.fixture(scope="module")
def counted():
    found = collections.defaultdict(collections.Counter)
    yield found
    print("\n| kld | call | failed | done | status and a line |\n|---|---|---|---|---|")
    for (command, kind), came in found.items():
        print(f"| {command} | {kind} | {sum(came.values())} | {came['done']} | {came['clear']} |")


class Tool:
    """A command in a folder of its own, with what it says and writes when nothing fails."""

    def __init__(self, server, folder, command, way):
        where = {"unix": ["--server", server.url_unix], "http": ["--server", server.http], "local": ["--server", "local:cpu"],
                 "split": ["--split", f"{server.http},{server.url_unix}", "--part-bytes", "20000"]}[way]
        self.arguments, self.folder, self.command = [str(BIN / "kld"), *COMMANDS[command], *where], folder, command
        self.page, self.symbols = faillib.Page(), faillib.Symbols()
        done, self.truth = self.run()
        self.loss = done.stdout if command == "div" else None

    def run(self):
        for path in self.folder.iterdir():
            path.unlink()
        done = subprocess.run(self.arguments, capture_output=True, text=True, errors="replace", cwd=self.folder,
                              timeout=30, env=clean_environment(**self.page.environment()))
        return done, {path.name: path.read_bytes() for path in self.folder.iterdir()}

    def is_done(self, done, files):
        return files == self.truth and (done.stdout == self.loss if self.loss else done.stdout.strip() != "")

    def one(self, kind, first, width):
        """-> (what came of it, or None where nothing failed; what was wrong with that)."""
        self.page.arm("other", kind, first, first + width - 1)
        try:
            done, files = self.run()
        except subprocess.TimeoutExpired:
            return "hang", f"{kind} {first}: no end within 30 s, {self.page.disarm('other')['call']}"
        seen = self.page.disarm("other")
        if not seen["failed"]:
            return None, None
        where = f"{kind} {first}: {seen['call']} in {seen['caller']}: status {done.returncode}, says {done.stderr[-300:]!r}"
        if done.returncode == 0:
            return "done", None if self.is_done(done, files) else f"{where}, wrote {sorted(files)}, {done.stdout[:200]!r}"
        said = any(line.startswith("kld: ") and len(line) > 12 for line in done.stderr.splitlines())
        whole = all(self.truth.get(name) == data for name, data in files.items())
        blames = done.returncode == 2 and not any(why in done.stderr for why in OURS)
        good = done.returncode in (1, 2, 3) and said and whole and not blames
        return "clear", None if good else f"{where}, left {sorted(files)}"


# What a line on stderr says that has status 2, for a file that is wrong.
OURS = ["Too many open files", "Cannot allocate memory", "Input/output error", "No space left", "memory"]


@pytest.mark.parametrize("command, way", ASKED)
@pytest.mark.timeout(3000 if EVERY else 300)
def test_done_or_a_line_that_says_why_not(server, counted, tmp_path, command, way):
    tool, problems = Tool(server, tmp_path, command, way), []
    log = len(server.log())
    for number, kind in enumerate(KINDS):
        step = EVERY or (STEP if way in ("http", "split") else FEW_STEP).get(kind, 3)
        first = 1 if EVERY else 1 + (number + ASKED.index((command, way))) % step
        while True:
            came, problem = tool.one(kind, first, 1)
            if not came:
                break
            counted[f"{command} {way}", kind][came] += 1
            problems += [problem] * (problem is not None)
            first += step
    tool.page.close()
    wait_until(lambda: faillib.gauges(server) == server.rest, what="nothing left in the server")
    assert "child" not in server.log()[log:]
    assert not problems, "\n".join(problems)
