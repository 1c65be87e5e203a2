"""What a stream of the caller's waits for behind an early answer: an event that the server records, or a fence, a word in
memory of the host that the server's device writes numbers to (kld_fence_create()). A stream that waits for a fence goes
on when the server is lost; one that waits for an event does so for good. Which of them is chosen here and nowhere else:
by KLD_DONE in the environment, "fence" or "event". Runs under the lock of the connection, inside Gpu.current().
"""
from __future__ import annotations

import contextlib
import ctypes as c
import os
from typing import TYPE_CHECKING, Dict, Optional

from . import _cuda, _library
from ._errors import KldError, KldUnsupportedError, KldValueError, Status

if TYPE_CHECKING:
    from ._request import Call

DEFAULT = "event"
FENCE_BYTES = 4096  # KLD_FENCE_BYTES
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

    def unpin(self) -> None:
        """Waits until nobody waits for it any more. Before kld_close()."""

    def drop(self) -> None:
        self.unpin()
        _library.library().kld_event_drop(self.record)
        self.close()

    def close(self) -> None:
        """What is ours of it, behind kld_event_drop() or kld_close()."""


class Event(Done):
    def __init__(self, connection: c.c_void_p, gpu: _cuda.Gpu) -> None:
        self.record, self._gpu = c.c_void_p(), gpu
        made = c.create_string_buffer(_cuda.HANDLE_BYTES)
        _library.call("kld_event_create", connection, made, c.byref(self.record))
        self._event = gpu.open_event(made.raw)

    def wait(self, stream: int, call: Call) -> None:
        self._gpu.wait(stream, self._event)

    def has_passed(self) -> bool:
        return self._gpu.has_passed(self._event)

    def close(self) -> None:
        self._gpu.close_event(self._event)


class Fence(Done):
    """Of one stream number."""

    def __init__(self, connection: c.c_void_p, gpu: _cuda.Gpu) -> None:
        if not gpu.waits_for_values:
            raise KldUnsupportedError(Status.UNIMPLEMENTED, "this driver has no cuStreamWaitValue32()")
        self.record, self._gpu, self._number = c.c_void_p(), gpu, 0
        word = c.c_void_p()
        _library.call("kld_fence_create", connection, c.byref(word), c.byref(self.record))
        self._word: Optional[int] = word.value
        try:
            self._at = gpu.map_host(word.value or 0, FENCE_BYTES)
        except KldError:
            _library.library().kld_event_drop(self.record)
            raise

    def wait(self, stream: int, call: Call) -> None:
        self._number = call.result.fence_number
        self._gpu.wait_value(stream, self._at, self._number)

    def has_passed(self) -> bool:
        return not self._number or bool(_library.library().kld_fence_passed(self.record, self._number))

    def unpin(self) -> None:
        word, self._word = self._word, None
        if word is not None:
            with contextlib.suppress(KldError), self._gpu.current():  # (a context that was lost)
                self._gpu.unmap_host(word)


def _fences_wanted() -> bool:
    wanted = os.environ.get("KLD_DONE") or DEFAULT
    if wanted not in ("fence", "event"):
        raise KldValueError(Status.INVALID, f"KLD_DONE in the environment is {wanted!r}; expected fence or event")
    return wanted == "fence"


class Dones:
    """Of a connection: fences by the number of their stream, events in turns."""

    def __init__(self) -> None:
        self._fences: Dict[int, Fence] = {}
        self._events: Dict[int, Event] = {}
        self._with_fences: Optional[bool] = None  # not asked yet

    def take(self, connection: c.c_void_p, gpu: _cuda.Gpu, number: int, turn: int) -> Done:
        """For the next request of a stream."""
        if self._with_fences is None:
            self._with_fences = _fences_wanted()
        fence = self._fences.get(number)
        if fence is None and self._with_fences:
            try:
                fence = self._fences[number] = Fence(connection, gpu)
            except KldError as error:
                if error.status not in _WITHOUT:
                    raise
                self._with_fences = False
        if fence is not None:
            return fence
        event = self._events.get(turn)
        if event is None:
            event = self._events[turn] = Event(connection, gpu)
        return event

    def have_passed(self) -> bool:
        """Was all that was answered early computed?"""
        return all(done.has_passed() for done in (*self._fences.values(), *self._events.values()))

    def unpin(self) -> None:
        for fence in self._fences.values():
            fence.unpin()

    def drop(self) -> None:
        while self._fences:
            self._fences.popitem()[1].drop()
        while self._events:
            self._events.popitem()[1].drop()

    def close(self) -> None:
        """Behind kld_close()."""
        for event in self._events.values():
            event.close()
        self._events.clear()
        self._fences.clear()
