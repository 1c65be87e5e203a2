"""What a stream of the caller's waits for behind an early answer: an event that the server records, or a fence, a word in
memory of the host that the server's device writes numbers to (kld_fence_create()). A stream that waits for a fence goes
on when the server is lost; one that waits for an event does so for good. Which of them is chosen here and nowhere else:
by KLD_DONE in the environment, "fence", which is the default, or "event". Runs under the lock of the connection, inside Gpu.current().

A fence's page is unpinned and handed back when every stream has gone past its last wait for it, which an event of ours
behind that wait tells. One that cannot be unpinned is never handed back, and its connection never closed, whose end
would unmap it: that memory, mapped anew, would be written by the device, or taken for pinned.
"""
from __future__ import annotations

import ctypes as c
import math
import os
import time
import warnings
from typing import TYPE_CHECKING, Dict, Optional, Set

from . import _cuda, _library
from ._errors import KldError, KldValueError, Status

if TYPE_CHECKING:
    from ._request import Call

DEFAULT = "fence"
FENCE_BYTES = 4096  # KLD_FENCE_BYTES
PAIRS = 4  # of events, ready and done, in turns
AHEAD = 1 << 30  # of all that is waited for, and not so far that it counts as behind
# Seconds between two looks at streams that have not come by, doubled with each, and between two pings.
LOOK_AGAIN, LOOK_AGAIN_MAX, ASK_AGAIN = 0.0001, 0.01, 1.0
PARTING = 2.0  # a server that shuts down ends what it has: libkld's PARTING_NS
_TRIED = -1  # no stream's number
# Of a fence that cannot be had, for reasons that events do not share.
_WITHOUT = (Status.UNIMPLEMENTED, Status.TOO_LARGE, Status.NO_MEMORY, Status.INVALID, Status.INTERNAL)


class Done:
    """Named by requests as `record`."""

    record: c.c_void_p

    def wait(self, stream: int, call: Call) -> None:
        """Lets the stream wait for that request, which was answered."""
        raise NotImplementedError

    def has_passed(self) -> bool:
        """Was the last such request computed?"""
        raise NotImplementedError

    def drop(self) -> None:
        _library.library().kld_event_drop(self.record)
        self.close()

    def close(self) -> None:
        """What is ours of it, behind kld_event_drop() or kld_close()."""


class Event(Done):
    def __init__(self, connection: c.c_void_p, gpu: _cuda.Gpu) -> None:
        self.record, self._gpu = c.c_void_p(), gpu
        made = c.create_string_buffer(_cuda.HANDLE_BYTES)
        _library.call("kld_event_create", connection, made, c.byref(self.record))
        try:
            self._event = gpu.open_event(made.raw)
        except BaseException:
            _library.library().kld_event_drop(self.record)
            raise

    def wait(self, stream: int, call: Call) -> None:
        self._gpu.wait(stream, self._event)

    def has_passed(self) -> bool:
        return self._gpu.has_passed(self._event)

    def close(self) -> None:
        self._gpu.close_event(self._event)


class Fence(Done):
    """Of one stream number, which several streams may have."""

    def __init__(self, connection: c.c_void_p, gpu: _cuda.Gpu) -> None:
        self.record, self._gpu, self._number = c.c_void_p(), gpu, 0
        self._at = 0  # on the device; 0: pin() has not come to its end
        self._pinned = False
        self._behind: Dict[int, c.c_void_p] = {}  # by stream: an event behind its last wait
        self._untold = False  # there may be a wait without one
        word = c.c_void_p()
        _library.call("kld_fence_create", connection, c.byref(word), c.byref(self.record))
        self._address = int(word.value or 0)
        self._word = c.c_uint32.from_address(self._address)

    def pin(self) -> None:
        """With the first fence of each GPU its streams are seen to wait."""
        self._pinned = self._untold = True  # whatever a signal raises in between
        try:
            self._gpu.pin_host(self._address, FENCE_BYTES)
        except KldError:
            self._pinned = False
            raise
        try:
            at = self._gpu.address_of_host(self._address)
            if not self._gpu.has_waited:
                self._behind[_TRIED] = self._gpu.try_to_wait(at)
        except KldError:
            self._untold = False
            raise
        self._at, self._untold = at, False

    @property
    def is_pinned(self) -> bool:
        return self._at != 0

    def wait(self, stream: int, call: Call) -> None:
        event = self._behind.get(stream)
        if event is None:
            event = self._behind[stream] = self._gpu.local_event()
        before, self._untold, self._number = self._untold, True, call.result.fence_number
        self._gpu.wait_value(stream, self._at, self._number)
        self._gpu.record(event, stream)
        self._untold = before

    def has_passed(self) -> bool:
        return not self._number or bool(_library.library().kld_fence_passed(self.record, self._number))

    def _is_reached(self) -> bool:
        """By the device, or by libkld or set_free()."""
        return not self._number or (self._word.value - self._number) % (1 << 32) < 1 << 31

    def set_free(self) -> bool:
        """As libkld does for a server that it knows to be lost: streams go on without what they wait for.
        False: nothing is waited for."""
        if self._is_reached():
            return False
        self._word.value += AHEAD
        return True

    def is_past(self) -> bool:
        """Has every stream gone past its last wait, or may unpin() find out?"""
        if not self._is_reached():
            return False
        try:
            with self._gpu.current():
                return all(self._gpu.has_come_to(event) for event in self._behind.values())
        except KldError:  # a context that was lost
            self._untold = True
            return True

    def unpin(self) -> None:
        """Behind is_past(). Raises where the page may be pinned yet."""
        if self._pinned:
            with self._gpu.current():
                if self._untold:
                    self._gpu.finish_all()
                self._gpu.unpin_host(self._address)
            self._pinned, self._at = False, 0

    def close(self) -> None:
        while self._behind:
            self._gpu.close_event(self._behind.popitem()[1])


def _fences_wanted() -> bool:
    wanted = os.environ.get("KLD_DONE") or DEFAULT
    if wanted not in ("fence", "event"):
        raise KldValueError(Status.INVALID, f"KLD_DONE in the environment is {wanted!r}; expected fence or event")
    return wanted == "fence"


_EVENTS = ("kld: there are no fences to be had, and streams wait for events, some or all, which they do for good if the "
           "server is lost: ")
_FREED = ("kld: the server does not answer, and close() lets the streams that wait for it go on without what they wait "
          "for: ")
_KEPT = ("kld: the page of a fence cannot be unpinned and is kept, with its connection to the server, as long as this "
         "process lives: ")


class Dones:
    """Of a connection: fences by the number of their stream, events in turns."""

    def __init__(self) -> None:
        self._fences: Dict[int, Fence] = {}
        self._events: Dict[int, Event] = {}
        self._wanted: Optional[bool] = None  # not asked yet
        self._room: Optional[int] = None  # how many fences the server takes; not asked yet
        self._without: Set[int] = set()  # stream numbers
        self._said: Set[str] = set()
        self._kept = False  # a page of a fence

    def _say(self, what: str, why: object) -> None:
        """Once."""
        if what not in self._said:
            self._said.add(what)
            warnings.warn(f"{what}{why}", RuntimeWarning, stacklevel=2)

    def take(self, connection: c.c_void_p, gpu: _cuda.Gpu, number: int, turn: int) -> Done:
        """For the next request of a stream."""
        if self._wanted is None:
            self._wanted = _fences_wanted()
        fence = self._fences.get(number)
        if fence is None or not fence.is_pinned:
            fence = self._fence(connection, gpu, number) if self._wanted and number not in self._without else None
        if fence is not None:
            return fence
        event = self._events.get(turn)
        if event is None:
            event = self._events[turn] = Event(connection, gpu)
        return event

    def _fence(self, connection: c.c_void_p, gpu: _cuda.Gpu, number: int) -> Optional[Fence]:
        """None: that number does without one, until drop()."""
        if self._room is None:
            info = _library.ServerInfo()
            _library.call("kld_info", connection, c.byref(info))
            self._room = max(0, info.events_max - 2 * PAIRS)  # events have to have theirs
        if number in self._fences:  # a signal came in between
            self._hand_back(number)
        if len(self._fences) >= self._room:
            self._without.add(number)
            self._say(_EVENTS, f"the server has room for {self._room} fences of a connection, each of a stream")
            return None
        try:
            fence = self._fences[number] = Fence(connection, gpu)
            fence.pin()
            return fence
        except KldError as error:
            if number in self._fences:
                self._hand_back(number)
            if error.status not in _WITHOUT:
                raise
            self._without.add(number)
            if error.status == Status.UNIMPLEMENTED:
                self._room = 0  # nor will others' have one
            self._say(_EVENTS, error)
            return None

    def have_passed(self) -> bool:
        """Was all that was answered early computed?"""
        return all(done.has_passed() for done in (*self._fences.values(), *self._events.values()))

    def settle(self, connection: Optional[c.c_void_p] = None) -> None:
        """Until every stream has gone past its last wait for a fence. Of a lost server they are free already. With a
        connection: for as long as the server at its other end answers, then they are set free."""
        pause, asked, gone = LOOK_AGAIN, time.monotonic(), math.inf
        why: object = None
        while not all(fence.is_past() for fence in self._fences.values()):
            time.sleep(pause)
            pause = min(2 * pause, LOOK_AGAIN_MAX)
            if connection and why is None and time.monotonic() - asked > ASK_AGAIN:
                try:
                    _library.call("kld_ping", connection, c.byref(c.c_uint64()))
                except KldError as error:
                    why, gone = error, time.monotonic() + PARTING
                asked = time.monotonic()
            if time.monotonic() > gone:  # again and again: the device may write over it
                for fence in self._fences.values():
                    if fence.set_free():
                        self._say(_FREED, why)

    def _take_out(self, number: int) -> Optional[Fence]:
        """None: its page is kept."""
        fence = self._fences[number]
        try:
            fence.unpin()
        except KldError as error:
            self._kept = True
            del self._fences[number]
            self._say(_KEPT, error)
            return None
        return self._fences.pop(number)

    def _hand_back(self, number: int) -> None:
        fence = self._take_out(number)
        if fence is not None:
            fence.drop()

    def unpin(self, connection: c.c_void_p) -> bool:
        """Before kld_close(). False: it is not to be called, since it unmaps what is pinned yet."""
        self.settle(connection)
        for number in list(self._fences):
            fence = self._take_out(number)
            if fence is not None:
                fence.close()
        return not self._kept

    def drop(self) -> None:
        """Of a server that was lost. The next one is asked anew."""
        self.settle()
        for number in list(self._fences):
            self._hand_back(number)
        while self._events:
            self._events.popitem()[1].drop()
        self._room = None
        self._without.clear()

    def close(self) -> None:
        """Behind kld_close()."""
        for event in self._events.values():
            event.close()
        self._events.clear()
