"""Calls of libkld that wait for a server's word, and cannot be told to stop: ping, stats, publish, attach, detach. Where a
signal may come, or a timeout is to hold, another thread makes them, and who asked may leave before the answer: then the
connection is that thread's until libkld returns (by its connect_timeout), and what is asked of it next comes behind.
"""
from __future__ import annotations

import _thread
import sys
import threading
from typing import TYPE_CHECKING, Any, Callable, List, Optional

from . import _library
from ._errors import KldError, KldTimeoutError, Status

if TYPE_CHECKING:
    from ._connection import Connection


class Question:
    """One such call. `undo`: takes back what came of it, where nobody is there any more to have it."""

    def __init__(self, name: str, arguments: Any, keep: Any, undo: Optional[Callable[[], None]]) -> None:
        self._name, self._arguments, self._keep, self._undo = name, arguments, keep, undo
        self._guard, self._over = threading.Lock(), threading.Lock()
        self._started: List[int] = []
        self._given_up, self._ended = False, False
        self._handle: Any = None  # to be closed at the end
        self.error: Optional[BaseException] = None
        self._over.acquire()

    def start(self) -> bool:
        """False: there is no other thread, as at the interpreter's end."""
        try:
            self._started.extend(map(_thread.start_new_thread, (self._work,), ((),)))  # no signal in between
        except RuntimeError:
            return False
        return True

    def _work(self) -> None:
        try:
            _library.call(self._name, *self._arguments)
        except BaseException as error:
            self.error = error
        with self._guard:
            self._ended = not self._given_up
        if not self._ended:
            self._take_back()
            with self._guard:
                self._ended = True
            if self._handle:
                _library.library().kld_close(self._handle)
        self._over.release()

    def _take_back(self) -> None:
        if self.error is None and self._undo is not None and not self._handle:
            try:
                self._undo()
            except KldError:  # the server is lost, and with it what it had
                pass

    def wait(self, seconds: float = -1.0) -> bool:
        """Until libkld has returned. False: not within that time."""
        if not self._started:
            return True
        got: List[bool] = []
        try:
            got.extend(map(self._over.acquire, (True,), (min(seconds, threading.TIMEOUT_MAX),)))
            return got[0]
        finally:
            if got and got[0]:
                self._over.release()  # for who waits next

    def give_up(self) -> None:
        """By who asked, under the connection's lock."""
        with self._guard:
            self._given_up = True
            ended = self._ended
        if ended:
            self._take_back()

    def close_behind(self, handle: Any) -> bool:
        """Leaves kld_close() to the other thread. False: it has ended."""
        with self._guard:
            if self._ended or not self._started:
                return False
            self._handle, self._given_up = handle, True
            return True


def ask(connection: Connection, name: str, *arguments: Any, seconds: Optional[float] = None, keep: Any = None,
        undo: Optional[Callable[[], None]] = None) -> None:
    """Under the lock. seconds: for an answer; None: libkld's own. While the interpreter is finalized (a __del__() of
    what was global) no other thread has a turn any more."""
    main = threading.current_thread() is threading.main_thread()
    if connection.url.startswith("local:") or seconds is None and not main or sys.is_finalizing():
        _library.call(name, *arguments)
        return
    question = Question(name, arguments, keep, undo)
    try:
        connection._asked = question
        if not question.start():
            connection._asked = None
            _library.call(name, *arguments)
            return
        in_time = question.wait(-1.0 if seconds is None else seconds)
        if not in_time:
            raise KldTimeoutError(Status.DEADLINE, f"the server did not answer within {seconds:g} s")
        connection._asked = None
        if question.error is not None:
            raise question.error
    except BaseException:
        question.give_up()
        raise


__all__ = ["Question", "ask"]
