"""Memory that a worker reads and writes without a copy: sealed memfds, mapped here and named to libkld
as regions. Over http: and local: nothing is shared, and the memory is anonymous.

Ownership. An array holds its `Block` (as its base object); when the last array of a block has gone, the
block's `Span` goes into a cache for the next one of that size, up to a limit. The mapping is Python's own: an
array outlives its connection, and is ordinary memory from then on. Spoiled spans, those that a request
may still write although it has ended, are never used again.

Threads. Everything here runs under the lock of the connection, but for `Block` finalisers, which run
wherever the last reference goes: they append to a queue and no more.
"""
from __future__ import annotations

import bisect
import collections
import ctypes as c
import fcntl
import mmap
import os
import sys
import weakref
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple, TypeVar

from . import _library
from ._errors import KldError, KldMemoryError, Status

# Each costs two descriptors, and a server takes 1024 regions of a client (client_regions_max).
SPANS_MAX = 256
Owner = TypeVar("Owner")


def finaliser(work: Callable[[Owner], None]) -> Callable[[Owner], None]:
    """For what runs when an object goes. Something in `sys`, say, may keep that until the interpreter has emptied its
    modules, ours too: what `work` needs is None then, and the end of the process lets go of the rest. So nothing here
    is looked up by name."""
    modules, error = sys.modules, Exception

    def run(owner: Owner) -> None:
        try:
            work(owner)
        except error:
            if modules.get("os") is not None:  # modules leave this dict before any of them is emptied
                raise

    return run


def rounded(size: int) -> int:
    """Sizes of spans: few, so that they are used again."""
    if size <= 1 << 20:
        return max(4096, 1 << (size - 1).bit_length())
    return -(-size >> 20) << 20


def plain(name: str, size: int) -> Any:
    """Ordinary memory."""
    try:
        return (c.c_char * size)()
    except (MemoryError, OverflowError):
        raise KldMemoryError(Status.NO_MEMORY, f"no {size} bytes of memory for {name}") from None


class Span:
    """One mapping, and its region where it is shared."""

    __slots__ = ("pages", "address", "size", "region", "spoiled", "_holder")

    def __init__(self, size: int, connection: Optional[c.c_void_p]) -> None:
        self.size = size
        self.region = c.c_void_p()
        self.spoiled = False
        self._holder: Any = None
        if connection is None:
            # Private: a child made by fork() has a copy, as of any other memory.
            self.pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self.pages = self._share(size, connection)
        self.address = c.addressof(c.c_char.from_buffer(self.pages))

    def _share(self, size: int, connection: c.c_void_p) -> mmap.mmap:
        fd = os.memfd_create("kld-python", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            pages = mmap.mmap(fd, size)
            _library.call("kld_region_import_memfd", connection, fd, size, c.byref(self.region))
            return pages
        finally:
            os.close(fd)


    def hold(self, block: Any, returned: Deque[Span], tidy: Optional[Callable[[], None]]) -> None:
        """Until the block's last user has gone. (A bare reference: weakref.finalize() takes five times
        as long.)"""
        def give_back(_: Any) -> None:
            self._holder = None
            returned.append(self)
            if tidy is not None:
                tidy()

        self._holder = weakref.ref(block, give_back)


class Memory:
    """The spans of one connection."""

    def __init__(self, connection: c.c_void_p, shared: bool, cache_bytes_max: int) -> None:
        self.shared = shared
        self._connection = connection if shared else None
        self._cache_bytes_max = cache_bytes_max
        self._cached: Dict[int, List[Span]] = {}
        self.cached_bytes = 0
        self._live: Dict[int, Span] = {}  # by address; cached ones included
        self._addresses: List[int] = []
        self._returned: Deque[Span] = collections.deque()  # from finalisers, any thread

    def take(self, size: int, tidy: Optional[Callable[[], None]] = None) -> Any:
        """A block of at least `size` bytes: a ctypes array. Its contents are anything."""
        self.collect()
        size = rounded(size)
        spans = self._cached.get(size)
        if self._connection is None and not spans and self.is_full:
            return plain("an array", size)  # nothing is shared: any memory will do
        if spans:
            span = spans.pop()
            self.cached_bytes -= span.size
        else:
            span = self._map(size)
        block = (c.c_char * size).from_buffer(span.pages)
        span.hold(block, self._returned, tidy)
        return block

    def _map(self, size: int) -> Span:
        if len(self._live) >= SPANS_MAX:
            self._forget_cached(0)
        if len(self._live) >= SPANS_MAX:
            raise KldMemoryError(Status.NO_MEMORY, f"{SPANS_MAX} arrays in shared memory are alive, the most "
                                 "that one connection takes")
        try:
            span = self._span(size)
        except KldError as error:
            if error.status not in (Status.NO_MEMORY, Status.TOO_LARGE):
                raise
            raise KldMemoryError(Status.NO_MEMORY, f"no {size} bytes of shared memory: {error}") from error
        except (OSError, ValueError, OverflowError) as error:
            raise KldMemoryError(Status.NO_MEMORY, f"no {size} bytes of shared memory: {error}") from error
        self._live[span.address] = span
        bisect.insort(self._addresses, span.address)
        return span

    def _span(self, size: int) -> Span:
        try:
            return Span(size, self._connection)
        except (KldError, OSError):  # of what a server lets one connection share, what is kept for later has a part
            if not self.cached_bytes:
                raise
        self._forget_cached(0)
        return Span(size, self._connection)

    def forget_cached(self) -> bool:
        """All that is kept for later: the server may share only so much with this connection. False: nothing was kept."""
        self.collect()
        if not self.shared or not self.cached_bytes:
            return False
        self._forget_cached(0)
        return True

    @property
    def is_full(self) -> bool:
        self.collect()
        return len(self._live) >= SPANS_MAX and not self.cached_bytes

    def find(self, address: int, size: int) -> Optional[Span]:
        """The span that holds these bytes, all of them."""
        index = bisect.bisect_right(self._addresses, address)
        if index == 0:
            return None
        span = self._live[self._addresses[index - 1]]
        return span if address + size <= span.address + span.size else None

    def place(self, address: int, size: int) -> Tuple[int, int, int]:
        """Of these bytes, as struct kld_bytes has it: an address, or a region and where in it."""
        index = bisect.bisect_right(self._addresses, address)
        if index:
            span = self._live[self._addresses[index - 1]]
            region = span.region.value
            if region and address + size <= span.address + span.size:
                return 0, region, address - span.address
        return address, 0, 0

    def collect(self) -> None:
        """Takes in what finalisers gave back."""
        while self._returned:
            span = self._returned.popleft()
            if span.spoiled or span.size > self._cache_bytes_max:
                self._forget(span)
                continue
            self._forget_cached(self._cache_bytes_max - span.size)
            self._cached.setdefault(span.size, []).append(span)
            self.cached_bytes += span.size

    def _forget_cached(self, bytes_max: int) -> None:
        """Unmaps cached spans, large ones first, until at most bytes_max are left."""
        for size in sorted(self._cached, reverse=True):
            spans = self._cached[size]
            while spans and self.cached_bytes > bytes_max:
                self.cached_bytes -= size
                self._forget(spans.pop())

    def _forget(self, span: Span) -> None:
        del self._live[span.address]
        self._addresses.remove(span.address)
        _library.library().kld_region_drop(span.region)
        span.region = c.c_void_p()

    def let_go(self) -> None:
        """Of what arrays gave back behind end(), or in a child made by fork(). Needs no lock: nothing here is taken
        any more."""
        while self._returned:
            try:
                self._live.pop(self._returned.popleft().address, None)
            except IndexError:  # another thread was faster
                return

    def counts(self) -> Tuple[int, int]:
        """Spans, and their bytes."""
        return len(self._live), sum(span.size for span in self._live.values())

    def end(self) -> None:
        """Behind kld_close(), which released the regions."""
        for span in self._live.values():
            span.region = c.c_void_p()
        self._live.clear()
        self._addresses.clear()
        self._cached.clear()
        self._returned.clear()
        self.cached_bytes = 0
