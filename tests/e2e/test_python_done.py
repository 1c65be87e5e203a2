"""What the Python package's streams wait for, fences and events, over a driver whose streams hold up at the words that
they wait for, and a libkld that only writes down what it is asked: who gets a fence, when its page is unpinned, which
never is, and what a server that hangs does to close(). Needs no GPU; what real ones do is in test_python_fences.py."""
import ctypes
import types
import warnings

import pytest

from pythonlib import import_kld
from test_python_device import names, request

kld = import_kld()
from kld import _connection, _cuda, _device, _done, _library  # noqa: E402

NOT_READY, CONTEXT_LOST, NOT_SUPPORTED, NOT_REGISTERED = 600, 700, 801, 713


class Cuda:
    """libcuda.so.1. A stream: a list of what it has yet to do, waits for a word and events. `fails`: statuses."""

    def __init__(self):
        self.fails, self.said, self.streams, self.pinned, self.faults = {}, [], {}, set(), []
        self.events = 0

    def __getattr__(self, name):
        if name.startswith("__") or not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            plain = [getattr(one, "value", one) for one in arguments]
            self.said.append((name, *plain))
            return self.fails.get(name) or getattr(self, "_" + name, lambda *_, raw: 0)(*plain, raw=arguments) or 0
        return call

    def go_on(self):
        for todo in self.streams.values():
            while todo and (todo[0][0] != "wait" or self._is_there(*todo[0][1:])):
                todo.pop(0)

    def _is_there(self, at, number):
        if at not in self.pinned:
            self.faults.append(at)
            return False
        return (ctypes.c_uint32.from_address(at).value - number) % (1 << 32) < 1 << 31

    def _cuCtxGetCurrent(self, *_, raw):
        raw[0]._obj.value = 77

    def _cuEventCreate(self, *_, raw):
        self.events += 1
        raw[0]._obj.value = self.events

    def _cuIpcOpenEventHandle(self, *_, raw):
        self._cuEventCreate(raw=raw)

    def _cuStreamCreate(self, *_, raw):
        raw[0]._obj.value = 1 << 20

    def _cuStreamWaitValue32_v2(self, stream, at, number, flags, raw):
        self.streams.setdefault(stream, []).append(("wait", at, number))

    def _cuEventRecord(self, event, stream, raw):
        for todo in self.streams.values():
            todo[:] = [one for one in todo if one != ("event", event)]
        self.streams.setdefault(stream, []).append(("event", event))

    def _cuEventQuery(self, event, raw):
        self.go_on()
        return NOT_READY if any(("event", event) in todo for todo in self.streams.values()) else 0

    def _cuMemHostRegister_v2(self, address, size, flags, raw):
        assert size == 4096 and address % 4096 == 0
        self.pinned.add(address)

    def _cuMemHostGetDevicePointer_v2(self, at, address, flags, raw):
        raw[0]._obj.value = address

    def _cuMemHostUnregister(self, address, raw):
        waits = [one for todo in self.streams.values() for one in todo if one[0] == "wait"]
        self.faults += [at for _, at, _ in waits if at == address]
        if address not in self.pinned:
            return NOT_REGISTERED
        self.pinned.discard(address)

    def _cuStreamSynchronize(self, stream, raw):
        self.go_on()

    def _cuCtxSynchronize(self, raw):
        self.go_on()
        assert not any(self.streams.values()), "waits for good"


class World:
    """A connection to a server that answers early and computes when it is told to."""

    def __init__(self, monkeypatch):
        monkeypatch.setenv("KLD_DONE", "fence")
        self.cuda, self.calls, self.refused, self.events_max = Cuda(), [], {}, 64
        self.words, self.number, self.handed_back, self.passed = {}, {}, [], set()
        self.monkeypatch = monkeypatch
        driver = types.SimpleNamespace(library=self.cuda)
        driver.call = lambda *arguments: _cuda.Driver.call(driver, *arguments)
        monkeypatch.setattr(_cuda, "driver", lambda: driver)
        self.gpu = _cuda.Gpu(0)
        self.gpu._context = 77
        monkeypatch.setattr(_cuda, "gpu", lambda ordinal: self.gpu)
        monkeypatch.setattr(_library, "call", self.call)
        library = types.SimpleNamespace(kld_event_drop=self.event_drop, kld_close=lambda handle: self.close(),
                                        kld_fence_passed=lambda fence, number: (fence.value, number) in self.passed)
        monkeypatch.setattr(_library, "library", lambda: library)
        connection = types.SimpleNamespace(url="unix:/nowhere", _handle=ctypes.c_void_p(1))
        self.devices = _device.Devices(connection)
        self.dones = self.devices._dones

    def call(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name in self.refused:
            raise self.refused[name]
        if name == "kld_info":
            info = arguments[-1]._obj
            info.backend, info.streams_max, info.events_max = b"cuda", 100, self.events_max
        elif name in ("kld_event_create", "kld_event_import"):
            arguments[-1]._obj.value = len(self.calls)
        elif name == "kld_fence_create":
            memory = (ctypes.c_char * 8192)()
            word = -(-ctypes.addressof(memory) // 4096) * 4096
            arguments[1]._obj.value, arguments[2]._obj.value = word, len(self.calls)
            self.words[len(self.calls)] = word, memory

    def event_drop(self, record):
        self.calls.append(("event drop",))
        if record.value in self.words:
            self.handed_back.append(self.words[record.value][0])
            assert not self.cuda.pinned & set(self.handed_back)

    def close(self):
        self.calls.append(("kld_close",))
        assert not self.cuda.pinned, "unmaps what is pinned"

    def step(self, stream=0, failures=(), computed=True):
        """-> the call. The server computes it at once, or not yet."""
        failures, call = list(failures), request(self.devices, self.gpu, stream)

        def submit():
            call.submitted += 1
            if failures:
                raise failures.pop()
            record = call.request.record
            self.number[record] = call.result.fence_number = self.number.get(record, 0) + 1
            if computed and record in self.words:
                self.compute(record)
        call.submit = submit
        self.devices.run(call, call.where)
        return call

    def compute(self, record, ahead=0):
        ctypes.c_uint32.from_address(self.words[record][0]).value = self.number[record] + ahead
        self.passed.add((record, self.number[record]) if not ahead else None)

    def lose(self):
        """As libkld does."""
        for record in self.words:
            if self.number.get(record) and (record, self.number[record]) not in self.passed:
                self.compute(record, 1 << 30)
        return [kld.KldConnectionError(kld.Status.DEVICE_LOST, "lost")]

    def waits(self):
        return [one[0] for one in self.cuda.said if one[0] in ("cuStreamWaitValue32_v2", "cuStreamWaitEvent")]

    def end(self):
        """What Connection.close() does with these; the connection's memory."""
        ended = []
        plain = types.SimpleNamespace(clear=lambda: None, end=lambda: ended.append(True))
        connection = types.SimpleNamespace(_handle=ctypes.c_void_p(1), _gpus=self.devices, _memory=plain, _held=None,
                                           _pending=[ctypes.c_uint64()], _published=plain, _dropped=plain, _limbo=plain,
                                           _asked=None, _finish_asking=lambda until: True)
        _connection.Connection._end(connection)
        assert ended and not connection._handle
        _connection.Connection._end(connection)
        assert ended == [True]


@pytest.fixture
def world(monkeypatch):
    made = World(monkeypatch)
    yield made
    assert not made.cuda.faults, "a stream waits for what is not mapped"


def what_is_said(work):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        work()
    assert all(one.category is RuntimeWarning for one in said)
    return [str(one.message) for one in said]


def test_fences_are_those_of_streams(world):
    """The first is tried before it is waited for."""
    world.monkeypatch.setattr(_device, "LOCAL_STREAMS_MAX", 4)
    world.devices._streams_max = 4
    assert not what_is_said(lambda: [world.step(stream) for stream in range(10)])
    assert names(world.calls).count("kld_fence_create") == 4 and "kld_event_create" not in names(world.calls)
    waits = [one for one in world.cuda.said if one[0] == "cuStreamWaitValue32_v2"]
    assert [one[1] for one in waits] == [1 << 20, *range(10)] and waits[0][3] == 0
    assert [one[3] for one in waits[1:]] == [1] * 4 + [2] * 4 + [3] * 2
    assert len(world.cuda.pinned) == 4
    world.end()
    assert not world.cuda.pinned and names(world.calls)[-1] == "kld_close"
    assert "cuCtxSynchronize" not in names(world.cuda.said)
    made, gone = names(world.cuda.said).count("cuEventCreate"), names(world.cuda.said).count("cuEventDestroy_v2")
    assert made == gone


@pytest.mark.parametrize("computed", [True, False])
def test_what_the_fences_of_a_lost_server_say(world, computed):
    """Where all that was answered early had been computed, the request is made again; else its caller is told."""
    world.step(computed=computed)
    if computed:
        assert world.step(failures=world.lose()).submitted == 2
    else:
        with pytest.raises(ConnectionError):
            world.step(failures=world.lose())
    assert names(world.calls).count("event drop") == 3 and len(world.handed_back) == 1
    assert names(world.calls).count("kld_fence_create") == 1 + computed


@pytest.mark.parametrize("status", ["UNIMPLEMENTED", "NO_MEMORY"])
def test_where_there_is_no_fence_events_will_do(world, status):
    """It is said once. One that finds no memory is one stream's matter; a server that was lost has a successor."""
    world.refused["kld_fence_create"] = kld.KldError(kld.Status[status], "none here")
    said = what_is_said(lambda: [world.step() for _ in range(6)])
    assert len(said) == 1 and "streams wait for events" in said[0] and said[0].endswith("none here")
    assert names(world.calls).count("kld_fence_create") == 1
    assert names(world.calls).count("kld_event_create") == _device.PAIRS
    assert world.waits() == ["cuStreamWaitEvent"] * 6
    del world.refused["kld_fence_create"]
    world.step(stream=5)
    one_stream = status == "NO_MEMORY"
    assert world.waits()[-1] == ("cuStreamWaitValue32_v2" if one_stream else "cuStreamWaitEvent")
    world.step(stream=0)
    assert world.waits()[-1] == "cuStreamWaitEvent"
    world.step(failures=world.lose())
    assert world.waits()[-1] == "cuStreamWaitValue32_v2"
    assert not what_is_said(lambda: [world.step(stream) for stream in range(8)])
    assert world.waits()[-8:] == ["cuStreamWaitValue32_v2"] * 8
    world.end()


def test_streams_beyond_the_room_of_the_server(world):
    """Wait for events, which have room left; a server with more of it has fences for all."""
    world.devices.check(world.gpu)
    said = what_is_said(lambda: [world.step(stream) for _ in range(3) for stream in range(70)])
    assert len(said) == 1 and "room for 56 fences" in said[0]
    made = names(world.calls)
    assert made.count("kld_fence_create") == 56 and made.count("kld_event_create") == _device.PAIRS
    assert made.count("kld_event_import") == _device.PAIRS
    assert world.waits()[1:] == (["cuStreamWaitValue32_v2"] * 56 + ["cuStreamWaitEvent"] * 14) * 3
    world.events_max = 128
    world.step(stream=69, failures=world.lose())
    for stream in range(70):
        world.step(stream)
    assert world.waits()[-71:] == ["cuStreamWaitValue32_v2"] * 71
    world.end()


@pytest.mark.parametrize("fails", ["cuStreamWaitValue32_v2", "cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2",
                                   "cuStreamCreate", "cuEventRecord"])
def test_a_driver_that_cannot_is_found_out_first(world, fails):
    """Before a stream of the caller's is asked to wait; the page is handed back."""
    real = world.gpu.record
    if fails == "cuEventRecord":  # of the try only
        world.monkeypatch.setattr(world.gpu, "record", lambda event, stream: world.gpu.driver.call("cuNone")
                                  if stream == 1 << 20 else real(event, stream))
        fails = "cuNone"
    world.cuda.fails[fails] = NOT_SUPPORTED
    said = what_is_said(lambda: [world.step() for _ in range(3)])
    assert len(said) == 1 and f"{fails}: not supported" in said[0]
    assert not world.cuda.pinned and len(world.handed_back) == 1
    assert world.waits()[-3:] == ["cuStreamWaitEvent"] * 3
    assert not [one for one in world.cuda.said if one[:2] == ("cuStreamWaitValue32_v2", 0)]
    before = len(world.handed_back)
    world.step(stream=3)
    tried_again = fails in ("cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2")
    assert len(world.handed_back) == before + tried_again
    world.end()
    assert names(world.calls)[-1] == "kld_close"


def test_a_driver_without_the_symbol(world):
    world.monkeypatch.setattr(Cuda, "__getattr__", without("cuStreamWaitValue32_v2"))
    said = what_is_said(world.step)
    assert len(said) == 1 and "no cuStreamWaitValue32()" in said[0]
    assert world.waits() == ["cuStreamWaitEvent"] and not world.cuda.pinned
    world.end()


def without(missing):
    real = Cuda.__getattr__

    def get(self, name):
        if name == missing:
            raise AttributeError(name)
        return real(self, name)
    return get


@pytest.mark.parametrize("fails", ["cuMemHostUnregister", "cuEventQuery and cuCtxSynchronize", "cuCtxPushCurrent_v2"])
def test_a_page_that_cannot_be_unpinned_is_kept(world, fails):
    """With its connection, whose end would unmap it."""
    world.step()
    for name in fails.split(" and "):
        world.cuda.fails[name] = CONTEXT_LOST
    if fails == "cuCtxPushCurrent_v2":
        world.gpu._context = 78
    said = what_is_said(world.end)
    assert len(said) == 1 and "cannot be unpinned and is kept" in said[0] and "CUDA error 700" in said[0]
    assert len(world.cuda.pinned) == 1 and not world.handed_back and "kld_close" not in names(world.calls)


def test_a_page_that_cannot_be_unpinned_behind_a_lost_server(world):
    world.step()
    world.cuda.fails["cuMemHostUnregister"] = CONTEXT_LOST
    assert len(what_is_said(lambda: world.step(failures=world.lose()))) == 1
    assert len(world.cuda.pinned) == 2 and not world.handed_back
    world.cuda.fails.clear()
    assert not what_is_said(world.end)
    assert len(world.cuda.pinned) == 1 and "kld_close" not in names(world.calls)


@pytest.mark.parametrize("status", [4, 709, NOT_REGISTERED])
def test_what_is_not_pinned_any_more_is_no_failure(world, status):
    """It went with its context, of which nothing else is told, either."""
    world.step()
    world.cuda.fails["cuMemHostUnregister"] = status
    if status != NOT_REGISTERED:
        world.cuda.fails["cuEventQuery"] = world.cuda.fails["cuCtxSynchronize"] = status
    world.cuda.go_on()
    world.cuda.pinned.clear()
    assert not what_is_said(world.end)
    assert names(world.calls)[-1] == "kld_close"


class Clock:
    """That only sleeping moves; `then`: what happens behind so many seconds."""

    def __init__(self, world, seconds, then):
        self.now, self.seconds, self.then = 0.0, seconds, then
        world.monkeypatch.setattr(_done, "time", types.SimpleNamespace(sleep=self.sleep, monotonic=lambda: self.now))

    def sleep(self, seconds):
        self.now += seconds
        assert self.now < 100, "waits for good"
        if self.now >= self.seconds:
            self.seconds = 1e9
            self.then()


def test_close_waits_for_a_server_that_answers(world):
    """As long as it takes, and for nothing but what the fences' streams have before them."""
    call = world.step(computed=False)
    world.cuda.streams[1234] = [("wait", *idle_word(world), 1)]  # another's
    clock = Clock(world, 30, lambda: world.compute(call.request.record))
    assert not what_is_said(world.end)
    assert 30 <= clock.now < 31 and 25 <= names(world.calls).count("kld_ping") <= 30
    assert not world.cuda.streams[0] and world.cuda.streams[1234]
    assert names(world.calls)[-1] == "kld_close"


def idle_word(world):
    memory = (ctypes.c_char * 4)()
    world.words["idle"] = None, memory
    world.cuda.pinned = Everything(world.cuda.pinned, ctypes.addressof(memory))
    return (ctypes.addressof(memory),)


class Everything(set):
    """Pinned, and one word of somebody else's."""

    def __init__(self, pinned, other):
        super().__init__(pinned)
        self.other = other

    def __contains__(self, address):
        return address == self.other or super().__contains__(address)


def test_close_behind_a_server_that_hangs_sets_the_streams_free(world):
    """Also where its device then writes over that; and what is waited for is not unmapped before they have gone on."""
    call = world.step(computed=False)
    record = call.request.record
    world.cuda.streams[0].insert(0, ("wait", *idle_word(world), 1))  # of the caller's own, before that
    world.refused["kld_ping"] = kld.KldConnectionError(kld.Status.UNAVAILABLE, "the server did not answer in 5.0 s")

    def late():
        ctypes.c_uint32.from_address(world.words[record][0]).value = 0
        ctypes.c_uint32.from_address(world.cuda.pinned.other).value = 1
    clock = Clock(world, 20, late)
    said = what_is_said(world.end)
    assert len(said) == 1 and "go on without" in said[0] and "5.0 s" in said[0]
    assert 20 <= clock.now < 21 and names(world.calls).count("kld_ping") == 1
    assert not world.cuda.streams[0] and names(world.calls)[-1] == "kld_close"


def test_a_server_that_shuts_down_has_time_for_what_it_has(world):
    call = world.step(computed=False)
    world.refused["kld_ping"] = kld.KldConnectionError(kld.Status.UNAVAILABLE, "gone")
    clock = Clock(world, 2.5, lambda: world.compute(call.request.record))
    assert not what_is_said(world.end)
    assert clock.now < 3


def test_ctrl_c_ends_the_wait_of_close(world):
    call = world.step(computed=False)

    def interrupt():
        raise KeyboardInterrupt
    Clock(world, 5, interrupt)
    with pytest.raises(KeyboardInterrupt):
        world.end()
    assert len(world.cuda.pinned) == 1 and "kld_close" not in names(world.calls)
    world.compute(call.request.record)
    world.end()
    assert names(world.calls)[-1] == "kld_close"


def test_a_signal_in_the_making_of_a_fence_leaves_no_page_pinned(world):
    real = world.gpu.try_to_wait

    def interrupted(at):
        real(at)
        world.gpu.has_waited = False
        world.monkeypatch.setattr(world.gpu, "try_to_wait", real)
        raise KeyboardInterrupt
    world.monkeypatch.setattr(world.gpu, "try_to_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.step()
    assert len(world.cuda.pinned) == 1
    world.step()
    assert len(world.cuda.pinned) == 1 and len(world.handed_back) == 1
    world.end()
    assert not world.cuda.pinned


@pytest.mark.parametrize("wanted", [None, "", "fence"])
def test_who_asks_for_nothing_has_fences(world, wanted):
    world.monkeypatch.delenv("KLD_DONE") if wanted is None else world.monkeypatch.setenv("KLD_DONE", wanted)
    world.step()
    assert len(world.cuda.pinned) == 1
    world.end()


def test_what_is_waited_for_is_chosen_by_name(world):
    world.monkeypatch.setenv("KLD_DONE", "neither")
    with pytest.raises(ValueError, match="KLD_DONE in the environment is 'neither'; expected fence or event"):
        world.step()
