"""GPU memory shared with a worker on the same card: handles, descriptors, owners that free and leave (those that die:
test_faults.py; the order of two processes' streams: test_gpu_order.py). On the CUDA back end only."""
import ctypes
import os
import struct
import threading
import time

import numpy as np
import pytest

import wire
from conftest import wait_until
from gpucase import (ROOM, SHAPE, TENSOR, Case, FenceStepper, HostCase, Stepper, case, client, gpu, leaks_nothing, memory,
                     resident_kb, server)
from unixlib import forward_kl, holdings
from wire import Client, Failed, description, tensor

FIXTURES = gpu, server, client, memory, case  # of the tests below


def one_file(first, second):
    """kcmp(KCMP_FILE), which some containers forbid: then nobody is told."""
    number = {"x86_64": 312, "aarch64": 272}[os.uname().machine]
    return ctypes.CDLL(None).syscall(number, os.getpid(), os.getpid(), 0, first, second) == 0


# ---- Memory ----------------------------------------------------------------------------------------

def test_loss_and_gradient_in_the_clients_own_memory(gpu, case):
    assert case.run() == pytest.approx(case.expected, rel=1e-6)
    truth = -case.p.astype(np.float64) / case.q / SHAPE[0]
    np.testing.assert_allclose(gpu.get(case.memory.at + 2 * TENSOR, SHAPE), truth, rtol=1e-6)


def test_mps_is_missed_once(gpu, server, case):
    case.run()
    assert server.log().count("no MPS") == (0 if gpu.mps else 1)


def test_one_allocation_is_opened_once_and_counted(gpu, server, case):
    """Regions of three connections over one allocation: any may go, the others compute."""
    loss = case.run()
    with Client(server.unix) as second, Client(server.unix) as third:
        regions = [(one, case.register(one)) for one in (second, third, second)]
        for one, region in regions:
            assert case.run(region, one) == loss
        case.client.drop(case.region)
        second.drop(regions[0][1])
        for one, region in regions[1:]:
            assert case.run(region, one) == loss
        third.drop(regions[1][1])
        assert case.run(regions[2][1], second) == loss
    case.region = case.register(case.client)  # all were gone: opened anew
    assert case.run() == loss


def test_memory_that_was_freed_and_given_again_is_not_mistaken(gpu, server, client):
    """The same address, other contents: what is registered again is read, not what is still open."""
    from gpulib import Allocation
    seen, kept = [], []
    for keep in (True, True, False, False):
        memory = Allocation(gpu, ROOM)
        case = Case(gpu, client, memory)
        assert case.run() == pytest.approx(case.expected, rel=1e-6)
        seen.append((memory.at, memory.handle))
        loss = case.run()
        memory.free()
        if keep:  # still open in the worker, and what its owner freed can still be read
            kept.append((case, loss))
        else:
            client.drop(case.region)
    for case, loss in kept:
        assert client.run(SHAPE, case.tensors(gradient=False))["loss"] == loss
        client.drop(case.region)
    assert len({handle for _, handle in seen}) == len(seen), "the driver gave one handle twice"
    assert len({at for at, _ in seen}) < len(seen), "no address came twice: this test showed nothing"


BAD_HANDLES = {
    "random": dict(handle=bytes(range(64))),
    "cut": dict(handle=b"\x01" * 20),
    "other device": dict(uuid=b"another device!!"),
    "longer": dict(base=ROOM + (2 << 20)),
}


@pytest.mark.parametrize("what", BAD_HANDLES)
def test_bad_handles_harm_nobody(server, case, what):
    worker = server.child("worker")
    with pytest.raises(Failed, match="invalid"):
        if what == "longer":
            case.client.region_add(wire.CUDA_IPC, ROOM + (2 << 20), offset=0, base=ROOM + (2 << 20),
                                   uuid=case.gpu.uuid, handle=case.memory.handle)
        else:
            case.register(case.client, **BAD_HANDLES[what])
    assert case.run() == pytest.approx(case.expected, rel=1e-6)
    assert server.child("worker") == worker


def test_a_handle_that_names_another_card(server, case):
    """The PCI address in it is of a card that the server's does not reach, whatever UUID comes along."""
    pid, size, card = (struct.unpack_from("<I", case.memory.handle, at)[0] for at in (8, 16, 32))
    if (pid, size) != (os.getpid(), ROOM):
        pytest.skip("this driver writes handles in another way")
    other = case.memory.handle[:32] + struct.pack("<I", card + 1) + case.memory.handle[36:]
    with pytest.raises(Failed, match="invalid: the memory behind the CUDA handle lies on another device"):
        case.register(case.client, handle=other)
    assert case.run(case.register(case.client)) == case.run()


def test_misaligned_tensors_are_an_error_and_no_fault(gpu, server, client, memory):
    case = Case(gpu, client, memory, base_offset=256)
    odd = client.region_add(wire.CUDA_IPC, ROOM - 257, offset=257, base=ROOM, uuid=gpu.uuid,
                            handle=memory.handle)
    with pytest.raises(Failed, match="invalid: predictions: its region does not begin at a multiple"):
        client.run(SHAPE, {"predictions": tensor(odd), "targets": tensor(case.region, TENSOR)})
    assert case.run() == pytest.approx(case.expected, rel=1e-6)


def test_allocations_by_descriptor(gpu, server, client, case):
    from gpulib import Mapped
    worker = server.child("worker")
    mapped = Mapped(gpu, ROOM)
    by_fd = Case(gpu, client, mapped)
    gpu.put(mapped.at, case.q)
    gpu.put(mapped.at + TENSOR, case.p)
    assert struct.pack("d", by_fd.run()) == struct.pack("d", case.run())
    np.testing.assert_array_equal(gpu.get(mapped.at + 2 * TENSOR, SHAPE),
                                  gpu.get(case.memory.at + 2 * TENSOR, SHAPE))
    part = client.region_add(wire.CUDA_FD, TENSOR, fds=[mapped.fd], offset=TENSOR, base=mapped.size,
                             uuid=gpu.uuid)
    assert client.run(SHAPE, {"predictions": tensor(by_fd.region), "targets": tensor(part)})["loss"] \
        == case.run()
    overlap = {"predictions": tensor(by_fd.region), "targets": tensor(part),
               "grad_predictions": tensor(by_fd.region, TENSOR + 4)}
    if one_file(mapped.fd, os.dup(mapped.fd)):  # one descriptor, sent twice, is one memory
        with pytest.raises(Failed, match="invalid: grad_predictions overlaps targets"):
            client.run(SHAPE, overlap)
    pipe = os.pipe()
    with open("/dev/null", "rb+") as null:
        for fd, base, said in ((null.fileno(), mapped.size, "invalid"),
                               (wire.memfd(4096), mapped.size, "invalid: the descriptor is not a CUDA"),
                               (pipe[0], mapped.size, "invalid: the descriptor is not a CUDA"),
                               (mapped.fd, mapped.size + mapped.unit, "invalid"),
                               (mapped.fd, mapped.size - 4096, "invalid: an allocation of")):
            with pytest.raises(Failed, match=said):
                client.region_add(wire.CUDA_FD, 4096, fds=[fd], base=base, uuid=gpu.uuid)
    loss = by_fd.run()
    mapped.free()  # the worker's mapping holds it
    assert client.run(SHAPE, by_fd.tensors(gradient=False))["loss"] == loss
    assert server.child("worker") == worker


class SideBySide:
    """Allocations of one size, which the worker has side by side and we do not."""

    def __init__(self, gpu, client, count):
        from gpulib import Mapped
        self.gpu, self.client = gpu, client
        self.pieces = [Mapped(gpu, ROOM) for _ in range(count)]
        self.size = self.pieces[0].size
        self.region = client.region_add(wire.CUDA_SPACE, (count + 1) * self.size, uuid=gpu.uuid)

    def grow(self):
        for number, piece in enumerate(self.pieces):
            assert self.client.region_grow(self.region, number * self.size, self.size,
                                           piece.fd) == (number + 1) * self.size

    def parts(self, offset, size):
        """-> where in the array, where for us, how many bytes"""
        done = 0
        while done < size:
            piece, at = divmod(offset + done, self.size)
            count = min(size - done, self.size - at)
            yield done, self.pieces[piece].at + at, count
            done += count

    def put(self, offset, array):
        flat = np.frombuffer(array.tobytes(), "u1")
        for done, at, count in self.parts(offset, flat.size):
            self.gpu.put(at, flat[done:done + count])

    def get(self, offset):
        return np.concatenate([self.gpu.get(at, count, "u1") for _, at, count in
                               self.parts(offset, TENSOR)]).view("<f4").reshape(SHAPE)

    def free(self):
        for piece in self.pieces:
            piece.free()


def test_allocations_side_by_side(gpu, server, client, case):
    """Tensors that begin in one allocation and end in the next are read and written where they are."""
    worker, loss = server.child("worker"), case.run()
    free = gpu.free_bytes()
    space = SideBySide(gpu, client, 3)
    at = {"predictions": space.size - TENSOR // 2, "targets": 2 * space.size - TENSOR // 2,
          "grad_predictions": space.size + TENSOR}
    tensors = {name: tensor(space.region, offset) for name, offset in at.items()}
    with pytest.raises(Failed, match="invalid: .*0 bytes"):  # nothing is there yet
        client.run(SHAPE, tensors)
    space.grow()
    space.put(at["predictions"], case.q)
    space.put(at["targets"], case.p)
    assert struct.pack("d", client.run(SHAPE, tensors)["loss"]) == struct.pack("d", loss)
    np.testing.assert_array_equal(space.get(at["grad_predictions"]), gpu.get(case.memory.at + 2 * TENSOR, SHAPE))
    # The last byte of the last one is the last that there is; what is read around a tensor lies before it.
    end = 3 * space.size - TENSOR
    for before in (0, 4):
        space.put(end - before, case.q)
        assert abs(client.run(SHAPE, {"predictions": tensor(space.region, end - before),
                                      "targets": tensors["targets"]})["loss"] / loss - 1) < 1e-6
    client.run(SHAPE, {**tensors, "grad_predictions": tensor(space.region, end)})
    with pytest.raises(Failed, match=f"invalid: .*{3 * space.size} bytes"):
        client.run(SHAPE, {**tensors, "grad_predictions": tensor(space.region, end + 4)})
    with pytest.raises(Failed, match="invalid"):
        client.region_grow(space.region, 3 * space.size, 2 * space.size, space.pieces[0].fd)
    space.free()  # the worker's mapping holds them
    assert client.run(SHAPE, {name: tensors[name] for name in ("predictions", "targets")})["loss"] == loss
    client.drop(space.region)
    wait_until(lambda: gpu.free_bytes() >= free, what="that the device has its memory back")
    assert server.child("worker") == worker


def test_a_client_with_allocations_side_by_side_leaves(gpu, server):
    worker, free = server.child("worker"), gpu.free_bytes()
    for _ in range(20):
        with Client(server.unix) as one:
            space = SideBySide(gpu, one, 8)
            space.grow()
        space.free()
    wait_until(lambda: gpu.free_bytes() >= free, what="that the device has its memory back")
    assert server.child("worker") == worker


@pytest.mark.parametrize("kind", ["handle", "descriptor"])
def test_register_and_drop_leak_nothing(gpu, server, client, memory, kind):
    """Under MPS: test_faults.py."""
    from gpulib import Mapped
    case = Case(gpu, client, memory if kind == "handle" else Mapped(gpu, ROOM))
    case.run()
    leaks_nothing(case, server.child("worker"))
    if kind == "descriptor":
        case.memory.free()


def test_a_burst_leaves_the_card_to_others(gpu, make_server):
    """12 clients at once take 192 MiB of staging each. A second after the last of them what is kept for the next such job
    (576 MiB), and what a pool keeps (512 MiB), is all that is gone."""
    server = make_server(pool_bytes_max="6G")
    hosts = [HostCase(Client(server.unix), (16, 1 << 20)) for _ in range(12)]
    hosts[0].run()
    before, least = gpu.free_bytes(), []
    for _ in range(4):
        threads = [threading.Thread(target=host.run) for host in hosts]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            least.append(gpu.free_bytes())
            time.sleep(0.001)
        for host in hosts:
            host.restore()
    assert before - min(least) > 1300 << 20, "they did not come at once"
    wait_until(lambda: before - gpu.free_bytes() < 1200 << 20, what="the pool to be trimmed")
    hosts[0].run()


def test_a_warm_worker_allocates_nothing(gpu, make_server, memory):
    """7,500 requests of every kind: in place, with events, with a fence and EARLY, from host memory, copies. Nothing is taken
    from the pool meanwhile; device memory that is free, the worker's mappings and descriptors are the same before
    and behind them, to the byte."""
    server = make_server(pool_bytes_max="1G")  # with /metrics
    client = Client(server.unix)
    worker, stepper, case = server.child("worker"), Stepper(gpu, client), Case(gpu, client, memory)
    fenced = FenceStepper(gpu, client, stream=1)
    host = HostCase(client, SHAPE)
    copy = {"source": case.region, "source_offset": 0, "size": TENSOR}
    loss = case.run()

    def work(count):
        for _ in range(count):
            assert case.run() == loss
            stepper.step(case)
            fenced.step(case)
            host.run()
            client.copy(host.region, 0, **copy)
            host.restore()
        gpu.finish(stepper.stream)
        gpu.finish(fenced.stream)

    def state():
        maps = len(open(f"/proc/{worker}/maps").readlines())
        return gpu.free_bytes(), holdings(worker), maps, server.metrics()['kld_pool_allocations_total{worker="0"}']

    work(300)
    before, resident = state(), resident_kb(worker)
    work(1500)
    assert state() == before
    assert resident_kb(worker) - resident <= 1 << 10  # KiB: 175 bytes a request; on the CPU 0 were measured
    host.memory.close()
    fenced.close()
    client.close()


# ---- Owners and what becomes of them ---------------------------------------------------------------

def test_published_gpu_memory(gpu, server, case):
    case.client.publish("gpu/targets", case.region, description(SHAPE, form="probs"), TENSOR)
    with Client(server.unix) as student:
        from gpulib import Allocation
        own = Case(gpu, student, Allocation(gpu, ROOM))
        attached, size, _ = student.attach("gpu/targets")
        assert size == TENSOR
        loss = student.run(SHAPE, {"predictions": tensor(own.region), "targets": tensor(attached)})["loss"]
        assert loss == pytest.approx(forward_kl(own.q, case.p).mean(), rel=1e-6)
        case.client.drop(case.region)
        with pytest.raises(Failed, match="gone"):
            student.run(SHAPE, {"predictions": tensor(own.region), "targets": tensor(attached)})
        own.memory.free()
    case.region = case.register(case.client)