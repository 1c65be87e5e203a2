"""The worker over its Unix socket, frame by frame: right answers, order, limits, ends, bad input.

Wherever something is refused the test also says what must remain: the connection answers PING, and
the worker holds no descriptor and no mapping more than before."""
import fcntl
import os
import pathlib
import random
import re
import signal
import socket
import struct
import threading
import time

import numpy as np
import pytest

import wire
from conftest import wait_until
from wire import Client, Ended, Failed, Memory, tensor

RNG = np.random.default_rng(7)


@pytest.fixture(scope="module")
def worker_server(backend):
    """A server without HTTP, with small limits so that tests can reach them."""
    from conftest import SANITIZER, Server
    server = Server(backend=backend, http="", clients_max=20, client_requests_max=16, client_regions_max=32,
                    region_bytes_max="1G", client_region_bytes_max="2G", pool_bytes_max="64M",
                    client_streams_max=3, drain_ms=5000)
    first = server.child("worker")
    with Client(server.unix) as one:  # what is opened once and kept is no leak
        warm = Case(one)
        one.run(warm.shape, warm.tensors())
        warm.close()
    wait_until(lambda: holdings(first)[1] == 0, what="the first client's memory being given back")
    time.sleep(0.3)
    server.baseline = holdings(first)
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
    """After each test, its clients gone, the worker holds what it held when it had started. Some of
    that is given back on a thread: wait for it."""
    yield
    pid, before = worker_server.child("worker"), worker_server.baseline
    wait_until(lambda: holdings(pid) == before, 10, f"no leak: {before} before, {holdings(pid)} after")


# ---- Right answers ---------------------------------------------------------------------------------

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


@pytest.mark.parametrize("dtype, tolerance", [("FP32", 1e-6), ("FP64", 1e-13)])
def test_forward_kl_of_probabilities(client, dtype, tolerance):
    case = Case(client, 33, 257, dtype)
    done = client.run(case.shape, case.tensors("predictions", "targets", "grad_predictions", "row_loss"))
    rows = forward_kl(case.q, case.p)
    assert done["scalar"] == 1
    assert done["loss"] == pytest.approx(rows.sum() / 33, rel=tolerance)
    np.testing.assert_allclose(case.rows, rows, rtol=10 * tolerance, atol=tolerance)
    expected = -case.p.astype(np.float64) / case.q.astype(np.float64) / 33
    np.testing.assert_allclose(case.gradient, expected, rtol=4 * tolerance)
    assert done["bytes"] >= 3 * case.q.nbytes and done["kernel_ns"] > 0
    case.close()


def test_logits_in_place_with_temperature(client):
    case = Case(client, 16, 1000)
    z, w = RNG.normal(size=(2, 16, 1000)).astype(np.float32) * 3
    case.q[:], case.p[:] = z, w
    own = case.tensors("predictions", "targets")
    done = client.run(case.shape, {**own, "grad_predictions": own["predictions"]}, predictions_form="logits",
                      targets_form="logits", temperature=2.0, reduction="sum", scale=4.0)
    q, p = softmax64(z / 2), softmax64(w / 2)
    assert done["loss"] == pytest.approx(4 * forward_kl(q, p).sum(), rel=1e-6)
    np.testing.assert_allclose(case.q, 4 * (q - p) / 2, rtol=1e-5, atol=1e-7)
    case.close()


def test_row_reduction_into_region_and_strides(client, case):
    """Every second row of a larger tensor; the loss itself goes to a region."""
    rows, classes = case.shape
    stride = 2 * classes * 4
    tensors = {"predictions": tensor(case.region, 0, stride=stride),
               "targets": tensor(case.region, case.offsets["targets"], stride=stride),
               "loss": tensor(case.region, case.offsets["row_loss"])}
    done = client.run((rows // 2, classes), tensors, reduction="row")
    assert done["scalar"] == 0 and done["loss"] == 0
    np.testing.assert_allclose(case.rows[:rows // 2], forward_kl(case.q[::2], case.p[::2]), rtol=1e-5)


def test_two_regions_and_the_same_bits_again(client, case):
    other = Memory(case.p.nbytes)
    other.array(0, case.shape, "<f4")[:] = case.p
    second = client.region(other)
    one = client.run(case.shape, case.tensors())["loss"]
    two = client.run(case.shape, case.tensors(targets=tensor(second)))["loss"]
    assert struct.pack("d", one) == struct.pack("d", two)
    other.close()


def test_copy_through_the_pool(client, case):
    pool = client.region_add(wire.POOL, 2 * case.q.nbytes)
    assert client.stats()["pool_bytes"] >= 2 * case.q.nbytes
    size = case.q.nbytes
    assert client.copy(pool, 0, case.region, 0, size)["bytes"] >= size
    client.copy(pool, size, case.region, size, size)
    one = client.run(case.shape, case.tensors("predictions", "targets"))["loss"]
    two = client.run(case.shape, {"predictions": tensor(pool), "targets": tensor(pool, size)})["loss"]
    assert one == two
    client.copy(case.region, 2 * size, pool, size, size)
    np.testing.assert_array_equal(case.gradient, case.p)
    client.drop(pool)
    wait_until(lambda: client.stats()["pool_bytes"] == 0, what="the pool being empty")


def test_pool_region_starts_as_zeros(client):
    memory = Memory(4096)
    memory.array(0, (4096,), "u1")[:] = 0xAA
    shared = client.region(memory)
    pool = client.region_add(wire.POOL, 4096)
    client.copy(pool, 0, shared, 0, 4096)
    client.drop(pool)
    pool = client.region_add(wire.POOL, 4096)
    client.copy(shared, 0, pool, 0, 4096)
    assert not memory.array(0, (4096,), "u1").any()
    memory.close()


def test_requests_in_flight_on_several_streams(client, case):
    numbers = [client.submit(case.shape, case.tensors("predictions", "targets"), stream=i % 3)
               for i in range(12)]
    losses = {client.result(number)["loss"] for number in reversed(numbers)}
    assert len(losses) == 1
    assert losses.pop() == pytest.approx(forward_kl(case.q, case.p).mean(), rel=1e-6)


def test_several_clients_in_parallel(path):
    problems = []

    def work(seed):
        try:
            with Client(path) as one:
                case = Case(one, 20 + seed, 50 + seed)
                expected = forward_kl(case.q, case.p).mean()
                for _ in range(20):
                    loss = one.run(case.shape, case.tensors())["loss"]
                    assert abs(loss - expected) <= 1e-6 * abs(expected)
                case.close()
        except BaseException as problem:  # a thread's failure is the test's
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


def test_welcome_and_stats(path, backend):
    with Client(path, name="tester") as one:
        welcome = one.welcome
        assert welcome["backend"] == backend and welcome["epoch"] != 0 and welcome["version"] == 1
        assert (welcome["regions_max"], welcome["requests_max"], welcome["streams_max"]) == (32, 16, 3)
        assert welcome["region_bytes_max"] == 1 << 30 and welcome["pool_bytes_max"] == 64 << 20
        assert welcome["devices"] == 1 and welcome["device"] == 0 and welcome["name"]
        case = Case(one)
        before = one.stats()
        one.run(case.shape, case.tensors())
        after = one.stats()
        assert after["epoch"] == welcome["epoch"] and after["clients"] == 1
        assert after["requests_total"] == before["requests_total"] + 1
        assert after["bytes_total"] > before["bytes_total"] and after["uptime_ns"] > before["uptime_ns"]
        assert after["regions"] == 1 and after["region_bytes"] == case.memory.size
        case.close()


# ---- Regions ---------------------------------------------------------------------------------------

def test_drop_while_in_use(client):
    case = Case(client, 512, 4096)
    numbers = [client.submit(case.shape, case.tensors()) for _ in range(4)]
    client.drop(case.region)
    with pytest.raises(Failed, match="not_found"):
        client.run(case.shape, case.tensors())
    expected = forward_kl(case.q, case.p).mean()
    for number in numbers:
        assert client.result(number)["loss"] == pytest.approx(expected, rel=1e-6)
    again = client.region(case.memory)
    assert again != case.region
    client.drop(again)
    case.close()


def test_region_ids_are_never_given_twice(client):
    memory = Memory(4096)
    seen = set()
    for _ in range(100):
        region = client.region(memory)
        assert region not in seen
        seen.add(region)
        client.drop(region)
    memory.close()


def test_regions_belong_to_their_connection(path, client, case):
    with Client(path) as other:
        with pytest.raises(Failed, match=f"not_found.*no region {case.region}"):
            other.run(case.shape, case.tensors())
        with pytest.raises(Failed, match="not_found"):
            other.drop(case.region)
        other.ping()
    client.run(case.shape, case.tensors())


def test_one_memfd_twice_is_one_memory(client, case):
    """Two ids for the same bytes: overlap of outputs is seen all the same, in place is allowed."""
    twin = client.region(case.memory)
    assert twin != case.region
    tensors = case.tensors("predictions", "targets")
    with pytest.raises(Failed, match="invalid.*grad_predictions overlaps targets"):
        client.run(case.shape, {**tensors, "grad_predictions": tensor(twin, case.offsets["targets"])})
    with pytest.raises(Failed, match="invalid.*grad_predictions overlaps predictions"):
        client.run(case.shape, {**tensors, "grad_predictions": tensor(twin, 4)})
    with pytest.raises(Failed, match="invalid.*overlap"):
        client.copy(twin, 0, case.region, 100, 200)
    q, p = case.q.astype(np.float64), case.p.astype(np.float64)
    client.run(case.shape, {**tensors, "grad_predictions": tensor(twin, 0)}, reduction="sum")
    np.testing.assert_allclose(case.q, -p / q, rtol=1e-6)


def bad_memfds():
    seal = fcntl.F_SEAL_SHRINK
    return {
        "unsealed": (lambda: wire.memfd(4096, 0), 4096, "not sealed.*F_SEAL_SHRINK"),
        "sealed against growing only": (lambda: wire.memfd(4096, fcntl.F_SEAL_GROW), 4096, "not sealed"),
        "too small": (lambda: wire.memfd(4096), 4097, "has 4096 bytes; the region needs 4097"),
        "empty": (lambda: wire.memfd(0), 1, "has 0 bytes"),
        "not writable": (lambda: wire.memfd(4096, seal | fcntl.F_SEAL_WRITE), 4096, "cannot be written"),
        "a file": (lambda: os.open("/proc/self/exe", os.O_RDONLY), 16, "not a memfd"),
        "a socket": (lambda: socket.socket().detach(), 16, "not a memfd"),
        "a pipe": (lambda: os.pipe()[0], 16, "not a memfd"),
        "0 bytes": (lambda: wire.memfd(4096), 0, "0 bytes"),
        "2^63": (lambda: wire.memfd(4096), 1 << 63, "at most"),
        "2^64-1": (lambda: wire.memfd(4096), (1 << 64) - 1, "at most"),
    }


@pytest.mark.parametrize("name", bad_memfds())
def test_bad_memfd(client, name):
    make, size, expected = bad_memfds()[name]
    fd = make()
    try:
        with pytest.raises(Failed, match=expected):
            client.region_add(wire.MEMFD, size, [fd])
    finally:
        os.close(fd)
    client.ping()


@pytest.mark.parametrize("change, expected", [
    (dict(kind=0), "unknown region kind 0"),
    (dict(kind=9), "unknown region kind 9"),
    (dict(kind=wire.POOL, reserved=1), "reserved"),
    (dict(kind=wire.POOL, offset=8), "CUDA handle"),
    (dict(kind=wire.POOL, handle=b"x"), "CUDA handle"),
    (dict(kind=wire.POOL, size=65 << 20), "no_memory"),
    (dict(kind=wire.CUDA_IPC, base=100, handle=b"x" * 64),
     "unimplemented.*cuda back end|another device"),
])
def test_bad_region_add(client, change, expected):
    with pytest.raises(Failed, match=expected):
        client.region_add(**{"size": 100, **change})
    client.ping()


def test_wrong_number_of_descriptors(client):
    body = wire.REGION_ADD_BODY.pack(wire.MEMFD, 0, 4096, 0, 0, b"", b"")
    pool = wire.REGION_ADD_BODY.pack(wire.POOL, 0, 4096, 0, 0, b"", b"")
    fd = wire.memfd(4096)
    for kind, data, fds, expected in [
            (wire.REGION_ADD, body, [], "0 file descriptors; expected 1"),
            (wire.REGION_ADD, body, [fd, fd], "2 file descriptors; expected 1"),
            (wire.REGION_ADD, body, [fd] * 200, "200 file descriptors; expected 1"),
            (wire.REGION_ADD, pool, [fd], "1 file descriptors; expected 0"),
            (wire.PING, b"", [fd] * 3, "3 file descriptors; expected 0")]:
        with pytest.raises(Failed, match=expected):
            client.ask(kind, data, fds)
    os.close(fd)
    client.ping()


def test_region_quotas(client):
    memory = Memory(4096)
    regions = [client.region(memory) for _ in range(32)]
    with pytest.raises(Failed, match="too_large.*32 regions"):
        client.region(memory)
    for region in regions:
        client.drop(region)
    large = wire.memfd(1 << 30)  # sparse: never touched
    two = [client.region_add(wire.MEMFD, 1 << 30, [large]) for _ in range(2)]
    with pytest.raises(Failed, match="too_large.*all regions"):
        client.region(memory)
    with pytest.raises(Failed, match="too_large.*at most"):
        client.region_add(wire.MEMFD, (1 << 30) + 1, [large])
    for region in two:
        client.drop(region)
    os.close(large)
    wait_until(lambda: client.stats()["region_bytes"] == 0, what="the regions being released")
    client.drop(client.region(memory))
    memory.close()


def test_memfd_of_huge_pages(client):
    """Their pages can be taken away behind any seal."""
    try:
        fd = os.memfd_create("kld-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
        os.ftruncate(fd, 2 << 20)
    except OSError:
        pytest.skip("no huge pages on this machine")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(Failed, match="huge pages"):
        client.region_add(wire.MEMFD, 2 << 20, [fd])
    os.close(fd)
    client.ping()


def test_memfd_that_cannot_be_cut(client, case):
    with pytest.raises(OSError):
        os.ftruncate(case.memory.fd, 100)
    client.run(case.shape, case.tensors())


# ---- Bad operators ---------------------------------------------------------------------------------

BIG = 1 << 63


def bad_submits():
    def at(case, name="predictions", region=None, offset=None, **more):
        return tensor(case.region if region is None else region,
                      case.offsets[name] if offset is None else offset, **more)
    return {
        "divergence number": (lambda c: dict(divergence=99), "unknown divergence number 99; known: forward_kl"),
        "divergence of later": (lambda c: dict(divergence="js"), "unimplemented.*'js'.*forward_kl, reverse_kl"),
        "reduction number": (lambda c: dict(reduction=77), "unknown reduction number 77"),
        "form number": (lambda c: dict(predictions_form=3), "unknown form number"),
        "flags": (lambda c: dict(flags=1), "unknown flags 0x1"),
        "given bits": (lambda c: dict(given=1 << 20), "unknown parameter bits"),
        "temperature without logits": (lambda c: dict(temperature=2.0), "temperature is given but no tensor"),
        "temperature 0": (lambda c: dict(temperature=0.0, predictions_form="logits"), "temperature must be"),
        "scale nan": (lambda c: dict(scale=float("nan")), "scale must be a finite number"),
        "normalizer with sum": (lambda c: dict(reduction="sum", normalizer=3.0), "normalizer does not fit"),
        "beta": (lambda c: dict(beta=0.5), "beta does not fit"),
        "grad_output and no gradient": (lambda c: dict(grad_output=2.0, tensors=c.tensors("predictions", "targets")),
                                        "no gradient is asked for"),
        "rank 0": (lambda c: dict(rank=0), "rank must be 1 to 8, not 0"),
        "rank 9": (lambda c: dict(rank=9), "rank must be 1 to 8, not 9"),
        "a dimension of 0": (lambda c: dict(shape=(64, 0)), "dimension 1 of the shape is 0"),
        "shape overflows": (lambda c: dict(shape=(1 << 40, 1 << 40)), "too_large.*2\\^40"),
        "shape overflows to little": (lambda c: dict(shape=(BIG, 2, 1)), "too_large.*2\\^40"),
        "shape does not fit the bytes": (lambda c: dict(shape=(640, 100)), "predictions needs|overlaps"),
        "no predictions": (lambda c: dict(tensors=c.tensors("targets")), "'predictions' is missing"),
        "no targets": (lambda c: dict(tensors=c.tensors("predictions")), "'targets' is missing"),
        "dtype number": (lambda c: dict(targets=at(c, "targets", dtype=42)), "targets has dtype unknown"),
        "dtype of a mask": (lambda c: dict(targets=at(c, "targets", dtype="UINT8")), "targets has dtype UINT8"),
        "gradient of another dtype": (lambda c: dict(grad_predictions=at(c, "grad_predictions", dtype="FP16")),
                                      "grad_predictions has dtype FP16; expected FP32"),
        "region 0": (lambda c: dict(targets=at(c, "targets", region=0)), "targets: region 0"),
        "unknown region": (lambda c: dict(targets=at(c, "targets", region=1 << 40)), "not_found.*targets: no region"),
        "id that is a place only": (lambda c: dict(targets=at(c, "targets", region=c.region & 0xFFFFF or 1 << 20 | 7)),
                                    "not_found.*no region"),
        "tensor's reserved field": (lambda c: dict(targets=at(c, "targets", reserved=1)), "targets: reserved"),
        "offset beyond": (lambda c: dict(targets=at(c, "targets", offset=c.memory.size)), "targets needs"),
        "offset wraps": (lambda c: dict(targets=at(c, "targets", offset=(1 << 64) - 4)), "overflow 64 bits"),
        "misaligned": (lambda c: dict(targets=at(c, "targets", offset=c.offsets["targets"] - 25598)),
                       "offset 2 is not a multiple"),
        "stride too small": (lambda c: dict(targets=at(c, "targets", stride=396)), "row stride of 396 bytes"),
        "stride misaligned": (lambda c: dict(targets=at(c, "targets", stride=402)), "row stride of 402 bytes"),
        "stride wraps": (lambda c: dict(targets=at(c, "targets", stride=BIG)), "overflow 64 bits"),
        "outputs overlap": (lambda c: dict(row_loss=at(c, "grad_predictions", offset=c.offsets["grad_predictions"] + 8)),
                            "overlaps"),
        "gradient over targets": (lambda c: dict(grad_predictions=at(c, "targets")), "grad_predictions overlaps targets"),
        "gradient shifted": (lambda c: dict(grad_predictions=at(c, offset=4)), "overlaps predictions"),
        "stream": (lambda c: dict(stream=3), "stream 3; expected a number below 3"),
    }


@pytest.mark.parametrize("name", bad_submits())
def test_bad_submit(client, case, name):
    make, expected = bad_submits()[name]
    change = make(case)
    shape = change.pop("shape", case.shape)
    tensors = change.pop("tensors", case.tensors())
    for slot in wire.SLOTS:
        if isinstance(change.get(slot), tuple):
            tensors[slot] = change.pop(slot)
    before = case.memory.map[:]
    with pytest.raises(Failed, match=expected) as caught:
        client.run(shape, tensors, **change)
    assert not re.search(r"0x[0-9a-f]{8}|/", caught.value.text), "an address or a path in a reply"
    assert case.memory.map[:] == before
    client.ping()
    assert client.run(case.shape, case.tensors())["scalar"] == 1


@pytest.mark.parametrize("change, expected", [
    (dict(size=0), "COPY of 0 bytes"),
    (dict(size=1 << 40), "destination: .* do not fit"),
    (dict(to_offset=(1 << 64) - 8), "destination: .* do not fit"),
    (dict(source_offset=(1 << 64) - 8), "source: .* do not fit"),
    (dict(source_offset=8), "overlap"),
    (dict(to=1234567), "not_found.*destination: no region"),
    (dict(source=1234567), "not_found.*source: no region"),
    (dict(stream=3), "stream 3"),
    (dict(reserved=1), "reserved"),
])
def test_bad_copy(client, case, change, expected):
    arguments = dict(to=case.region, to_offset=0, source=case.region, source_offset=1024, size=256)
    with pytest.raises(Failed, match=expected):
        client.copy(**{**arguments, **change})
    client.copy(**arguments)


# ---- Bad frames ------------------------------------------------------------------------------------

@pytest.mark.parametrize("data, number, expected", [
    (b"x", 0, "frame of 1 bytes"),
    (b"x" * 15, 0, "frame of 15 bytes"),
    (b"", 0, "frame of 0 bytes"),
    (wire.frame(wire.PING, 5, version=2), 5, "version.*version 2; expected 1"),
    (wire.frame(wire.PING, 5, version=0), 5, "version 0; expected 1"),
    (wire.frame(0, 5), 5, "unknown frame type 0"),
    (wire.frame(63, 5), 5, "unknown frame type 63"),
    (wire.frame(65535, 5), 5, "unknown frame type 65535"),
    (wire.frame(wire.PONG, 5), 5, "PONG is not a frame that a client sends"),
    (wire.frame(wire.DONE, 5, b"\0" * 48), 5, "DONE is not a frame that a client sends"),
    (wire.frame(wire.PING, 5, b"\0" * 8), 5, "PING frame of 24 bytes"),
    (wire.frame(wire.PING, 5, length=17), 5, "whose length field says 17; expected 16"),
    (wire.frame(wire.SUBMIT, 5, b"\0" * 100), 5, "SUBMIT frame of 116 bytes.*expected 464"),
    (wire.frame(wire.SUBMIT, 5, b"\0" * 449), 5, "SUBMIT frame of 465 bytes"),
    (wire.frame(wire.SUBMIT, 5, b"\0" * 60000), 5, "SUBMIT frame"),
    (wire.frame(wire.PING, 0), 0, "request number 0"),
    (b"\xff" * 64, (1 << 64) - 1, "version 65535"),
])
def test_bad_frame(client, data, number, expected):
    client.send_raw(data)
    with pytest.raises(Failed, match=expected):
        client.reply(number)
    client.ping()


def test_garbage_packets(client):
    """Each gets exactly one answer, in order."""
    noise = random.Random(3)
    for _ in range(300):
        client.send_raw(noise.randbytes(noise.randrange(1, 600)))
        kind, _, body = client.receive()
        assert kind == wire.ERROR and wire.ERROR_BODY.unpack(body)[0] in (1, 18)
    client.ping()


def test_mutated_submits(client, case):
    """A right SUBMIT with a few bytes changed is answered, by DONE or ERROR, and nothing breaks."""
    noise = random.Random(4)
    body = wire.submit_body(case.shape, case.tensors())
    for _ in range(500):
        mutated = bytearray(body)
        for _ in range(noise.randrange(1, 4)):
            mutated[noise.randrange(4, len(mutated))] = noise.choice([0, 1, 2, 127, 128, 255])
        number = client.send(wire.SUBMIT, bytes(mutated))
        kind, request, _ = client.receive()
        assert request == number and kind in (wire.DONE, wire.ERROR)
    client.ping()


def test_first_frame_must_be_hello(path):
    with Client(path, hello=False) as one:
        for kind, body in [(wire.PING, b""), (wire.STATS, b""), (wire.CANCEL, b"\1" * 8),
                           (wire.SUBMIT, b"\0" * 448)]:
            with pytest.raises(Failed, match="before HELLO"):
                one.ask(kind, body)
        with pytest.raises(Failed, match="version: .*speaks versions 2 to 7; this server speaks 1"):
            one.hello(low=2, high=7)
        with pytest.raises(Failed, match="version"):
            one.hello(low=0, high=0)
        with pytest.raises(Failed, match="reserved"):
            one.hello(reserved=1)
        for name in (b"\x01", b"x" * 64, b"a\0b", "é".encode()):
            with pytest.raises(Failed, match="client_name must be printable ASCII"):
                one.hello(name=name)
        assert one.hello(low=0, high=9)["version"] == 1
        one.ping()
        with pytest.raises(Failed, match="HELLO came twice"):
            one.hello()
        one.ping()


# ---- Ends ------------------------------------------------------------------------------------------

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


def test_cancel(client, long_case):
    numbers = [long_submit(client, long_case) for _ in range(10)]
    client.cancel(numbers[-1])
    with pytest.raises(Failed, match="cancelled"):
        client.result(numbers[-1])
    with pytest.raises(Failed, match=f"not_found.*no request {numbers[-1]}"):
        client.cancel(numbers[-1])
    for number in numbers[:-1]:
        assert client.result(number)["loss"] == pytest.approx(0, abs=1e-6)
    with pytest.raises(Failed, match="not_found"):
        client.cancel(4711)


def test_deadline(client, long_case):
    numbers = [long_submit(client, long_case) for _ in range(8)]
    late = long_submit(client, long_case, timeout_ns=1_000_000)
    start = time.monotonic()
    with pytest.raises(Failed, match="deadline.*passed"):
        client.result(late)
    assert time.monotonic() - start < 5
    for number in numbers:
        client.result(number)
    assert client.result(long_submit(client, long_case, timeout_ns=60 * 10**9))["scalar"] == 1


def test_client_requests_max(client, long_case):
    numbers = [long_submit(client, long_case) for _ in range(16)]
    with pytest.raises(Failed, match="throttled.*16 requests of this connection"):
        client.result(long_submit(client, long_case))
    for number in numbers:
        client.result(number)


def test_request_number_in_flight(client, long_case):
    first = long_submit(client, long_case)
    client.send(wire.SUBMIT, wire.submit_body(LONG, {"predictions": tensor(long_case),
                                                    "targets": tensor(long_case)},
                                              predictions_form="logits", targets_form="logits"),
                request=first)
    answers = [client.receive() for _ in range(2)]
    assert sorted(kind for kind, _, _ in answers) == [wire.DONE, wire.ERROR]
    assert {number for _, number, _ in answers} == {first}


def test_client_that_dies_mid_request(path, client):
    """Its memory stays until the kernel is through, and is then given back."""
    for _ in range(3):
        other = Client(path)
        memory = Memory(4 * LONG[0] * LONG[1])
        region = other.region(memory)
        for _ in range(8):
            long_submit(other, region)
        other.close()
        memory.close()
        client.ping()
    wait_until(lambda: client.stats()["in_flight"] == 0 and client.stats()["regions"] == 0, 60,
               "the worker being done with dead clients")


def test_client_that_dies_while_adding(path):
    for _ in range(20):
        other = Client(path)
        memory = Memory(1 << 22)
        other.send(wire.REGION_ADD, wire.REGION_ADD_BODY.pack(wire.MEMFD, 0, 1 << 22, 0, 0, b"", b""),
                   [memory.fd])
        other.send(wire.REGION_ADD, wire.REGION_ADD_BODY.pack(wire.POOL, 0, 1 << 20, 0, 0, b"", b""))
        other.close()
        memory.close()


def resident_bytes(pid):
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_client_that_never_reads(worker_server, client):
    """It is not read from any more, holds up nobody, and costs no memory that grows."""
    pid = worker_server.child("worker")
    silent = Client(worker_server.unix)
    silent.socket.setblocking(False)
    before = resident_bytes(pid)
    sent = 0
    try:
        for _ in range(200000):
            silent.send(wire.PING)
            sent += 1
    except BlockingIOError:
        pass
    assert sent < 200000, "the worker kept reading"
    start = time.monotonic()
    for _ in range(20):
        client.ping()
    assert time.monotonic() - start < 5
    assert resident_bytes(pid) - before < 16 << 20
    # It reads after all: everything that was accepted is answered.
    silent.socket.settimeout(60)
    got = 0
    while got < sent:
        kind, _, _ = silent.receive()
        assert kind == wire.PONG
        got += 1
    silent.ping()
    silent.close()


def test_silent_client_with_requests_in_flight(worker_server):
    """Replies that the socket does not take wait in the session and arrive in full."""
    with Client(worker_server.unix) as one:
        case = Case(one, 4, 8)
        one.socket.setblocking(False)
        one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        sent = []
        try:
            for i in range(100000):
                sent.append(one.submit(case.shape, case.tensors()))
        except BlockingIOError:
            one.number -= 1
        one.socket.settimeout(60)
        answered = set()
        while len(answered) < len(sent):
            _, number, _ = one.receive()
            assert number not in answered
            answered.add(number)
        assert answered == set(sent)
        one.ping()
        case.close()


def test_too_many_clients(worker_server):
    clients = [Client(worker_server.unix) for _ in range(20)]
    refused = Client(worker_server.unix, hello=False)
    kind, number, body = refused.receive()
    status, _, text = wire.ERROR_BODY.unpack(body)
    assert kind == wire.ERROR and number == 0 and wire.STATUS[status] == "busy" and b"20 clients" in text
    with pytest.raises(Ended):
        refused.receive()
    refused.close()
    for one in clients:
        one.ping()
        one.close()
    wait_until(lambda: can_connect(worker_server.unix), what="a place being free")


def can_connect(path):
    try:
        with Client(path) as one:
            one.ping()
        return True
    except (Failed, Ended, AssertionError, OSError):
        return False


def test_connect_and_disconnect_1000_times(path):
    memory = Memory(1 << 16)
    for i in range(1000):
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        raw.connect(path)
        try:
            if i % 4 == 1:
                raw.send(wire.frame(wire.HELLO, 1, wire.HELLO_BODY.pack(1, 1, 0, b"short")))
            if i % 4 == 2:
                raw.send(b"nonsense")
            if i % 4 == 3:
                socket.send_fds(raw, [b"x" * 128], [memory.fd])
        except BrokenPipeError:
            pass  # refused: the clients before it have not all been noticed to be gone
        raw.close()
    memory.close()
    wait_until(lambda: can_connect(path), what="a place being free")


def test_half_closed_connection_ends(path):
    with Client(path) as one:
        one.socket.shutdown(socket.SHUT_WR)
        with pytest.raises(Ended):
            one.receive()


# ---- The server's own ends -------------------------------------------------------------------------

def test_term_answers_what_is_in_flight(make_server):
    server = make_server(http="", drain_ms=120000)
    one = Client(server.unix)
    memory = Memory(4 * LONG[0] * LONG[1])
    region = one.region(memory)
    numbers = [long_submit(one, region) for _ in range(6)]
    one.ping()
    server.process.send_signal(signal.SIGTERM)
    for number in numbers:
        assert one.result(number)["scalar"] == 1
    with pytest.raises(Ended):
        one.receive()
    assert server.process.wait(120) == 0
    memory.close()


def test_killed_worker_ends_connections_and_is_back(make_server):
    server = make_server(http="")
    one = Client(server.unix)
    server.kill_child("worker")
    with pytest.raises(Ended):
        one.receive()
    with Client(server.unix) as again:  # waits in the backlog
        assert again.welcome["epoch"] != one.welcome["epoch"]
        case = Case(again)
        assert again.run(case.shape, case.tensors())["loss"] == pytest.approx(
            forward_kl(case.q, case.p).mean(), rel=1e-6)
        case.close()


def test_only_allowed_users(make_server):
    if os.geteuid() != 0:
        pytest.skip("needs to change its user")
    server = make_server(http="", unix_mode=438, allow_uids="1234", allow_gids="77")
    os.chmod(server.folder, 0o755)

    def attempt(uid, gid, groups=()):
        """In a process of its own: "ok", or the status and text of the refusal."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setgroups(list(groups))
                os.setgid(gid)
                os.setuid(uid)
                try:
                    Client(server.unix).ping()
                    result = "ok"
                except Failed as refused:
                    result = str(refused)
                except Exception as problem:
                    result = repr(problem)
                os.write(writer, result.encode())
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader) as pipe:
            return pipe.read()

    assert attempt(1234, 1) == "ok"
    assert attempt(5, 77) == "ok"
    assert attempt(5, 1, groups=[2, 77]) == "ok"
    assert attempt(0, 0) == "ok"  # the server's own user
    refused = attempt(5, 1, groups=[2, 3])
    assert refused == "forbidden: this user may not connect to the server"
