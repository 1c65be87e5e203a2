"""The N-th of everything fails in worker or gateway while each part of a conversation over both fronts runs
(failparts.py): the answer is right or an error says what was wrong; nothing ends, hangs or is left behind;
and the same part, undisturbed, is right afterwards. And it fails while supervisor, worker or gateway starts.
FAIL_NTH_EVERY=1 (make fail-nth) takes every N; without it each part's are sampled, the same ones each time.
"""
import os
import subprocess

import pytest

import faillib
from failparts import (HTTP, UNIX, http_binary, http_json, http_shared, http_tensor, http_tensor_slow, unix_compute,
                       unix_pool, unix_share)

EVERY = int(os.environ.get("FAIL_NTH_EVERY", 0))
OUT_OF_MEMORY, LAUNCH_FAILED = 2, 719  # of cudaError_t: one that passes, one that ends the context
STEP = 17  # of a sample; the first N is another one for each part
RARE_STEP = {kind: 3 for kind in ("map", "descriptor", "file", "epoll", "connect")}  # the same of kinds with few calls
START_STEP = {"memory": 97, "descriptor": 5}  # the same of a start; of other kinds each
pytestmark = faillib.needs(faillib.LIBRARY)

# Role -> what it is asked to do without, and while what is said.
WORKER = ["memory", "map", "descriptor", "send", "receive", "epoll", "interrupt"]
GATEWAY = [*WORKER, "connect", "file"]
KINDS = {"worker": lambda part: WORKER, "gateway": lambda part: GATEWAY if part in HTTP else []}


@pytest.fixture(scope="module")
def sweep(backend):
    one = faillib.Sweep(backend=backend, restart_ms_max=20)  # more of a pause each time would be most of the test
    yield one
    one.report()
    one.close()


@pytest.mark.parametrize("role", KINDS)
@pytest.mark.parametrize("part", UNIX + HTTP, ids=lambda part: part.__name__)
@pytest.mark.timeout(3000 if EVERY else 300)
def test_right_or_a_clear_error(sweep, role, part):
    before = len(sweep.problems)
    for number, kind in enumerate(KINDS[role](part)):
        step = EVERY or RARE_STEP.get(kind, STEP)
        begin = 1 if EVERY else 1 + (number * 5 + (UNIX + HTTP).index(part) * 3) % step
        sweep.sweep(role, kind, part, step=step, begin=begin)
    sweep.swept.add((role, part))
    assert not sweep.problems[before:], "\n".join(sweep.problems[before:])


WIDTH, WIDE_STEP = 3, 31  # calls in a row that fail; of a sample
WIDE = [unix_share, http_tensor] + [unix_compute, unix_pool, http_json, http_binary, http_shared] * bool(EVERY)


@pytest.mark.parametrize("role", KINDS)
@pytest.mark.parametrize("part", WIDE, ids=lambda part: part.__name__)
@pytest.mark.timeout(3000 if EVERY else 300)
def test_several_in_a_row(sweep, role, part):
    """What is done about one that failed fails, too."""
    before = len(sweep.problems)
    for number, kind in enumerate(KINDS[role](part)):
        step = EVERY or WIDE_STEP
        begin = 1 if EVERY else 1 + (number + WIDE.index(part)) % 5
        sweep.sweep(role, kind, part, step=step, begin=begin, width=WIDTH)
    assert not sweep.problems[before:], "\n".join(sweep.problems[before:])


@pytest.mark.parametrize("kind", ["memory", "send", "receive", "descriptor"])
@pytest.mark.parametrize("role", KINDS)
def test_some_did_fail(sweep, role, kind):
    """A library that no longer sees the calls would leave all of the above right."""
    if not sweep.swept >= {(role, part) for part in UNIX + HTTP}:
        pytest.skip("of this role not all parts were run")
    assert sweep.tried[role, kind] > 0


@pytest.mark.timeout(300)
def test_held_up_and_not_watched_again(sweep):
    """The few calls that a sample may miss: MHD cannot watch the socket again of an upload that was held up, and
    ends the connection."""
    before = len(sweep.problems)
    sweep.sweep("gateway", "epoll", http_tensor_slow)
    assert not sweep.problems[before:], "\n".join(sweep.problems[before:])
    assert any(part == http_tensor_slow.__name__ and "MHD_add_connection" not in site
               for _, _, part, site, _ in sweep.sites["cut"])


# What is not ours ends the process there: libuv with abort(). A gateway that libseccomp 2.5.4 ends, or never lets go,
# where it has no memory to put the filter together, is replaced.
START = [("supervisor", "memory"), ("supervisor", "map"), ("supervisor", "descriptor"), ("supervisor", "epoll"),
         ("supervisor", "receive"), ("worker", "memory"), ("worker", "map"), ("worker", "descriptor"),
         ("worker", "thread"), ("worker", "epoll"), ("worker", "send"), ("gateway", "memory"), ("gateway", "map"),
         ("gateway", "descriptor"), ("gateway", "thread"), ("gateway", "epoll"), ("gateway", "send")]
NOT_OURS = {"memory": "libuv", "descriptor": "libuv", "epoll": "libuv"}


@pytest.mark.parametrize("role, kind", START)
@pytest.mark.timeout(3000 if EVERY else 300)
def test_starts_or_says_why_not(backend, role, kind):
    first, problems, tried = 1, [], 0
    while True:
        problem, seen = faillib.start_without(role, kind, first, [unix_compute, http_json], backend=backend)
        if not seen["failed"]:
            break
        tried += 1
        not_ours = seen["caller"].startswith(NOT_OURS.get(kind, "none"))
        if problem and (not not_ours or "status -11" in problem):
            problems.append(f"{first}: {seen['call']} in {seen['caller']}: {problem}")
        first += EVERY or START_STEP.get(kind, 1)
    print(f"\n{role} {kind}: {tried}")
    assert tried and not problems, "\n".join(problems)


@pytest.mark.parametrize("role", ["supervisor", "worker", "gateway"])
@pytest.mark.timeout(300)
def test_no_threads_for_libuv(backend, role):
    """Which ends a process that gets none for its pool: it is not even asked then, and the role says why it ends."""
    said = 0
    for first in range(1, 100):
        problem, seen = faillib.start_without(role, "thread", first, [unix_compute], backend=backend)
        if not seen["failed"]:
            break
        if "threads are to be had" in seen["log"]:
            said += 1
            assert not problem and "signal=6" not in seen["log"], problem or seen["log"]
    assert said == 4


def reached(backend):
    """Does nth.so see CUDA's runtime, or is it inside libkld.so?"""
    said = subprocess.run(["ldd", str(faillib.BIN / "kld-server")], capture_output=True, text=True)
    return backend == "cuda" and "libcudart.so" in said.stdout


CUDA_STEP = {OUT_OF_MEMORY: 23, LAUNCH_FAILED: 97}  # of a sample: each of the latter costs a worker with its context
LOOKS = 4  # the first ones of a part: all later ones are of the same places
# "3/12": of all N each twelfth, from the third on. As many processes with a server each are through sooner.
SHARE, SHARES = (int(number) for number in os.environ.get("FAIL_NTH_SHARE", "1/1").split("/"))


@pytest.mark.parametrize("part", UNIX + HTTP, ids=lambda part: part.__name__)
@pytest.mark.parametrize("error", [OUT_OF_MEMORY, LAUNCH_FAILED])  # all that cost little first
@pytest.mark.timeout(3000)
def test_cuda(sweep, backend, part, error):
    if not reached(backend):
        pytest.skip("needs --backend cuda and a libkld.so with the shared runtime (tests/README.md)")
    before, step = len(sweep.problems), EVERY or CUDA_STEP[error]
    begin = 1 if EVERY else 1 + (UNIX + HTTP).index(part) * 7 % step
    sweep.sweep("worker", "cuda", part, step=step * SHARES, begin=begin + step * (SHARE - 1), error=error)
    sweep.sweep("worker", "cuda look", part, step=SHARES, begin=SHARE, error=error, limit=LOOKS + 1)
    assert not sweep.problems[before:], "\n".join(sweep.problems[before:])
