"""What the worker refuses, frame by frame. Each time: a clear error, the connection answers PING, and
the worker holds no descriptor and no mapping more than before."""
import fcntl
import os
import random
import re
import signal
import socket
import struct
import time

import pytest

import wire
from conftest import suspend, wait_until
from unixlib import case, client, no_leak, path, worker_server  # noqa: F401
from wire import Client, Failed, Memory, tensor


# ---- Regions ---------------------------------------------------------------------------------------

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
    (dict(kind=wire.POOL, size=65 << 20), "too_large.*the device's pool"),
    (dict(kind=wire.CUDA_IPC, base=100, handle=b"x" * 64),
     "unimplemented.*cuda back end|another device"),
    (dict(kind=wire.CUDA_SPACE), "unimplemented.*cuda back end|another device"),
    (dict(kind=wire.CUDA_SPACE, base=100), "base_bytes is not 0"),
    (dict(kind=wire.CUDA_SPACE, size=0), "0 bytes"),
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
            (wire.REGION_GROW, wire.REGION_GROW_BODY.pack(1, 0, 4096), [], "0 file descriptors; expected 1"),
            (wire.REGION_GROW, wire.REGION_GROW_BODY.pack(1, 0, 4096), [fd], "no region 1"),
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
    wait_until(lambda: client.stats()["region_bytes"] == 0, what="the regions being released")
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


# ---- Bad operators ---------------------------------------------------------------------------------

BIG = 1 << 63


def bad_submits():
    def at(case, name="predictions", region=None, offset=None, **more):
        return tensor(case.region if region is None else region,
                      case.offsets[name] if offset is None else offset, **more)
    return {
        "divergence number": (lambda c: dict(divergence=99), "unknown divergence number 99; known: forward_kl"),
        "beta of js": (lambda c: dict(divergence="js", beta=1.5), r"beta must be in \[0, 1\], not 1.5"),
        "no skew": (lambda c: dict(divergence="skew_kl"), "needs the parameter skew"),
        "skew 1": (lambda c: dict(divergence="skew_reverse_kl", skew=1.0), r"skew must be in \[0, 1\)"),
        "no weight": (lambda c: dict(divergence="mixed_kl"), "needs the parameter weight"),
        "weight of tv": (lambda c: dict(divergence="tv", weight=0.5), "weight does not fit divergence 'tv'"),
        "reduction number": (lambda c: dict(reduction=77), "unknown reduction number 77"),
        "form number": (lambda c: dict(predictions_form=3), "unknown form number"),
        "flags": (lambda c: dict(flags=2), "unknown flags 0x2"),
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
    (wire.frame(wire.PING, 5, b"\0" * 8), 5, "version: PING frame of 24 bytes; expected 16"),
    (wire.frame(wire.ATTACH, 5, b"t".ljust(64, b"\0")), 5, "version: ATTACH frame of 80 bytes; expected 88.*releases"),
    (wire.frame(wire.PING, 5, length=17), 5, "whose length field says 17; expected 16"),
    (wire.frame(wire.SUBMIT, 5, b"\0" * 100), 5, "SUBMIT frame of 116 bytes.*expected 480"),
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
                           (wire.SUBMIT, b"\0" * 464)]:
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


# ---- Descriptors -----------------------------------------------------------------------------------

def lingering():
    """A TCP socket whose last close waits for an hour for a peer who does not read, and that peer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
    sender.setblocking(False)
    try:
        while True:
            sender.send(bytes(65536))
    except BlockingIOError:
        pass
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    return sender, peer


def test_descriptors_that_do_not_close(make_server):
    """More of them than the worker's pool has threads, each hidden in the queue of another socket and sent by who
    leaves, behind as much as the worker reads at a time. Both fronts serve, and the server ends when it is told."""
    server = make_server(drain_ms=60000)
    worker, peers = server.child("worker"), []
    suspend(worker)  # so that each last close is the worker's
    for _ in range(6):
        sender, peer = lingering()
        peers.append(peer)
        here, there = socket.socketpair()
        socket.send_fds(there, [b"x"], [sender.fileno()])
        bad = Client(server.unix, hello=False)
        for _ in range(20):
            bad.send(wire.PING)
        bad.send(wire.PING, fds=[here.fileno()])
        for one in (sender, there, here, bad):
            one.close()
    os.kill(worker, signal.SIGCONT)
    with Client(server.unix) as good:
        region = good.region(Memory(4096))
        good.run((2, 4), {"predictions": tensor(region), "targets": tensor(region, 64)})
    status, _ = server.json("/v2/models/kl_div/infer", {"inputs": [
        {"name": name, "datatype": "FP32", "shape": [1, 2], "data": [0.5, 0.5]}
        for name in ("predictions", "targets")]})
    assert status == 200
    started = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - started < 30
    for peer in peers:
        peer.close()


# ---- The log ---------------------------------------------------------------------------------------

def test_refusals_do_not_fill_the_log(make_server):
    """Those of requests, and of connections: 50 lines a second at most, the rest is counted."""
    server = make_server(log_format="json", http="", clients_max=1)
    count = 2000

    def lines(event):
        return [line for line in server.log_lines() if line["event"] == event]

    started = time.monotonic()
    with Client(server.unix) as client:
        for _ in range(count):
            with pytest.raises(Failed, match="not_found"):
                client.result(client.submit((2, 4), {"predictions": tensor(99), "targets": tensor(98)}))
        for _ in range(100):
            with pytest.raises((Failed, wire.Ended, OSError)):
                Client(server.unix)
    written_in = time.monotonic() - started
    wait_until(lambda: sum(line["requests"] for line in lines("lines left out")) + len(lines("refused"))
               + len(lines("client refused")) == count + 100, what="all lines to be told or counted")
    assert 50 <= len(lines("refused")) + len(lines("client refused")) <= 50 * (written_in + 2)
