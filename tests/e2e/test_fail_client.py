"""The N-th of everything fails in libkld: tests/fail/client.c has each part of a conversation over every kind of
connection, and says of each N what came of it. A call returns the right answer, or an error that says what was wrong
and does not blame its caller; nothing is left in the process, or in the server beside it; the connection, and the next
one, serve on. FAIL_NTH_EVERY=1 (make fail-nth) takes every N.
"""
import collections
import os
import socket
import subprocess

import pytest

import faillib
from conftest import BIN, Server, clean_environment, end_well, wait_until

EVERY = int(os.environ.get("FAIL_NTH_EVERY", 0))
CLIENT = BIN / "tests" / "fail" / "client"
KINDS = ["memory", "map", "descriptor", "send", "receive", "epoll", "thread", "interrupt", "option", "connect"]
PARTS = {"unix": ["ask", "regions", "plain", "leave", "pool", "share", "fence", "packet"], "http": ["ask", "regions", "plain", "leave"],
         "name": ["plain"], "local": ["ask", "regions", "plain", "leave", "pool"], "split": ["split"]}
STEP = {"memory": 13, "interrupt": 7}  # of a sample; of other kinds 2
# libcurl 7.88 loses the addresses that its thread found if that cannot write to the pair of sockets beside it.
LIBCURLS = [("name", kind, "leak") for kind in ("send", "interrupt")]
SLOW_MS = 5000  # with one answer that a lost server owed
pytestmark = faillib.needs(CLIENT)


@pytest.fixture(scope="module")
def server(backend):
    one = Server(backend=backend, http_threads=1, threads=2, http_hosts=socket.gethostname())
    one.rest = faillib.at_rest(one)[1]
    yield one
    end_well(one)


@pytest.fixture(scope="module")
def counted():
    """{(kind of connection, kind of call): {what came of it: how often}}, a table in the end."""
    found = collections.defaultdict(collections.Counter)
    yield found
    print("\n| connection | call | failed | right | clear error |\n|---|---|---|---|---|")
    for (way, kind), came in found.items():
        print(f"| {way} | {kind} | {sum(came.values())} | {came['right']} | {came['clear']} |")


def name_of_this():
    """libcurl has a thread look for it, and knows "localhost" by itself."""
    name = socket.gethostname()
    try:
        return name if socket.gethostbyname(name) == "127.0.0.1" else None
    except OSError:
        return None


def urls(server, way):
    port = server.address.rsplit(":", 1)[1]
    return {"unix": [server.url_unix, "-"], "http": [server.http, "-"], "local": ["local:cpu", "-"],
            "name": [f"http://{name_of_this()}:{port}", "-"], "split": [server.http, server.url_unix]}[way]


def split(frame):
    path, offset = frame.rsplit("+", 1)
    return path, int(offset, 16)


def judge(way, line, symbols):
    """A line of the program -> what is wrong with it, or None."""
    kind, number, what, *more = line
    if what in ("right", "clear") and int(more[0]) <= SLOW_MS or what == "begins" or (way, kind, what) in LIBCURLS:
        return None
    milliseconds, call, text, frames = more
    where = [name for frame in frames.split() for name in symbols.one(*split(frame))]
    return f"{kind} {number}: {what} after {milliseconds} ms: {text}\n   {call} < " + " < ".join(where[:8])


def swept(server, way, part, steps, width=1):
    """steps: {kind: (first, step)} -> ({kind: {what came of it: how often}}, problems)."""
    page, symbols, came, problems, begun = faillib.Page(), faillib.Symbols(), collections.defaultdict(collections.Counter), [], ""
    kinds = [f"{faillib.KINDS.index(kind)}:{first}:{step}" for kind, (first, step) in steps.items()]
    try:
        done = subprocess.run([str(CLIENT), part, str(width), *urls(server, way), *kinds], capture_output=True, text=True,
                              errors="replace", env=clean_environment(**page.environment()), timeout=3000)
    finally:
        page.close()
    for line in done.stdout.splitlines():
        number, *more = line.split("\t")
        begun = [faillib.KINDS[int(number)], *more]
        if more[1] in ("right", "clear"):
            came[begun[0]][more[1]] += 1
        problem = judge(way, begun, symbols)
        problems += [problem] * (problem is not None)
    if done.returncode:
        problems.append(f"ended with status {done.returncode}: {begun} {done.stderr[-2000:]}")
    return came, problems


def sample(part, kinds):
    """The same each time, and another one for each part."""
    every = {kind: EVERY or STEP.get(kind, 2) for kind in kinds}
    return {kind: (1 if EVERY else 1 + (number + part) % every[kind], every[kind]) for number, kind in enumerate(kinds)}


@pytest.mark.parametrize("width", [1, 3], ids=["one", "three"])
@pytest.mark.parametrize("way, part", [(way, part) for way in PARTS for part in PARTS[way]])
@pytest.mark.timeout(3000 if EVERY else 300)
def test_right_or_a_clear_error(server, counted, way, part, width):
    """width: so many calls in a row fail."""
    if way == "name" and not name_of_this():
        pytest.skip("this host's name is not 127.0.0.1")
    if width > 1 and not EVERY and (part not in ("plain", "pool") or way == "name"):
        pytest.skip("of bursts CI takes some parts")
    log = len(server.log())
    came, problems = swept(server, way, part, sample(PARTS[way].index(part), KINDS), width)
    for kind, outcomes in came.items():
        counted[way if width == 1 else f"{way}, {width} at a time", kind].update(outcomes)
    wait_until(lambda: faillib.gauges(server) == server.rest, what="nothing left in the server")
    assert "child" not in server.log()[log:]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("kind", ["memory", "descriptor", "send", "receive", "epoll"])
def test_some_did_fail(counted, kind):
    """A library that no longer sees the calls would leave all of the above right."""
    for way in {way for way, _ in counted}:
        assert way.startswith("local") and kind in ("send", "receive") or sum(counted[way, kind].values()), way
