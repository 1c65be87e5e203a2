"""A worker under test and its raw clients: the fixtures of the test_unix*.py files.

Those files import all of it; every test of theirs is followed by a count of what the worker holds."""
import contextlib
import os
import pathlib
import signal

import numpy as np
import pytest

import wire
from conftest import SANITIZER, Server, settled, suspend, wait_until
from wire import Client, Memory, tensor

RNG = np.random.default_rng(7)


@contextlib.contextmanager
def read_at_once(server):
    """The worker stands still while it is sent something, so it finds all of that there, up to 16 frames at a time:
    else it may be through with the first before a sender without a processor has sent the last."""
    worker = server.child("worker")
    suspend(worker)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


@pytest.fixture(scope="module")
def worker_server(backend):
    """A server without HTTP, with small limits so that tests can reach them."""
    server = Server(backend=backend, http="", clients_max=20, client_requests_max=12, client_regions_max=32,
                    region_bytes_max="1G", client_region_bytes_max="2G", pool_bytes_max="64M",
                    client_streams_max=3, drain_ms=5000)
    first = server.child("worker")
    with Client(server.unix) as one:  # what is opened once and kept is no leak
        warm = Case(one)
        one.run(warm.shape, warm.tensors())
        warm.close()
    wait_until(lambda: holdings(first)[1] == 0, what="the first client's memory being given back")
    server.baseline = settled(lambda: holdings(first))
    yield server
    last = server.child("worker")
    status, log = server.stop(), server.log()
    server.remove()
    assert first == last, f"the worker was replaced during the tests:\n{log}"
    assert status == 0 and not SANITIZER.search(log), log


@pytest.fixture
def path(worker_server):
    return worker_server.unix


@pytest.fixture
def client(path):
    with Client(path) as one:
        yield one


def holdings(pid):
    """What a leak would show in: open descriptors and shared mappings of the worker."""
    fds = len(os.listdir(f"/proc/{pid}/fd"))
    maps = [line for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
            if "memfd:kld-test" in line]
    return fds, len(maps)


@pytest.fixture(autouse=True)
def no_leak(worker_server):
    """After each test, its clients gone, the worker holds no more than when it had started. Some of that is given back on
    a thread: wait for it, and where the start had not waited long enough, go by the less from then on."""
    yield
    pid, before = worker_server.child("worker"), worker_server.baseline

    def given_back():
        now = holdings(pid)
        return all(a <= b for a, b in zip(now, before)) and now
    if wait_until(given_back, what=f"no more than {before} being held") != before:
        worker_server.baseline = tuple(map(min, before, settled(lambda: holdings(pid))))


def probabilities(rows, classes, dtype=np.float32):
    x = RNG.random((rows, classes)) + 0.01
    return (x / x.sum(axis=1, keepdims=True)).astype(dtype)


def forward_kl(q, p):
    """FP64; rows."""
    q, p = q.astype(np.float64), p.astype(np.float64)
    return (p * (np.log(p) - np.log(q))).sum(axis=1)


def softmax64(z):
    z = z.astype(np.float64)
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


class Case:
    """Predictions, targets and room for a gradient and the row losses in one region."""

    def __init__(self, client, rows=64, classes=100, dtype="FP32"):
        number = wire.DTYPES[dtype][1]
        self.client, self.shape, self.dtype = client, (rows, classes), dtype
        size = rows * classes * number.itemsize
        self.memory = Memory(3 * size + rows * number.itemsize + 64)
        self.offsets = {"predictions": 0, "targets": size, "grad_predictions": 2 * size,
                        "row_loss": 3 * size}
        self.q, self.p, self.gradient = (self.memory.array(i * size, self.shape, number) for i in range(3))
        self.rows = self.memory.array(3 * size, (rows,), number)
        self.q[:], self.p[:] = probabilities(rows, classes, number), probabilities(rows, classes, number)
        self.region = client.region(self.memory)

    def tensors(self, *names, **changes):
        names = names or ("predictions", "targets", "grad_predictions")
        found = {name: tensor(self.region, self.offsets[name], self.dtype) for name in names}
        found.update(changes)
        return found

    def close(self):
        self.memory.close()


@pytest.fixture
def case(client):
    one = Case(client)
    yield one
    one.close()


LONG = (1024, 8192)  # some ms of work on every back end


@pytest.fixture
def long_case(client):
    """Work that takes long enough to be interrupted: requests over 8 Mi elements."""
    memory = Memory(4 * LONG[0] * LONG[1])
    memory.array(0, LONG, "<f4")[:] = 0.5
    yield client.region(memory)
    memory.close()


def long_submit(client, region, **more):
    return client.submit(LONG, {"predictions": tensor(region), "targets": tensor(region)},
                         predictions_form="logits", targets_form="logits", **more)
