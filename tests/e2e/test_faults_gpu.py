"""Clients that die on the card, in various states, with MPS and without. This process has no context of its
own: under MPS it would go with the victim's, and MPS serves nobody until the last such process has ended. So
the file's name goes before test_gpu.py, and the victims are processes of their own."""
import os
import signal
import subprocess
import sys
import time

import pytest

import wire
from conftest import ROOT, SANITIZER, Server, wait_until
from unixlib import probabilities
from wire import Client, Failed, tensor

PROBE = "import sys; sys.path.insert(0, {!r}); import gpulib; print(int(gpulib.Gpu().mps))"
FOLDER = str(ROOT / "tests/e2e")


@pytest.fixture(scope="module")
def mps(backend):
    if backend != "cuda":
        pytest.skip("needs the CUDA back end")
    if "gpulib" in sys.modules:
        pytest.skip("this process has a context of its own")
    return subprocess.run([sys.executable, "-c", PROBE.format(FOLDER)], capture_output=True, text=True,
                          check=True).stdout == "1\n"


@pytest.fixture(scope="module")
def server(mps, backend):
    one = Server(backend=backend, http="", pool_bytes_max="1G", restart_ms_max=200)
    yield one
    status, log = one.stop(), one.log()
    one.remove()
    assert status == 0 and not SANITIZER.search(log), log


CHILD = """if True:
    import os, sys, time
    sys.path.insert(0, {folder!r})
    import gpulib, test_gpu, wire
    gpu, client = gpulib.Gpu(), wire.Client({path!r}, name="child")
    case = test_gpu.Case(gpu, client, gpulib.Allocation(gpu, test_gpu.ROOM))
    stepper = test_gpu.Stepper(gpu, client)
    stepper.step(case)
    gpu.finish(stepper.stream)
    {what}
    print("ready", flush=True)
    time.sleep(600)"""
ENDS = {
    "idle": "pass",
    "kernel running": "gpu.launch('spin', stepper.stream, 20_000_000_000)",
    "event that never comes": "gpu.launch('spin', stepper.stream, 20_000_000_000); stepper.step(case)",
    "fault": "gpu.launch('fault', stepper.stream); time.sleep(0.2)",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_client_dies(mps, server, end):
    """Killed in various states. Without MPS the worker does not notice but for what it gives back; with
    MPS it may be replaced. Either way the next right answer comes soon, to a client without a GPU."""
    worker = server.child("worker")
    code = CHILD.format(folder=FOLDER, path=server.unix, what=ENDS[end])
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                          env={**os.environ, "KLD_BACKEND": "cuda"}) as child:
        try:
            assert child.stdout.readline() == b"ready\n"
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
    start = time.monotonic()
    values = probabilities(8, 100)

    def answer():
        try:
            with Client(server.unix, timeout=10) as one:
                memory = wire.Memory(values.nbytes)
                memory.array(0, values.shape, "<f4")[:] = values
                region = one.region(memory)
                tensors = {"predictions": tensor(region), "targets": tensor(region)}
                loss = one.run(values.shape, tensors)["loss"]
                memory.close()
                return loss == 0
        except (Failed, wire.Ended, OSError):
            return False

    wait_until(answer, 10, "a right answer")
    state = "the same" if server.child("worker") == worker else "replaced"
    took = time.monotonic() - start
    print(f"{end}: right answer after {took * 1e3:.0f} ms, MPS {mps}, worker {state}")
    if not mps:
        assert server.child("worker") == worker

    def released():
        with Client(server.unix) as one:
            stats = one.stats()
            return stats["in_flight"] == 0 and stats["clients"] == 1 and stats["regions"] == 0

    wait_until(released, 30, "what the dead client had being given back")
