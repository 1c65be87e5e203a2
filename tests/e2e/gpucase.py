"""What tests of GPU memory share with each other: a card, a worker on it, a client, and predictions and targets in an
allocation that the client shares. On the CUDA back end only."""
import time

import pytest

import wire
from conftest import SANITIZER, Server, wait_until
from unixlib import forward_kl, holdings, probabilities
from wire import Client, tensor

SHAPE = (64, 1024)
TENSOR = 4 * SHAPE[0] * SHAPE[1]
ROOM = 4 << 20  # predictions, targets, gradient, loss; larger than what the driver shares out of a block
LOSS_AT = 3 * TENSOR


@pytest.fixture(scope="module")
def gpu(backend):
    if backend != "cuda":
        pytest.skip("needs the CUDA back end")
    from gpulib import Gpu
    return Gpu()


@pytest.fixture(scope="module")
def server(gpu, backend):
    one = Server(backend=backend, http="", pool_bytes_max="1G")
    yield one
    status, log = one.stop(), one.log()
    one.remove()
    assert status == 0 and not SANITIZER.search(log), log


@pytest.fixture
def client(server):
    with Client(server.unix) as one:
        yield one

class Case:
    """Predictions and targets in an allocation that a client shares."""

    def __init__(self, gpu, client, memory, base_offset=0):
        self.gpu, self.client, self.memory = gpu, client, memory
        self.q, self.p = probabilities(*SHAPE), probabilities(*SHAPE)
        self.base_offset = base_offset
        gpu.put(memory.at + base_offset, self.q)
        gpu.put(memory.at + base_offset + TENSOR, self.p)
        self.region = self.register(client)

    def register(self, client, **changes):
        size = self.memory.size - self.base_offset
        given = {"offset": self.base_offset, "base": self.memory.size, "uuid": self.gpu.uuid, **changes}
        if hasattr(self.memory, "handle"):
            return client.region_add(wire.CUDA_IPC, size, handle=given.pop("handle", self.memory.handle),
                                     **given)
        return client.region_add(wire.CUDA_FD, size, fds=given.pop("fds", [self.memory.fd]), **given)

    @property
    def expected(self):
        return forward_kl(self.q, self.p).mean()

    def tensors(self, region=None, gradient=True, loss=False):
        region = region or self.region
        found = {"predictions": tensor(region), "targets": tensor(region, TENSOR)}
        if gradient:
            found["grad_predictions"] = tensor(region, 2 * TENSOR)
        if loss:
            found["loss"] = tensor(region, LOSS_AT)
        return found

    def run(self, region=None, client=None):
        return (client or self.client).run(SHAPE, self.tensors(region))["loss"]

@pytest.fixture
def memory(gpu):
    from gpulib import Allocation
    one = Allocation(gpu, ROOM)
    yield one
    one.free()


@pytest.fixture
def case(gpu, client, memory):
    return Case(gpu, client, memory)

class HostCase:
    """The same in a client's shared memory, from which the worker copies."""

    def __init__(self, client, shape):
        self.client, self.shape, self.size = client, shape, 4 * shape[0] * shape[1]
        self.memory = wire.Memory(3 * self.size)
        self.arrays = [self.memory.array(i * self.size, shape, "<f4") for i in range(2)]
        self.values = [probabilities(*shape) for _ in range(2)]
        self.expected = forward_kl(*self.values).mean()
        self.region = client.region(self.memory)
        self.restore()

    def restore(self):
        for array, values in zip(self.arrays, self.values):
            array[:] = values

    def run(self):
        tensors = {"predictions": tensor(self.region), "targets": tensor(self.region, self.size),
                   "grad_predictions": tensor(self.region, 2 * self.size)}
        assert self.client.run(self.shape, tensors)["loss"] == pytest.approx(self.expected, rel=1e-6)


class Stepper:
    """A client stream, its ready event and the worker's done event."""

    def __init__(self, gpu, client):
        self.gpu, self.client, self.stream = gpu, client, gpu.stream()
        self.ready, handle = gpu.event()
        self.ready_id = client.event_add(wire.EVENT_READY, gpu.uuid, handle)[0]
        self.done_id, handle = client.event_add(wire.EVENT_DONE, gpu.uuid)
        self.done = gpu.open_event(handle)

    def step(self, case, **more):
        """Enqueued on both sides when this returns."""
        self.gpu.record(self.ready, self.stream)
        done = self.client.run(SHAPE, case.tensors(loss=True), flags=wire.EARLY, ready=self.ready_id,
                               done=self.done_id, **more)
        self.gpu.wait(self.stream, self.done)
        return done


class FenceStepper(Stepper):
    """With a fence in the place of the done event."""

    def __init__(self, gpu, client, stream=0):
        super().__init__(gpu, client)
        self.page, self.number = wire.Memory(4096), stream
        self.words = self.page.array(0, (1024,), "<u4")
        self.words[:] = 77
        self.region = client.region(self.page)
        self.done_id = client.fence_add(self.region, 128)
        assert self.words[32] == 0 and self.words[31] == self.words[33] == 77
        self.at = gpu.pin(self.words.ctypes.data, 4096) + 128

    def step(self, case, **more):
        self.gpu.record(self.ready, self.stream)
        done = self.client.run(SHAPE, case.tensors(loss=True), flags=wire.EARLY, ready=self.ready_id,
                               done=self.done_id, stream=self.number, **more)
        self.gpu.wait_for(self.stream, self.at, done["fence_number"])
        return done

    def close(self):
        self.gpu.finish(self.stream)
        self.gpu.unpin(self.words.ctypes.data)


def resident_kb(pid):
    lines = open(f"/proc/{pid}/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


def leaks_nothing(case, worker):
    """Its memory is registered and dropped 10,000 times: no descriptor, mapping, host or device memory is left."""
    client = case.client
    client.drop(case.region)

    def state():
        maps = len(open(f"/proc/{worker}/maps").readlines())
        return holdings(worker)[0], maps, case.gpu.free_bytes(), resident_kb(worker)

    def cycle(count):
        for _ in range(count):
            client.drop(case.register(client))
        wait_until(lambda: client.stats()["regions"] == 0, what="the last drop")
        time.sleep(0.2)

    cycle(200)
    before = state()
    cycle(10000)
    after = state()
    assert after[0] == before[0] and abs(after[1] - before[1]) <= 8
    assert abs(after[2] - before[2]) <= 64 << 20  # a leak would be 40 GiB
    assert after[3] - before[3] <= 2 << 10  # KiB; the struct of a region would be 6 MiB
