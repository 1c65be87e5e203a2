"""Memory of a GPU that is in pieces (expandable segments: pieces of 2 or 20 MiB, mapped side by side, with a handle
each), for one connection: runs of pieces, each one region of the server that a tensor across pieces lies in as it is.

A space begins with the first piece of a tensor, and grows by those behind it as other tensors need them. Pieces
come and go under it (torch.cuda.empty_cache(), others in their place), so at every request the driver is asked
whether those under a tensor are the same yet. Runs under the lock of its connection, inside Gpu.current().
"""
from __future__ import annotations

import bisect
import ctypes as c
import os
from typing import Container, List, NamedTuple, Optional, Tuple

from . import _cuda, _library
from ._errors import KldError, Status

ROOM_BYTES_MIN = 64 << 20  # addresses of a space: they cost nothing but a share in the client's quota


class _Piece(NamedTuple):
    start: int
    size: int
    identity: int


class Space:
    __slots__ = ("region", "room", "starts", "identities", "end", "used", "stale")

    def __init__(self, region: c.c_void_p, start: int, room: int) -> None:
        self.region, self.room, self.end = region, room, start
        self.starts: List[int] = []
        self.identities: List[int] = []
        self.used = 0  # the number of the request that used it last
        self.stale = False  # some piece is no longer the one that the server has, or it has none any more

    @property
    def start(self) -> int:
        return self.starts[0]

    def append(self, piece: _Piece) -> None:
        self.starts.append(piece.start)
        self.identities.append(piece.identity)
        self.end += piece.size

    def under(self, start: int, end: int) -> Tuple[List[int], List[int]]:
        """Starts and identities of the pieces under these addresses, as far as it has such."""
        first, last = bisect.bisect_right(self.starts, start) - 1, bisect.bisect_left(self.starts, end)
        return self.starts[first:last], self.identities[first:last]

    def holds(self, start: int, end: int) -> bool:
        """The pieces under these addresses, as far as it has such, are those that the server has."""
        return _cuda.driver().are(*self.under(start, end))


class Spaces:
    def __init__(self, handle: c.c_void_p) -> None:
        self._handle = handle
        self._spaces: List[Space] = []  # the oldest first: an address is looked for in this order
        self.are_there = True  # as far as is known: the server has them
        self._too_many: Optional[int] = None  # pieces for which there was no room, until one of ours goes

    def find(self, address: int, size: int, request: int) -> Optional[Space]:
        """One that is there, or grows. None: there is none."""
        end = address + size
        for space in self._spaces:
            if not space.start <= address < space.end or space.stale:
                continue
            space.stale = not space.holds(address, end)
            if not space.stale and (end <= space.end or self._grow(space, end)):
                space.used = request
                return space
        return None

    def make(self, address: int, size: int, allocation: _cuda.Allocation,
             request: int) -> Optional[Space]:
        """None: the memory has no handles, or the server no such regions."""
        pieces = _pieces(address, address + size)
        if pieces is None or (self._too_many and len(pieces) >= self._too_many):
            return None
        start, needed = pieces[0].start, pieces[-1].start + pieces[-1].size - pieces[0].start
        try:
            os.close(_cuda.driver().descriptor_of(start))
        except KldError:
            return None
        room = min(max(2 * needed, ROOM_BYTES_MIN), allocation.base + allocation.size - start)
        space = self._reserve(_cuda.gpu(allocation.ordinal).uuid, start, max(needed, room), needed)
        if space is None:
            return None
        grown = False
        try:
            grown = self._extend(space, pieces)
        except KldError as error:
            if error.status == Status.NO_MEMORY:
                self._too_many = len(pieces)
            raise
        finally:
            if not grown:
                _library.library().kld_region_drop(space.region)
        if not grown:
            return None
        space.used = request
        self._spaces.append(space)
        return space

    def _reserve(self, uuid: bytes, start: int, room: int, needed: int) -> Optional[Space]:
        region = c.c_void_p()
        try:
            try:
                _library.call("kld_region_reserve_cuda", self._handle, uuid, room, c.byref(region))
            except KldError as error:
                if error.status != Status.TOO_LARGE or room == needed:
                    raise
                room = needed
                _library.call("kld_region_reserve_cuda", self._handle, uuid, room, c.byref(region))
        except KldError as error:
            if error.status != Status.UNIMPLEMENTED:
                raise
            self.are_there = False
            return None
        return Space(region, start, room)

    def _grow(self, space: Space, end: int) -> bool:
        if end - space.start > space.room:
            return False
        pieces = _pieces(space.end, end)
        if (pieces is None or pieces[0].start != space.end or
                pieces[-1].start + pieces[-1].size - space.start > space.room):
            return False
        try:
            return self._extend(space, pieces)
        except KldError as error:
            if error.status not in (Status.TOO_LARGE, Status.NO_MEMORY):
                raise
            return False

    def _extend(self, space: Space, pieces: List[_Piece]) -> bool:
        for piece in pieces:
            try:
                fd = _cuda.driver().descriptor_of(piece.start)
            except KldError:
                return False
            try:
                _library.call("kld_region_grow_cuda_fd", space.region, fd, piece.size)
            except KldError as error:
                space.stale = error.status == Status.UNAVAILABLE  # else it is what it was
                raise
            except BaseException:
                space.stale = True  # who knows whether the server has it
                raise
            finally:
                os.close(fd)
            space.append(piece)
        return True

    def sweep(self, request: int, pinned: Container[Optional[int]]) -> None:
        """Lets go of those with pieces that are gone, once neither this request nor a published tensor needs them:
        until then the server holds that memory."""
        for space in list(self._spaces):
            space.stale = space.stale or not space.holds(space.start, space.end)
            if space.stale:
                self._forget(space, request, pinned)

    def forget_idle(self, request: int, pinned: Container[Optional[int]]) -> bool:
        """Those that this request does not use. False: there are none."""
        return any([self._forget(space, request, pinned) for space in list(self._spaces)])

    def _forget(self, space: Space, request: int, pinned: Container[Optional[int]]) -> bool:
        if space.used == request or space.region.value in pinned:
            return False
        self._spaces.remove(space)
        space.stale = True
        self._too_many = None
        _library.library().kld_region_drop(space.region)
        return True

    def counts(self) -> Tuple[int, int]:
        return len(self._spaces), sum(space.end - space.start for space in self._spaces)

    def clear(self) -> None:
        self._spaces.clear()


def _pieces(start: int, end: int) -> Optional[List[_Piece]]:
    """That lie under these addresses, side by side. None: they do not."""
    pieces: List[_Piece] = []
    at = start
    while at < end:
        found = _cuda.driver().look_up(at)
        if found is None or found.has_handle:
            return None
        first, size = _cuda.driver().piece_of(at, found)
        pieces.append(_Piece(first, size, found.identity))
        at = first + size
    return pieces


__all__ = ["Space", "Spaces"]
