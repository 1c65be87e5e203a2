"""The order of two processes' streams on one card: events, fences, priorities. On the CUDA back end only."""
import collections
import itertools
import threading
import time

import numpy as np
import pytest

import wire
from conftest import wait_until
from gpucase import LOSS_AT, SHAPE, TENSOR, FenceStepper, HostCase, Stepper, case, client, gpu, memory, server
from unixlib import forward_kl, holdings
from wire import Client, Failed, tensor

FIXTURES = gpu, server, client, memory, case  # of the tests below


def test_the_device_waits_for_the_client_and_the_client_for_the_device(gpu, client, case):
    """The client's stream takes 100 ms to write the predictions; nobody's CPU waits for it."""
    stepper = Stepper(gpu, client)
    stepper.step(case)  # streams are opened, kernels loaded
    gpu.finish(stepper.stream)
    value, loss = 1 / SHAPE[1], np.zeros(1, "<f4")
    expected = forward_kl(np.full(SHAPE, value), case.p).mean()
    start = time.monotonic()
    gpu.launch("spin", stepper.stream, 100_000_000)
    gpu.fill_later(case.memory.at, value, SHAPE[0] * SHAPE[1], stepper.stream)
    done = stepper.step(case)
    told = time.monotonic() - start
    gpu.get_later(case.memory.at + LOSS_AT, loss, stepper.stream)
    gpu.finish(stepper.stream)
    ended = time.monotonic() - start
    assert told < 0.05 < 0.1 <= ended < 1, (told, ended)
    assert loss[0] == pytest.approx(expected, rel=1e-6)
    assert done["scalar"] == 0 and done["loss"] == 0 and done["kernel_ns"] == 0


def test_without_early_done_comes_behind_the_event(gpu, client, case):
    stepper = Stepper(gpu, client)
    start = time.monotonic()
    gpu.launch("spin", stepper.stream, 50_000_000)
    gpu.record(stepper.ready, stepper.stream)
    done = client.run(SHAPE, case.tensors(), ready=stepper.ready_id, done=stepper.done_id)
    assert time.monotonic() - start >= 0.05
    assert done["loss"] == pytest.approx(case.expected, rel=1e-6)
    assert done["kernel_ns"] < 40_000_000, "the wait is not the kernel's time"


def test_a_training_run_waits_for_nothing(gpu, client, case):
    """Whole steps (forward, ready event, submit, done event, EARLY reply, loss in a region, update) behind a
    kernel that holds the client's stream for 300 ms: the host has control back long before that ends, so
    neither it nor the worker's loop waits for the device. Then 30 steps, of which the worker takes
    KLD_LANE_DEPTH ahead of the device."""
    stepper, ahead = Stepper(gpu, client), 4
    losses = gpu.pinned(30 + ahead)
    stepper.step(case)
    gpu.finish(stepper.stream)

    def whole_step(i):
        gpu.launch("spin", stepper.stream, 10_000_000)  # the model
        gpu.fill_later(case.memory.at, (1 + i) / SHAPE[1], SHAPE[0] * SHAPE[1], stepper.stream)
        stepper.step(case)
        gpu.get_later(case.memory.at + LOSS_AT, losses[i:i + 1], stepper.stream)
        assert gpu.is_busy(stepper.stream), "the host waited for the end of the step"

    start = time.monotonic()
    gpu.launch("spin", stepper.stream, 300_000_000)
    for i in range(ahead):
        whole_step(i)
    enqueued = time.monotonic() - start
    assert enqueued < 0.2, f"{enqueued * 1e3:.0f} ms until the host had control back"
    for i in range(ahead, len(losses)):
        whole_step(i)
    gpu.finish(stepper.stream)
    took = time.monotonic() - start
    truth = [forward_kl(np.full(SHAPE, (1 + i) / SHAPE[1]), case.p).mean() for i in range(len(losses))]
    np.testing.assert_allclose(losses, truth, rtol=1e-5, atol=1e-6)
    print(f"{ahead} steps enqueued in {enqueued * 1e3:.1f} ms, all took {took * 1e3:.1f} ms")
    assert took >= 0.95 * (0.3 + 0.01 * len(losses))


def test_a_fence_is_written_behind_the_work(gpu, server, client, case):
    """The client's stream takes 100 ms; its host and the word see nothing before."""
    worker, stepper = server.child("worker"), FenceStepper(gpu, client)
    assert stepper.step(case)["fence_number"] == 1
    gpu.finish(stepper.stream)
    assert stepper.words[32] == 1
    start = time.monotonic()
    gpu.launch("spin", stepper.stream, 100_000_000)
    assert [stepper.step(case)["fence_number"] for _ in range(2)] == [2, 3]
    assert time.monotonic() - start < 0.05 and stepper.words[32] == 1
    gpu.finish(stepper.stream)
    assert time.monotonic() - start >= 0.1 and stepper.words[32] == 3
    plain = client.run(SHAPE, case.tensors(), done=stepper.done_id)
    assert plain["fence_number"] == stepper.words[32] == 4 and plain["loss"] == pytest.approx(case.expected, rel=1e-6)
    host = HostCase(client, SHAPE)  # staged: behind the copies back
    tensors = {"predictions": tensor(host.region), "targets": tensor(host.region, host.size)}
    assert client.run(SHAPE, tensors, done=stepper.done_id)["fence_number"] == stepper.words[32] == 5
    with pytest.raises(Failed, match="invalid: done_event: fence .* is that of stream 0"):
        client.run(SHAPE, case.tensors(), done=stepper.done_id, stream=1)
    with pytest.raises(Failed, match="invalid: fence: its region lies on the device"):
        client.fence_add(case.region)
    client.drop(stepper.region)  # the fence keeps it
    stepper.step(case)
    client.event_drop(stepper.done_id)
    stepper.close()
    assert stepper.words[32] == 6 and server.child("worker") == worker
    host.memory.close()


def test_events_are_refused_and_dropped(gpu, server, client, case):
    worker = server.child("worker")
    for handle in (bytes(range(64)), case.memory.handle):
        with pytest.raises(Failed, match="invalid"):
            client.event_add(wire.EVENT_READY, gpu.uuid, handle)
    with pytest.raises(Failed, match="invalid: the event is on another device"):
        client.event_add(wire.EVENT_DONE, b"another device!!")
    stepper = Stepper(gpu, client)
    gpu.launch("spin", stepper.stream, 50_000_000)
    stepper.step(case)
    client.event_drop(stepper.ready_id)  # the device still waits for it
    client.event_drop(stepper.done_id)
    gpu.finish(stepper.stream)
    for field in ("ready", "done"):
        with pytest.raises(Failed, match="not_found"):
            client.run(SHAPE, case.tensors(), **{field: getattr(stepper, field + "_id")})
    fds = holdings(worker)[0]
    for _ in range(500):
        client.event_drop(client.event_add(wire.EVENT_DONE, gpu.uuid)[0])
    time.sleep(0.2)
    assert case.run() == pytest.approx(case.expected, rel=1e-6)
    assert server.child("worker") == worker and abs(holdings(worker)[0] - fds) <= 4


def test_early_needs_device_memory(client, case):
    from wire import Memory
    host = Memory(TENSOR)
    region = client.region(host)
    with pytest.raises(Failed, match="invalid: targets: lies in host memory"):
        client.run(SHAPE, {"predictions": tensor(case.region), "targets": tensor(region)},
                   flags=wire.EARLY)
    host.close()


def test_priorities_compute_the_same(server, case):
    loss = case.run()
    for priority in (-1, 0, 1):
        with Client(server.unix) as one:
            one.stream(0, priority)
            assert case.run(case.register(one), one) == loss


class Load(threading.Thread):
    """Another client, whose streams of low priority keep the device busy."""

    def __init__(self, path, shape, share):
        super().__init__(daemon=True)
        self.client, self.shape, self.done, self.problem = Client(path), shape, 0, None
        self.tensors, self.ending = share(self.client), threading.Event()
        self.streams = range(self.client.welcome["streams_max"])
        for stream in self.streams:
            self.client.stream(stream, -1)

    def run(self):
        try:
            waiting, turns = collections.deque(), itertools.cycle(self.streams)
            while waiting or not self.ending.is_set():
                while len(waiting) < 3 * len(self.streams) and not self.ending.is_set():
                    waiting.append(self.client.submit(self.shape, self.tensors, stream=next(turns)))
                self.client.result(waiting.popleft())
                self.done += 1
        except BaseException as problem:  # told by the test
            self.problem = problem

    def stop(self):
        self.ending.set()
        self.join(60)
        assert not self.is_alive() and self.problem is None, self.problem
        self.client.close()


def test_a_high_priority_goes_before_a_low_one(gpu, make_server):
    """Behind six streams full of large work of another client, the same request waits for what has begun, or for its
    turn."""
    from gpulib import Allocation
    server, shape = make_server(http="", client_streams_max=6), (16384, 16384)  # 2 GiB to read
    count, stream = shape[0] * shape[1], gpu.stream()
    memory = Allocation(gpu, 8 * count)
    gpu.fill_later(memory.at, 2 / shape[1], count, stream)
    gpu.fill_later(memory.at + 4 * count, 1 / shape[1], count, stream)
    gpu.finish(stream)

    def share(client):
        region = client.region_add(wire.CUDA_IPC, memory.size, base=memory.size, uuid=gpu.uuid, handle=memory.handle)
        return {"predictions": tensor(region), "targets": tensor(region, 4 * count)}

    took = {1: [], -1: []}
    with Client(server.unix) as client:
        tensors = share(client)

        def run(priority):
            start = time.monotonic()
            done = client.run(shape, tensors, stream=priority + 1)
            took[priority].append(time.monotonic() - start)
            assert done["loss"] == pytest.approx(-np.log(2), rel=1e-5)

        for priority in took:
            client.stream(priority + 1, priority)
            run(priority)  # opens the stream
            took[priority].clear()
        load = Load(server.unix, shape, share)
        load.start()
        wait_until(lambda: load.problem or load.done > 100, 60, "a busy device")
        try:
            for _ in range(60):
                for priority in took:
                    run(priority)
        finally:
            load.stop()
    memory.free()
    high, low = (1e3 * float(np.median(took[priority])) for priority in (1, -1))
    print(f"beside {load.done} others of low priority: high {high:.2f} ms, low {low:.2f} ms")
    assert high < 0.75 * low, (high, low)
