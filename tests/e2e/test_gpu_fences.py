"""Fences on a card, without MPS and under it: a stream that waits for one goes on when the worker is lost, where one that
waits for a done event does not (test_faults.py); and the gradient is there when it goes on otherwise. The clients are
processes of their own, with libkld (fencelib.py): this one has no GPU context. On the CUDA back end only."""
import os
import select
import signal

import pytest

from pythonlib import LIBRARY, PACKAGE, import_kld
from test_faults import everything_is_given_back, gpu_only, is_replaced, mode, server, start, until_it_waits

FIXTURES = gpu_only, mode, server  # of the tests below
import_kld()  # or skips

TRAINER = """if True:
    import os, sys, time
    sys.path[:0] = [{folder!r}, {package!r}]
    os.environ["KLD_LIBRARY"] = {library!r}
    import fencelib, gpulib
    trainer = fencelib.Trainer({path!r})
    trainer.step()
    trainer.finish()
    assert trainer.is_right()
"""
WAITS = TRAINER + """
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        assert trainer.passed(1)
        trainer.gpu.launch("spin", trainer.stream, 500_000_000)
        numbers = [trainer.step() for _ in range(3)]
        print("waits", flush=True)
        began = time.monotonic()
        trainer.finish()  # no thread of this program calls libkld
        took = time.monotonic() - began
        assert not any(trainer.passed(number) for number in numbers), "computed"
        assert trainer.is_told_of_the_loss()
        for _ in range(2):
            trainer.drop_fence()
            trainer.make_fence()
        assert trainer.step() == 1
        trainer.finish()
        assert trainer.passed(1) and trainer.is_right()
        print(f"goes on after {{took:.3f}} s", flush=True)
    except gpulib.GpuError as error:
        print("context lost:", error, flush=True)
    time.sleep(600)"""
IN_ORDER = TRAINER + """
    wrong, stale = trainer.wrong_steps(2000), trainer.wrong_steps(200, ordered=False)
    assert trainer.step() == 2202
    trainer.finish()
    assert trainer.is_right()
    trainer.close()
    print("wrong", wrong, "unordered", stale, flush=True)"""
MANY = TRAINER + """
    before = trainer.gpu.free_bytes()
    for _ in range(300):
        trainer.drop_fence()
        trainer.make_fence()
        trainer.step()
        trainer.finish()
        assert trainer.passed(1) and not trainer.passed(2)
    assert abs(trainer.gpu.free_bytes() - before) <= 64 << 20
    assert trainer.is_right()
    trainer.close()
    print("right", flush=True)"""


HERE = {"package": str(PACKAGE), "library": str(LIBRARY)}


@pytest.mark.parametrize("how", ["killed", "fault", "told to end"])
def test_a_stream_that_waits_for_a_lost_worker_goes_on(gpu_only, mode, server, how):
    """Behind early answers; the client's only thread waits for the stream. With MPS its context may be lost as well,
    which it is told. A worker that is told to end, ends what it has."""
    everything_is_given_back(server)
    worker = server.child("worker")
    child = start(mode, server, WAITS, **HERE)
    try:
        until_it_waits(server, worker, child, how == "fault")
        if how != "fault":
            os.kill(worker, signal.SIGKILL if how == "killed" else signal.SIGTERM)
        assert select.select([child.stdout], [], [], 60)[0], "the client's stream hangs"
        said = child.stdout.readline()
        assert is_replaced(server, worker, 20)
    finally:
        child.kill()
        _, problem = child.communicate()
    print(f"{how}, MPS {mode.mps}: {said}")
    if how == "told to end":
        assert "computed" in problem, said + problem  # all three steps, before it ended
    else:
        assert said.startswith("goes on") or (mode.mps and said.startswith("context lost")), said + problem
    everything_is_given_back(server)


def test_a_stream_ordered_by_a_fence_sees_the_gradient(gpu_only, mode, server):
    """2,000 steps behind each other, of which nobody waits for one; without the wait others' gradients are seen.
    With MPS the device may be done first all the same."""
    everything_is_given_back(server)
    child = start(mode, server, IN_ORDER, **HERE)
    said, problem = child.communicate(timeout=120)
    print(said)
    assert child.returncode == 0, problem
    words = said.split()
    assert words[1] == "0" and (mode.mps or int(words[3]) > 0), said
    everything_is_given_back(server)


def test_fences_come_and_go(gpu_only, mode, server):
    everything_is_given_back(server)
    worker = server.child("worker")
    child = start(mode, server, MANY, **HERE)
    said, problem = child.communicate(timeout=120)
    assert child.returncode == 0 and said == "right\n", said + problem
    assert server.child("worker") == worker
    everything_is_given_back(server)
