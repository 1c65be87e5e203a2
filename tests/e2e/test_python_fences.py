"""PyTorch on a GPU over a server that is lost: what the current stream waits for then, and what kl_div() says. On the CUDA
back end with a torch that has one, without MPS, where a killed process takes no other's context along."""
import os
import signal
import time

import pytest

from conftest import suspend, wait_until
from pythonlib import import_kld, import_torch, needs_card

kld = import_kld()
torch = import_torch()
from kld import functional  # noqa: E402

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def card(backend):
    needs_card(backend, torch)
    from gpulib import Gpu
    if Gpu().mps:
        pytest.skip("with MPS the context of this process may go with the worker's")


class Run:
    """Steps of one tensor."""

    def __init__(self, connection):
        self.connection = connection
        generator = torch.Generator(GPU).manual_seed(1)
        self.q, self.p = (torch.randn(64, 1000, device=GPU, generator=generator).softmax(-1) for _ in range(2))
        self.q.requires_grad_()
        self.truth = (-self.p / self.q / 64).detach()

    def step(self):
        self.q.grad = None
        functional.kl_div(self.q.log(), self.p, reduction="batchmean", connection=self.connection).backward()

    def is_right(self):
        return torch.allclose(self.q.grad, self.truth, rtol=1e-4)


@pytest.fixture(params=["fence", "event"])
def run(request, make_server, monkeypatch):
    monkeypatch.setenv("KLD_DONE", request.param)
    server = make_server(http="", restart_ms_max=200)
    with kld.connect(server.url_unix) as connection:
        one = Run(connection)
        one.step()
        torch.cuda.synchronize()
        assert one.is_right()
        yield request.param, server, one


def lose(server, number=signal.SIGKILL):
    worker = server.child("worker")
    os.kill(worker, number)
    return lambda: wait_until(lambda: server.child("worker") not in (None, worker), 20, "the next worker")


def test_many_steps_on_several_streams(run):
    """More streams than the server has."""
    _, server, one = run
    streams = [torch.cuda.Stream() for _ in range(24)]
    for i in range(240):
        with torch.cuda.stream(streams[i % 24]):
            streams[i % 24].wait_stream(streams[(i - 1) % 24])
            one.step()
    torch.cuda.synchronize()
    assert one.is_right()


def test_a_server_that_is_lost_idle_is_no_loss(run):
    _, server, one = run
    for _ in range(3):
        lose(server)()
        one.step()
        torch.cuda.synchronize()
        assert one.is_right()


def test_a_training_run_outlives_a_lost_server(run):
    """Its stream waits for the server's device; every thread of this process waits for the stream."""
    what, server, one = run
    if what == "event":
        pytest.skip("it hangs for good: test_faults.py")
    for _ in range(3):
        torch.cuda._sleep(1_000_000_000)  # half a second
        one.step()
        one.step()
        replaced = lose(server)
        torch.cuda.synchronize()
        replaced()
        with pytest.raises(kld.KldConnectionError) as raised:
            one.step()
        assert raised.value.status == kld.Status.DEVICE_LOST
        one.step()
        torch.cuda.synchronize()
        assert one.is_right()


def test_a_server_that_shuts_down_ends_what_it_has(run):
    """And the request that its successor gets is made again, or its caller is told."""
    what, server, one = run
    torch.cuda._sleep(500_000_000)
    one.step()
    replaced = lose(server, signal.SIGTERM)
    try:
        one.step()
    except kld.KldConnectionError as error:
        assert what == "event" and error.status == kld.Status.DEVICE_LOST
        one.step()
    torch.cuda.synchronize()
    assert one.is_right()
    replaced()


def test_close_waits_for_the_results_that_streams_wait_for(run):
    """Also with a worker that stands still: its device has the work. What another stream does meanwhile is none of them; how
    long that holds close() up is the driver's, when it lets go of the page."""
    what, server, one = run
    if what == "event":
        pytest.skip("close() does not wait for events")
    worker, other = server.child("worker"), torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(4_000_000_000)  # two seconds
    torch.cuda._sleep(500_000_000)
    one.step()
    began = time.monotonic()
    suspend(worker)
    try:
        one.connection.close()
    finally:
        os.kill(worker, signal.SIGCONT)
    print(f"close() took {time.monotonic() - began:.3f} s, another stream {'is done' if other.query() else 'has more'}")
    torch.cuda.synchronize()
    assert one.is_right()
