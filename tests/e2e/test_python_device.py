"""How the Python package keeps GPU memory, over a driver and a libkld that only write down what they are asked: what is
registered and let go of when, copies through a buffer, events in turns. And its one kernel is PTX that assembles. Needs
no GPU; what the real ones do is in test_python_cuda.py."""
import ctypes
import shutil
import subprocess
import types
import warnings

import pytest

from pythonlib import import_kld

kld = import_kld()
from kld import _arrays, _cuda, _device, _library, _ptx, _request  # noqa: E402
from test_python_interface import Foreign  # noqa: E402

MB = 1 << 20


class Driver:
    """Allocations: address -> Allocation; pieces side by side have one base."""

    def __init__(self):
        self.memory, self.library = [], types.SimpleNamespace(cuMemFree_v2=lambda at: 0)
        self.identity = 0
        self.exportable, self.old_server = True, False

    def add(self, at, size, handle=True, reserved=None):
        self.identity += 1
        base, whole = reserved or (at, size)
        self.memory.append((at, size, _cuda.Allocation(0, base, whole, self.identity, handle)))

    def remove(self, at):
        self.memory = [one for one in self.memory if one[0] != at]

    def look_up(self, address):
        return next((found for at, size, found in self.memory if at <= address < at + size), None)

    piece_of = _cuda.Driver.piece_of

    def are(self, addresses, identities):
        found = [self.look_up(at) for at in addresses]
        return [one and one.identity for one in found] == list(identities)

    def handle_of(self, base):
        return b"h" * 64

    def descriptor_of(self, address):
        if not self.exportable:
            raise kld.KldError(kld.Status.INTERNAL, "no handle")
        return ctypes.CDLL(None).dup(0)


class Gpu:
    ordinal, uuid = 0, b"u" * 16

    def __init__(self, driver):
        self.driver, self.said, self.next = driver, [], 1 << 40

    def __getattr__(self, name):
        return lambda *arguments: self.said.append((name, *arguments))

    def current(self):
        return _device_nothing()

    def is_captured(self, stream):
        return stream == 99

    def has_passed(self, event):
        return True

    def event(self):
        return ctypes.c_void_p(1), b"e" * 64

    def allocate(self, size):
        self.next += 1 << 32
        self.driver.add(self.next, size)
        return self.next


class _device_nothing:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


@pytest.fixture
def world(monkeypatch):
    """-> devices, driver, gpu, calls of libkld"""
    driver, calls = Driver(), []
    gpu = Gpu(driver)
    monkeypatch.setenv("KLD_DONE", "event")

    def call(name, *arguments):
        calls.append((name, *arguments))
        if name == "kld_info":
            arguments[-1]._obj.backend, arguments[-1]._obj.streams_max = b"cuda", 4
        elif name == "kld_region_reserve_cuda" and driver.old_server:
            raise kld.KldUnsupportedError(kld.Status.UNIMPLEMENTED, "no regions in pieces")
        elif name.startswith("kld_region_import") or name == "kld_region_reserve_cuda":
            arguments[-1]._obj.value = len(calls)

    library = types.SimpleNamespace(kld_region_drop=lambda region: calls.append(("drop", region.value)),
                                    kld_event_drop=lambda event: calls.append(("event drop",)))
    monkeypatch.setattr(_cuda, "driver", lambda: driver)
    monkeypatch.setattr(_cuda, "gpu", lambda ordinal: gpu)
    monkeypatch.setattr(_library, "call", call)
    monkeypatch.setattr(_library, "library", lambda: library)
    connection = types.SimpleNamespace(url="unix:/nowhere", _handle=ctypes.c_void_p(1))
    return _device.Devices(connection), driver, gpu, calls


def names(calls):
    return [one[0] for one in calls]


def test_an_allocation_is_registered_once_and_let_go_of(world):
    devices, driver, _, calls = world
    driver.add(1000 * MB, 20 * MB)
    first = devices.region_of(1000 * MB + 512, MB)
    assert first[1] == 512 and names(calls) == ["kld_region_import_cuda_ipc"]
    assert calls[0][4:6] == (20 * MB, 0)  # all of it
    assert devices.region_of(1019 * MB, MB) == (first[0], 19 * MB) and len(calls) == 1
    assert devices.region_of(1019 * MB, 2 * MB) is None  # beyond its end
    assert devices.counts() == (1, 20 * MB)
    driver.remove(1000 * MB)
    driver.add(1000 * MB, 40 * MB)  # another one at the same address
    again = devices.region_of(1000 * MB, 30 * MB)
    assert again[0] is not first[0] and names(calls)[1:] == ["drop", "kld_region_import_cuda_ipc"]
    driver.remove(1000 * MB)
    devices._sweep()
    assert devices.counts() == (0, 0) and names(calls)[-1] == "drop"
    with pytest.raises(ValueError, match="not in its memory"):
        devices.region_of(1000 * MB, MB)


RESERVED = 4000 * MB, 1000 * MB


def add_pieces(driver, numbers):
    """Of 20 MiB, side by side from 4000 MiB on."""
    for number in numbers:
        driver.add((4000 + 20 * number) * MB, 20 * MB, handle=False, reserved=RESERVED)


def test_a_tensor_across_pieces_lies_in_one_region(world):
    devices, driver, _, calls = world
    add_pieces(driver, range(10))
    region, offset = devices.region_of(4045 * MB, 30 * MB)  # pieces 2 and 3
    assert offset == 5 * MB and names(calls) == ["kld_region_reserve_cuda"] + ["kld_region_grow_cuda_fd"] * 2
    assert calls[0][3] == 80 * MB and [one[3] for one in calls[1:]] == [20 * MB] * 2
    assert calls[1][1] is region and devices.counts() == (1, 40 * MB)
    assert devices.region_of(4040 * MB, 40 * MB) == (region, 0) and len(calls) == 3
    assert devices.region_of(4079 * MB, 2 * MB) == (region, 39 * MB)  # grows by the fourth
    assert names(calls)[3:] == ["kld_region_grow_cuda_fd"] and devices.counts() == (1, 60 * MB)
    other, offset = devices.region_of(4079 * MB, 60 * MB)  # beyond its addresses: one of its own, of 3 to 6
    assert offset == 19 * MB and other is not region and devices.counts() == (2, 140 * MB)
    assert names(calls)[4:] == ["kld_region_reserve_cuda"] + ["kld_region_grow_cuda_fd"] * 4
    assert devices.region_of(4045 * MB, 30 * MB) == (region, 5 * MB)
    assert devices.region_of(4100 * MB, 30 * MB) == (other, 40 * MB) and len(calls) == 9
    assert not devices._pinned and names(calls).count("drop") == 0


def test_a_tensor_where_another_was(world, monkeypatch):
    """One in an allocation is asked for by its identity; pieces that are read, when the request is on its way, and before it
    where they are written."""
    devices, driver, _, calls = world
    driver.add(1000 * MB, 20 * MB)
    add_pieces(driver, range(6))
    looked, asked = [], []
    look_up, are = driver.look_up, Driver.are
    monkeypatch.setattr(driver, "look_up", lambda address: looked.append(address) or look_up(address))
    monkeypatch.setattr(driver, "are", lambda addresses, identities: asked.append(list(addresses))
                        or are(types.SimpleNamespace(look_up=look_up), addresses, identities))
    whole, pieces = (1001 * MB, MB), (4010 * MB, 40 * MB)
    for address, size in (whole, pieces):
        found = devices.find_again(address, size, False)
        assert (found.region, found.offset) == devices.region_of(address, size) and found.is_in_pieces == (size > MB)
    before = len(calls)
    looked.clear(), asked.clear()
    devices._request += 1
    places = [devices.find_again(*whole, False), devices.find_again(*pieces, False)]
    assert not looked and asked == [[1001 * MB]]
    assert [place.owner.used for place in places] == [devices._request] * 2  # no other tensor takes its room
    assert devices.are_there(places) and asked[1:] == [[4000 * MB, 4020 * MB, 4040 * MB]]
    assert devices.find_again(*pieces, True).region is places[1].region and len(asked) == 3 and len(calls) == before

    # Another allocation there: registered before anything is sent.
    driver.remove(1000 * MB)
    driver.add(1000 * MB, 20 * MB)
    devices._request += 1
    assert devices.find_again(*whole, False).region is not places[0].region
    # A piece that is another one: found out of what is read once the request was sent, and of what is written at once.
    fresh = None
    for written in (False, True):
        driver.remove(4020 * MB)
        add_pieces(driver, [1])
        devices._request += 1
        stale = devices.find_again(*pieces, written)
        if written:
            assert stale.region is not fresh.region
        else:
            assert stale.region is places[1].region and not devices.are_there([stale])
            fresh = devices.find_again(*pieces, written)
            assert fresh.region is not stale.region
        assert devices.are_there([devices.find_again(*pieces, written)])
    # What was let go of is not found any more, whoever did it.
    devices._request += 1
    region = devices.find_again(*pieces, False).region
    devices._request += 1
    assert devices._spaces.forget_idle(devices._request, {}) and ("drop", region.value) in calls
    assert devices.find_again(*pieces, False).region is not region


def test_places_are_bounded(world):
    devices, driver, _, calls = world
    driver.add(1000 * MB, 20 * MB)
    for number in range(3 * _device.PLACES_MAX):
        assert devices.find_again(1000 * MB + 512 * number, 4, True).offset == 512 * number
        assert len(devices._places) <= _device.PLACES_MAX
    assert names(calls) == ["kld_region_import_cuda_ipc"]


def test_pieces_that_were_replaced(world):
    """Whichever under a tensor is another one, its region is no longer used; what is in use stays until it is not."""
    devices, driver, gpu, calls = world
    add_pieces(driver, range(6))
    region, _ = devices.region_of(4000 * MB, 120 * MB)
    for replaced in range(6):
        driver.remove((4000 + 20 * replaced) * MB)
        add_pieces(driver, [replaced])
        devices._request += 1
        fresh, offset = devices.region_of(4000 * MB, 120 * MB)
        assert offset == 0 and fresh is not region and ("drop", region.value) in calls
        assert devices.counts() == (1, 120 * MB)
        region = fresh
    # One that another tensor of the same request lies in is not dropped under it.
    devices._request += 1
    assert devices.region_of(4000 * MB, 20 * MB) == (region, 0)
    driver.remove(4100 * MB)
    add_pieces(driver, [5])
    fresh, _ = devices.region_of(4070 * MB, 50 * MB)
    devices._sweep()
    assert fresh is not region and ("drop", region.value) not in calls and devices.counts()[0] == 2
    devices._request += 1
    devices._sweep()
    assert ("drop", region.value) in calls and devices.counts() == (1, 60 * MB)
    # Nor one with published tensors, until the last of them is taken off its name.
    for published in "ab":
        devices.pin(fresh, published)
    driver.remove(4100 * MB)
    devices._request += 1
    devices._sweep()
    assert ("drop", fresh.value) not in calls
    assert devices.region_of(4060 * MB, 20 * MB)[0] is not fresh
    for published in "ab":
        assert ("drop", fresh.value) not in calls
        devices.let_go(published)
        devices._request += 1
        devices._sweep()
    assert ("drop", fresh.value) in calls and not devices._pinned


def test_a_gap_is_not_grown_over(world):
    devices, driver, _, calls = world
    add_pieces(driver, [0, 1, 3, 4])
    first, _ = devices.region_of(4000 * MB, 40 * MB)
    assert devices.region_of(4065 * MB, 35 * MB)[0] is not first and devices.counts() == (2, 80 * MB)
    assert devices.region_of(4030 * MB, 35 * MB) is None  # no tensor lies there


def test_a_client_whose_addresses_run_out(world, monkeypatch):
    """As many as a tensor needs, and in the place of what is idle."""
    devices, driver, gpu, calls = world
    add_pieces(driver, range(10))
    real, most = _library.call, 70 * MB

    def call(name, *arguments):
        dropped = {one[1] for one in calls if one[0] == "drop"}
        held = sum(one[3] for one in calls if one[0] == "kld_region_reserve_cuda" and one[-1]._obj.value not in dropped)
        if name == "kld_region_reserve_cuda" and held + arguments[2] > most:
            raise kld.KldValueError(kld.Status.TOO_LARGE, "all regions of this connection would have over")
        real(name, *arguments)
    monkeypatch.setattr(_library, "call", call)
    region, _ = devices.region_of(4000 * MB, 60 * MB)
    assert [one[3] for one in calls if one[0] == "kld_region_reserve_cuda"] == [60 * MB]
    devices._request += 1
    other, _ = devices.region_of(4100 * MB, 30 * MB)
    assert ("drop", region.value) in calls and devices.counts() == (1, 40 * MB)
    with pytest.raises(ValueError, match="all regions"):  # both are needed
        devices.region_of(4000 * MB, 60 * MB)
    assert ("drop", other.value) not in calls


@pytest.mark.parametrize("status", ["NO_MEMORY", "INVALID"])
def test_a_piece_that_is_not_taken(world, monkeypatch, status):
    """Where there is no room for it, the tensor is copied; else the caller is told. Nothing stays behind."""
    devices, driver, gpu, calls = world
    add_pieces(driver, range(3))
    real = _library.call

    def call(name, *arguments):
        if name == "kld_region_grow_cuda_fd" and names(calls).count(name) % 2:
            calls.append((name,))
            raise kld.KldError(kld.Status[status], "refused")
        real(name, *arguments)
    monkeypatch.setattr(_library, "call", call)
    if status == "INVALID":
        with pytest.raises(kld.KldError, match="refused"):
            devices.region_of(4000 * MB, 60 * MB)
    else:
        assert devices.region_of(4000 * MB, 60 * MB) is None
    made = [one[-1]._obj.value for one in calls if one[0] == "kld_region_reserve_cuda"]
    assert [("drop", one) for one in made] == [one for one in calls if one[0] == "drop"] and len(made) == 1
    assert devices._spaces.counts() == (0, 0)


@pytest.mark.parametrize("status", ["NO_MEMORY", "TOO_LARGE", "UNAVAILABLE"])
def test_a_space_that_does_not_grow(world, monkeypatch, status):
    """Where a piece was refused, what it has is good all the same; where nobody knows, it is let go of."""
    devices, driver, gpu, calls = world
    add_pieces(driver, range(4))
    real = _library.call
    region, _ = devices.region_of(4000 * MB, 40 * MB)
    refused = [kld.Status[status]]

    def call(name, *arguments):
        if name == "kld_region_grow_cuda_fd" and arguments[0] is region and refused:
            raise kld.KldError(refused[0], "refused")
        real(name, *arguments)
    monkeypatch.setattr(_library, "call", call)
    if status == "UNAVAILABLE":
        with pytest.raises(kld.KldError, match="refused"):
            devices.region_of(4030 * MB, 30 * MB)
        assert devices.region_of(4000 * MB, 20 * MB)[0] is not region
        return
    other, offset = devices.region_of(4030 * MB, 30 * MB)
    assert other is not region and offset == 10 * MB
    assert devices.region_of(4000 * MB, 40 * MB) == (region, 0)
    refused.clear()
    assert devices.region_of(4000 * MB, 80 * MB) == (region, 0) and ("drop", region.value) not in calls


def test_descriptors_run_out(world, monkeypatch):
    """What is idle makes room; without such, the tensor is copied."""
    devices, driver, gpu, calls = world
    add_pieces(driver, range(8))
    real, held = _library.call, {}

    def call(name, *arguments):
        if name == "kld_region_grow_cuda_fd":
            dropped = {one[1] for one in calls if one[0] == "drop"}
            if sum(count for one, count in held.items() if one not in dropped) >= 4:
                raise kld.KldError(kld.Status.NO_MEMORY, "no descriptors")
            held[arguments[0].value] = held.get(arguments[0].value, 0) + 1
        real(name, *arguments)
    monkeypatch.setattr(_library, "call", call)
    first, _ = devices.region_of(4000 * MB, 80 * MB)
    devices._request += 1
    second, _ = devices.region_of(4080 * MB, 60 * MB)
    assert second and ("drop", first.value) in calls
    devices._request += 1
    driver.add(9000 * MB, 20 * MB)
    other = devices.region_of(9000 * MB, MB)
    devices._request += 1
    for _ in range(3):  # five are too many in any case: asked for once, in the place of what is idle
        assert devices.region_of(4000 * MB, 100 * MB) is None
        devices._request += 1
    grown = [one for one in names(calls) if one == "kld_region_reserve_cuda"]
    assert len(grown) == 5 and ("drop", second.value) in calls
    assert devices.region_of(9000 * MB, MB) == other
    assert devices.region_of(4000 * MB, 60 * MB)[1] == 0


def test_who_was_published_is_forgotten_with_its_memory(world):
    devices, driver, gpu, calls = world
    driver.add(1000 * MB, 20 * MB)
    devices.pin(devices.region_of(1000 * MB, MB)[0], None)
    assert devices._pinned
    driver.remove(1000 * MB)
    devices._sweep()
    assert "drop" in names(calls) and not devices._pinned


def test_pieces_where_the_server_takes_single_ones(world):
    devices, driver, _, calls = world
    driver.old_server = True
    reserved = 4000 * MB, 1000 * MB
    for number in range(3):
        driver.add(4000 * MB + 20 * number * MB, 20 * MB, handle=False, reserved=reserved)
    region, offset = devices.region_of(4027 * MB, 5 * MB)
    assert names(calls) == ["kld_region_reserve_cuda", "kld_region_import_cuda_fd"]  # asked once
    calls.pop(0)
    assert offset == 7 * MB and calls[0][4] == 20 * MB
    assert devices.region_of(4021 * MB, MB) == (region, MB) and len(calls) == 1
    assert devices.region_of(4010 * MB, 20 * MB) is None and len(calls) == 1  # across two: none is registered
    assert devices.region_of(4059 * MB, MB)[1] == 19 * MB
    driver.exportable = False  # cudaMallocAsync
    driver.add(9000 * MB, 20 * MB, handle=False)
    assert devices.region_of(9000 * MB, MB) is None
    assert devices.counts() == (2, 40 * MB)


def test_a_server_that_takes_no_more_regions(world, monkeypatch):
    """Those that this request does not use make room."""
    devices, driver, gpu, calls = world
    real, most = _library.call, 3

    def call(name, *arguments):
        held = names(calls).count("kld_region_import_cuda_ipc") - names(calls).count("drop")
        if name == "kld_region_import_cuda_ipc" and held >= most:
            raise kld.KldValueError(kld.Status.TOO_LARGE, "the server allows 3 regions on one connection")
        real(name, *arguments)
    monkeypatch.setattr(_library, "call", call)
    for number in range(10):
        driver.add(number * 100 * MB, 20 * MB)
    for number in range(0, 10, 2):
        made = request(devices, gpu)
        pair = [devices.region_of(at * 100 * MB, MB) for at in (number, number + 1)]
        assert all(pair)
        devices.run(made, made.where)
        assert devices.counts()[0] <= most
        if number == 0:
            devices.pin(pair[0][0], None)  # published
    assert devices.region_of(0, MB) and names(calls).count("kld_region_import_cuda_ipc") == 10
    with pytest.raises(ValueError, match="allows 3 regions"):
        for number in range(4):
            devices.region_of(number * 100 * MB, MB)


def request(devices, gpu, stream=0, early=True):
    call = types.SimpleNamespace(where=_device.Where(gpu, stream, early), bounced=[], copied_bytes=0, in_place=False,
                                 request=_library.Request(), submitted=0, has_gaps=lambda slot: False,
                                 result=_library.Result(fence_number=7))

    def submit():
        call.submitted += 1
    call.submit = submit
    return call


def view(address, size):
    return _request.View(address, "float32", (1, size // 4), None, None, None, 0)


def test_what_has_no_handle_goes_through_a_buffer(world):
    devices, driver, gpu, calls = world
    driver.add(500 * MB, 64 * MB, handle=False, reserved=(0, 1 << 40))
    driver.add(564 * MB, 64 * MB, handle=False, reserved=(0, 1 << 40))
    driver.exportable = False
    warned = []
    for _ in range(2):
        call = request(devices, gpu)
        for slot in ("predictions", "grad_predictions"):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                region, offset = devices.place(call, slot, view(560 * MB, 16 * MB), 16 * MB)
            warned += [str(one.message) for one in said]
            assert offset == 0 and region
        devices.run(call, call.where)
        assert call.copied_bytes == 32 * MB and call.submitted == 1
    assert len(warned) == 1 and "expandable segments" in warned[0]
    order = [one[0] for one in gpu.said if one[0] in ("copy", "record", "wait")]
    assert order == ["copy", "record", "wait", "copy"] * 2  # in, ready, done, back
    assert names(calls).count("kld_region_import_cuda_ipc") == 2  # the buffers, once each
    ready = [one[1] for one in gpu.said if one[0] == "record"]
    assert len(ready) == 2 and names(calls).count("kld_event_create") == 2


def test_no_memory_for_a_larger_buffer(world, monkeypatch):
    """The smaller one is gone, once, and nobody copies there."""
    devices, driver, gpu, calls = world
    where = _device.Where(gpu, 0, True)
    region, _ = devices._bounce(where, "predictions", 16 * MB)
    first = next(iter(devices._bounces.values()))[0]

    real = object.__new__(_cuda.Driver)
    real.library = types.SimpleNamespace(cuMemAlloc_v2=lambda *ignored: 2)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "allocate", lambda size: real.call("cuMemAlloc_v2", size), raising=False)
        with pytest.raises(MemoryError, match="out of memory") as caught:
            devices._bounce(where, "predictions", 600 * MB)
    assert isinstance(caught.value, kld.KldMemoryError) and caught.value.status == kld.Status.NO_MEMORY
    assert _cuda.failed("cuMemAlloc_v2", 1).status == kld.Status.INTERNAL
    driver.remove(first)
    again, _ = devices._bounce(where, "predictions", 8 * MB)
    assert again is not region and next(iter(devices._bounces.values()))[0] != first
    devices.end()
    freed = [one[1] for one in gpu.said if one[0] == "free"]
    assert freed.count(first) == 1 and len(freed) == 2


def test_an_event_that_the_server_does_not_take(world, monkeypatch):
    """Nothing of it stays, nor are the request's tensors kept for a server that never had it."""
    devices, driver, gpu, calls = world
    real = _library.call

    def call(name, *arguments):
        if name == "kld_event_import":
            raise kld.KldConnectionError(kld.Status.UNAVAILABLE, "no server")
        real(name, *arguments)
    monkeypatch.setattr(_library, "call", call)
    connection = types.SimpleNamespace(_limbo={}, _devices=lambda: devices, _copied_bytes=0)
    one = request_of_nothing(connection, gpu, 0)
    for _ in range(3):
        with pytest.raises(kld.KldConnectionError):
            one.run(one.plan)
    assert not kept(connection)
    assert len([said for said in gpu.said if said[0] == "close_event"]) == 3 and not devices._ready


def request_of_nothing(connection, gpu, stream):
    one = _request.Call.__new__(_request.Call)
    one.plan = types.SimpleNamespace(places=[], request=_library.Request(), reference=None, begin=lambda connection: None)
    one.connection, one.where, one.in_place = connection, _device.Where(gpu, stream, True), False
    one._at, one._written, one._keep, one.bounced, one.copied_bytes = [], [], object(), [], 0
    one.result = one._meanwhile = None
    return one


def kept(connection):
    return [tensors for stream in connection._limbo.values() for tensors in stream]


def test_tensors_are_kept_until_a_later_request_of_their_stream_has_ended(world, monkeypatch):
    """Those of one that ended for its caller alone: the server may still write there."""
    devices, driver, gpu, calls = world
    connection = types.SimpleNamespace(_limbo={}, _devices=lambda: devices, _copied_bytes=0)
    outcomes = []

    def submit(*ignored):
        if outcomes[-1]:
            raise kld.KldError(outcomes[-1], "no")
        assert kept(connection), "its tensors may go"
    monkeypatch.setattr(_request, "submit", submit)
    monkeypatch.setattr(devices._dones, "take", lambda *ignored: types.SimpleNamespace(record=None, wait=lambda *ignored: None))

    def run(stream, outcome):
        outcomes.append(outcome)
        one = request_of_nothing(connection, gpu, stream)
        if outcome:
            with pytest.raises(kld.KldError):
                one.run(one.plan)
        else:
            one.run(one.plan)
        return one._keep
    late = [run(0, kld.Status.DEADLINE), run(0, kld.Status.UNAVAILABLE)]
    assert kept(connection) == late
    run(0, kld.Status.INVALID)  # told before it began
    run(8, 0)
    assert kept(connection) == late
    other = run(8, kld.Status.DEADLINE)
    run(0, 0)
    assert kept(connection) == [other]
    run(8, 0)
    assert not kept(connection)


def test_events_streams_and_refusals(world):
    devices, driver, gpu, calls = world
    devices.check(gpu)
    for number in range(10):
        call = request(devices, gpu, stream=number)
        devices.run(call, call.where)
        assert call.request.stream == number % 4 and call.request.early
    assert names(calls).count("kld_event_create") == _device.PAIRS
    with pytest.raises(NotImplementedError, match="captured into a CUDA graph"):
        call = request(devices, gpu, stream=99)
        devices.run(call, call.where)
    other = _device.Devices(types.SimpleNamespace(url="http://x", _handle=None))
    with pytest.raises(NotImplementedError, match="not over http:"):
        other.check(gpu)


def test_an_idle_server_that_was_replaced_is_asked_again(world):
    devices, driver, gpu, calls = world
    devices.check(gpu)
    call = request(devices, gpu)
    devices.run(call, call.where)
    failures = [kld.KldConnectionError(kld.Status.DEVICE_LOST, "lost")]

    def submit():
        call.submitted += 1
        if failures:
            raise failures.pop()
    call.submit = submit
    devices.run(call, call.where)
    assert call.submitted == 3 and names(calls).count("event drop") == 4
    failures += [kld.KldConnectionError(kld.Status.DEVICE_LOST, "lost")] * 2
    with pytest.raises(ConnectionError):
        devices.run(call, call.where)
    call.in_place, failures[:] = True, [kld.KldConnectionError(kld.Status.DEVICE_LOST, "lost")]
    before = call.submitted
    with pytest.raises(ConnectionError):
        devices.run(call, call.where)
    assert call.submitted == before + 1


@pytest.mark.skipif(not shutil.which("ptxas") and not shutil.which("/usr/local/cuda/bin/ptxas"),
                    reason="needs ptxas")
def test_the_kernel_assembles(tmp_path):
    source = _ptx.source()
    assert source.endswith(b"\0") and source.count(b".entry") == 8
    (tmp_path / "scale.ptx").write_bytes(source[:-1])
    ptxas = shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"
    for card in ("sm_80", "sm_90"):
        subprocess.run([ptxas, f"-arch={card}", tmp_path / "scale.ptx", "-o", tmp_path / "x"], check=True)
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        assert _ptx.entry_name(dtype, "float32").encode() in source
    assert _ptx.grid(1, 4) == (1, 256) and _ptx.grid(1 << 30, 4)[0] == _ptx.BLOCKS_MAX


@pytest.mark.parametrize("url, stream, finished", [("local:cuda", 1, [2, 7]), ("unix:/nowhere", 2, [7])])
def test_a_default_stream_of_each_thread_is_not_run_on(world, url, stream, finished):
    """Of CuPy and Numba where they are told to use it. The thread that enqueues a request for local: has another."""
    devices, driver, gpu, _ = world
    devices.is_local = url == "local:cuda"
    devices._fit.add(0)
    driver.add(4096, 64)
    sides = _arrays.Sides(types.SimpleNamespace(_devices=lambda: devices), Foreign(version=3, stream=2),
                          Foreign(version=3, stream=7))
    assert sides.where().stream == stream
    assert sorted(said[1] for said in gpu.said if said[0] == "finish") == finished
