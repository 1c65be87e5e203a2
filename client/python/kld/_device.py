"""Tensors on a GPU, for one connection: which region of the server their memory is, in what order its
work comes with the caller's stream, and no CPU that waits in between.

Over unix: an allocation is registered once, by its handle, and every tensor in it is a place there
(PyTorch's caching allocator: one a segment); what is in pieces, mapped side by side (expandable segments), by those
of each (_spaces.py). Memory that cannot be named so is copied through a buffer that can, on the device: what has no
handle (cudaMallocAsync), and what lies across pieces where the server takes no regions of several. Over local:
nothing is registered, and the work runs on the caller's stream itself.

An allocation that was freed is noticed at the next look, once a second at most; until then the server holds
its memory. Runs under the lock of its connection, inside Gpu.current().
"""
from __future__ import annotations

import ctypes as c
import os
import time
import warnings
from typing import TYPE_CHECKING, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, TypeVar, Union

from . import _cuda, _done, _library, _spaces
from ._errors import KldConnectionError, KldError, KldUnsupportedError, KldValueError, Status

if TYPE_CHECKING:
    from ._connection import Connection
    from ._request import Call, View

_T = TypeVar("_T")
PAIRS = _done.PAIRS
LOCAL_STREAMS_MAX = 128
SWEEP_SECONDS = 1.0
BOUNCE_BYTES_MIN = 2 << 20
PLACES_MAX = 256


_COPIED = ("kld: a tensor's memory has no handle for the server (cudaMallocAsync; expandable segments, where the server "
           "is of a release that takes no regions in pieces): requests copy it on the GPU, through buffers of its size. "
           "Without copies: connect to local:, or take PyTorch's own allocator, without expandable segments")


class Where(NamedTuple):
    """Where a request's tensors are, and what its work is ordered with."""

    gpu: _cuda.Gpu
    stream: int
    early: bool  #: the answer comes when the device has the work


class _Segment:
    """An allocation, or a piece of memory mapped by hand."""

    __slots__ = ("base", "size", "region", "used", "stale")

    def __init__(self, base: int, size: int) -> None:
        self.base, self.size = base, size
        self.stale = False  # the server has it no more
        self.region: Optional[c.c_void_p] = None  # registered; empty: cannot be
        self.used = 0  # Devices._request at its last use


class Place(NamedTuple):
    """Where a tensor was found to be, as long as the driver says the same of these addresses."""

    owner: Union[_Segment, _spaces.Space]
    region: c.c_void_p
    offset: int
    addresses: Sequence[int]
    identities: Sequence[int]

    @property
    def is_in_pieces(self) -> bool:
        """The server's mapping of a piece is its own, and outlives that of this process."""
        return isinstance(self.owner, _spaces.Space)


class _Ready:
    """An event of ours that the server's device waits for."""

    def __init__(self, connection: c.c_void_p, gpu: _cuda.Gpu) -> None:
        self.gpu, self.wait = gpu, c.c_void_p()
        self.event, handle = gpu.event()
        try:
            _library.call("kld_event_import", connection, handle, gpu.uuid, c.byref(self.wait))
        except BaseException:
            self.close()
            raise

    def drop(self) -> None:
        _library.library().kld_event_drop(self.wait)
        self.close()

    def close(self) -> None:
        self.gpu.close_event(self.event)


class Devices:
    """What a connection knows of the GPUs of this process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._url_kind = connection.url.split(":", 1)[0]
        self.is_local = self._url_kind == "local"
        self._fit: Set[int] = set()  # GPUs that were found fit
        self._segments: Dict[int, _Segment] = {}  # by identity
        self._places: Dict[Tuple[int, int], Place] = {}  # by address and size: of tensors that were found
        self._spaces = _spaces.Spaces(connection._handle)
        self._swept = 0.0
        self._request = 1  # counts them
        self._warned = False
        self._pinned: Dict[Optional[int], Set[object]] = {}  # regions that stay -> what is published there
        self._streams: Dict[int, int] = {}  # of ours -> its number
        self._streams_max = LOCAL_STREAMS_MAX
        self._ready: List[_Ready] = []
        self._turn = 0
        self._dones = _done.Dones()
        # (GPU, stream, slot) -> address, size
        self._bounces: Dict[Tuple[int, int, str], Tuple[int, int]] = {}

    # ---- Is it the right connection?

    def check(self, gpu: _cuda.Gpu) -> None:
        if gpu.ordinal in self._fit:
            return
        if self._url_kind not in ("local", "unix"):
            raise KldUnsupportedError(Status.UNIMPLEMENTED, f"tensors on a GPU go over unix: and local:, not over "
                                      f"{self._url_kind}:; move them to the CPU first")
        info = _library.ServerInfo()
        _library.call("kld_info", self._connection._handle, c.byref(info))
        if info.backend != b"cuda":
            raise KldUnsupportedError(Status.UNIMPLEMENTED, f"the tensors are on GPU {gpu.ordinal}, and "
                                      f"{self._connection.url} computes on a CPU; move them there, or connect to "
                                      "a server or a libkld with a GPU")
        if self.is_local and bytes(info.device_uuid) != gpu.uuid:
            raise KldValueError(Status.INVALID, f"the tensors are on GPU {gpu.ordinal}, and "
                                f"{self._connection.url} computes on another; connect to "
                                f"local:cuda:{gpu.ordinal}")
        if self._fit and not self.is_local:  # as libkld would say, but before anything is registered
            raise KldValueError(Status.INVALID, f"this connection has tensors on GPU {min(self._fit)}; those on GPU "
                                f"{gpu.ordinal} need one of their own")
        if not self.is_local:
            self._streams_max = max(1, info.streams_max)
        self._fit.add(gpu.ordinal)

    # ---- Where a tensor is

    def place(self, call: Call, slot: str, view: View, size: int) -> Tuple[Optional[c.c_void_p], int]:
        """-> region and offset, or None and an address."""
        if self.is_local:
            return None, view.address
        assert call.where is not None
        found = self.region_of(view.address, size)
        if found is None:
            if not self._warned:
                self._warned = True
                warnings.warn(_COPIED, RuntimeWarning, stacklevel=2)
            call.bounced.append((slot, view, size))
            found = self._bounce(call.where, slot, size)
        return found

    def region_of(self, address: int, size: int) -> Optional[Tuple[c.c_void_p, int]]:
        """None: cannot be named to another process as one."""
        place = self.find(address, size)
        return None if place is None else (place.region, place.offset)

    def find(self, address: int, size: int) -> Optional[Place]:
        place = self._find(address, size)
        if place is not None:
            if len(self._places) >= PLACES_MAX:
                self._places.clear()
            self._places[address, size] = place
        return place

    def _find(self, address: int, size: int) -> Optional[Place]:
        allocation = _cuda.driver().look_up(address)
        if allocation is None:
            raise KldValueError(Status.INVALID, "a tensor said to be on a GPU is not in its memory")
        segment = self._segments.get(allocation.identity)
        fits = segment is not None and address + size <= segment.base + segment.size
        if not fits and not allocation.has_handle and self._spaces.are_there:
            space = self._spaces.find(address, size, self._request)
            if space is None:
                self._sweep()
                space = self._make_space(address, size, allocation)
            if space is not None:
                return Place(space, space.region, address - space.start, *space.under(address, address + size))
        if segment is None:
            self._sweep()
            segment = self._segments[allocation.identity] = self._segment(address, allocation)
        offset = address - segment.base
        if offset + size > segment.size:
            return None
        segment.used = self._request
        if segment.region is None:
            segment.region = self._with_room(lambda: self._register(address, segment, allocation))
        return Place(segment, segment.region, offset, (address,), (allocation.identity,)) if segment.region else None

    def find_again(self, address: int, size: int, written: bool) -> Optional[Place]:
        """find(), of a tensor that mostly is where another was. Of one that is read, its pieces are not looked at:
        are_there() is to be asked when the request is on its way."""
        place = self._places.get((address, size))
        if place is None or place.owner.stale or not (
                place.is_in_pieces and not written or _cuda.driver().are(place.addresses, place.identities)):
            return self.find(address, size)
        place.owner.used = self._request
        return place

    def are_there(self, places: Sequence[Place]) -> bool:
        """False: in the place of one of these a request read memory of nobody any more."""
        driver = _cuda.driver()
        for place in places:
            if place.is_in_pieces and not driver.are(place.addresses, place.identities):
                self._places.clear()
                return False
        return True

    def _make_space(self, address: int, size: int, allocation: _cuda.Allocation) -> Optional[_spaces.Space]:
        try:
            return self._with_room(lambda: self._spaces.make(address, size, allocation, self._request))
        except KldError as error:
            if error.status != Status.NO_MEMORY:  # of descriptors, say: what is in one piece may yet have its own
                raise
            return None

    @staticmethod
    def _segment(address: int, allocation: _cuda.Allocation) -> _Segment:
        if allocation.has_handle:
            return _Segment(allocation.base, allocation.size)
        return _Segment(*_cuda.driver().piece_of(address, allocation))

    def pin(self, region: c.c_void_p, published: object) -> None:
        """That lies there, until let_go()."""
        self._pinned.setdefault(region.value, set()).add(published)

    def let_go(self, published: object) -> None:
        for region, there in list(self._pinned.items()):
            there.discard(published)
            if not there:
                del self._pinned[region]

    def _with_room(self, register: Callable[[], _T]) -> _T:
        """Where there is no room for another region of ours, in the place of those that this request does not use."""
        try:
            return register()
        except KldError as error:
            if error.status not in (Status.TOO_LARGE, Status.NO_MEMORY):
                raise
            # Of memory or descriptors spaces have the most, and what is without them has them again at its next request.
            idle = [identity for identity, other in self._segments.items() if error.status == Status.TOO_LARGE and
                    other.used != self._request and not (other.region and other.region.value in self._pinned)]
            spaces_left = self._spaces.forget_idle(self._request, self._pinned)
            if not (idle or spaces_left):
                raise
            for identity in idle:
                self._forget(identity)
            return register()

    def _register(self, address: int, segment: _Segment, allocation: _cuda.Allocation) -> c.c_void_p:
        """A region; empty where the driver gives no handle."""
        driver, gpu, region = _cuda.driver(), _cuda.gpu(allocation.ordinal), c.c_void_p()
        arguments = gpu.uuid, segment.size, 0, segment.size, c.byref(region)
        if allocation.has_handle:
            _library.call("kld_region_import_cuda_ipc", self._connection._handle,
                          driver.handle_of(segment.base), *arguments)
            return region
        try:
            fd = driver.descriptor_of(address)
        except KldError:
            return region
        try:
            _library.call("kld_region_import_cuda_fd", self._connection._handle, fd, *arguments)
        finally:
            os.close(fd)
        return region

    def _sweep(self) -> None:
        """Lets go of allocations that were freed."""
        self._swept = time.monotonic()
        self._spaces.sweep(self._request, self._pinned)
        for identity, segment in list(self._segments.items()):
            allocation = _cuda.driver().look_up(segment.base)
            if allocation is None or allocation.identity != identity:
                self._forget(identity)

    def _forget(self, identity: int) -> None:
        segment = self._segments.pop(identity)
        segment.stale = True
        if segment.region:
            self._pinned.pop(segment.region.value, None)  # a later region may get this address
            _library.library().kld_region_drop(segment.region)

    def counts(self) -> Tuple[int, int]:
        """Registered allocations, and their bytes."""
        sizes = [segment.size for segment in self._segments.values() if segment.region]
        spaces, size = self._spaces.counts()
        return len(sizes) + spaces, sum(sizes) + size

    # ---- Memory that cannot be named

    def _bounce(self, where: Where, slot: str, size: int) -> Tuple[c.c_void_p, int]:
        key = where.gpu.ordinal, where.stream, slot
        at, have = self._bounces.get(key, (0, 0))
        if have < size:
            if have:
                where.gpu.finish(where.stream)
                del self._bounces[key]  # whatever becomes of the larger one
                where.gpu.free(at)
                self._sweep()
            have = max(BOUNCE_BYTES_MIN, 1 << (size - 1).bit_length() if size < 1 << 28 else -(-size >> 21) << 21)
            at = where.gpu.allocate(have)
            self._bounces[key] = at, have
        found = self.region_of(at, size)
        if found is None:
            raise KldUnsupportedError(Status.UNIMPLEMENTED, "this driver gives no handle of device memory to other "
                                      "processes")
        return found

    def _copy(self, call: Call, where: Where, back: bool) -> None:
        for slot, view, size in call.bounced:
            at = self._bounces[where.gpu.ordinal, where.stream, slot][0]
            is_output = _library.SLOT[slot] >= _library.SLOT["loss"]
            if not back and (not is_output or call.has_gaps(slot)):
                where.gpu.copy(at, view.address, size, where.stream)
            elif back and is_output:
                where.gpu.copy(view.address, at, size, where.stream)
            else:
                continue
            call.copied_bytes += size

    # ---- In which order

    def run(self, call: Call, where: Where) -> None:
        if where.gpu.is_captured(where.stream):
            raise KldUnsupportedError(Status.UNIMPLEMENTED, "the current stream is being captured into a CUDA graph, "
                                      "which kld's requests cannot be part of; call kl_div() outside of it")
        if time.monotonic() - self._swept > SWEEP_SECONDS:
            self._sweep()
        self._request += 1  # of the next one
        call.request.early = where.early
        call.request.stream = self._number_of(where.stream)
        if self.is_local:
            call.submit()
            return
        self._copy(call, where, back=False)
        again = self._run_between_events(call, where, last=False)
        if again:
            self._run_between_events(call, where, last=True)
        self._copy(call, where, back=True)

    def _number_of(self, stream: int) -> int:
        number = self._streams.get(stream)
        if number is not None:
            return number
        number = len(self._streams) % self._streams_max
        if self.is_local:
            for other in [other for other, its in self._streams.items() if its == number]:
                del self._streams[other]
            _library.call("kld_stream_adopt", self._connection._handle, number, stream)
        self._streams[stream] = number
        return number

    def _run_between_events(self, call: Call, where: Where, last: bool) -> bool:
        """True: what the streams wait for was lost with an idle server; once more."""
        handle = self._connection._handle
        if len(self._ready) < PAIRS:
            self._ready.append(_Ready(handle, where.gpu))
            self._turn = len(self._ready) - 1
        else:
            self._turn = (self._turn + 1) % PAIRS
        ready = self._ready[self._turn]
        done = self._dones.take(handle, where.gpu, call.request.stream, self._turn)
        where.gpu.record(ready.event, where.stream)
        call.request.wait, call.request.record = ready.wait, done.record
        try:
            call.submit()
        except KldConnectionError as error:
            if error.status != Status.DEVICE_LOST:
                raise
            self._dones.settle()
            idle = self._dones.have_passed()
            self._dones.drop()
            while self._ready:
                self._ready.pop().drop()
            if last or not idle or call.in_place:
                raise
            return True
        done.wait(where.stream, call)
        return False

    def unpin(self) -> bool:
        """Before kld_close(). False: it is not to be called."""
        return self._dones.unpin(self._connection._handle)

    def end(self) -> None:
        """Behind kld_close(), which released regions and events."""
        for ready in self._ready:
            ready.close()
        self._dones.close()
        for (ordinal, _, _), (at, _) in self._bounces.items():
            with _cuda.gpu(ordinal).current():
                _cuda.gpu(ordinal).free(at)
        self._ready.clear()
        self._bounces.clear()
        self._segments.clear()
        self._places.clear()
        self._spaces.clear()
        self._streams.clear()
