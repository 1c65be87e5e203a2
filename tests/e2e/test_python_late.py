"""Arrays given as `out` behind a request that was given up: a server that shares them writes no more when it is said."""
import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from conftest import suspend
from pythonlib import environment, import_kld

kld = import_kld()
import kld._request  # noqa: E402

ROWS, CLASSES = 40000, 1000  # some 100 ms of work


def arrays(connection):
    made = [connection.empty((ROWS, CLASSES)) for _ in range(3)]
    for array, value in zip(made, (0.5, 0.25, 0)):
        array[:] = value
    return made


def test_out_is_not_written_behind_a_timeout(server):
    with kld.connect(server.url_unix) as connection:
        predictions, targets, out = arrays(connection)
        with pytest.raises(kld.KldTimeoutError) as caught:
            connection.kl_div(predictions, targets, divergence="js", out={"grad_predictions": out}, timeout=0.002)
        out[:] = 0  # this step is skipped
        assert "may still be written" not in str(caught.value)
        time.sleep(0.5)
        assert np.count_nonzero(out) == 0
        assert not connection._memory.find(out.ctypes.data, 1).spoiled, "its memory may be used again"


def test_what_only_the_server_may_write_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(kld._request, "have_ended", lambda *_: pytest.fail("waited"))
    with kld.connect(server.url_unix) as connection:
        predictions, targets, out = arrays(connection)
        for more in ({}, {"out": {"grad_predictions": np.zeros((ROWS, CLASSES), np.float32)}}):
            with pytest.raises(kld.KldTimeoutError):
                connection.kl_div(predictions, targets, divergence="js", timeout=0.002, **more)
        with pytest.raises(kld.KldValueError):
            connection.kl_div(predictions, targets, divergence="jsd", out={"grad_predictions": out})


def test_out_is_not_written_behind_ctrl_c(server):
    program = """
import os, signal, sys, threading, time, numpy as np, kld
signal.signal(signal.SIGINT, signal.default_int_handler)
connection = kld.connect(sys.argv[1])
q, out = connection.empty((%d, %d)), connection.empty((%d, %d))
q[:] = 1e-3
def interrupt():
    while not connection._held:
        time.sleep(0.0005)
    time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGINT)
thread = threading.Thread(target=interrupt)
thread.start()
try:
    connection.kl_div(q, q, divergence="js", out={"grad_predictions": out})
    raise SystemExit("it was faster")
except KeyboardInterrupt:
    out[:] = 7
thread.join()
time.sleep(0.5)
print((out == 7).all())
""" % (ROWS, CLASSES, ROWS, CLASSES)
    done = subprocess.run([sys.executable, "-c", program, server.url_unix], capture_output=True, text=True, timeout=60,
                          env=environment())
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("status, attempts, waits", [("DEADLINE", 1, True), ("CANCELLED", 2, True), ("DEADLINE", 0, False),
                                                     ("UNAVAILABLE", 1, False), (None, 1, True)])
def test_it_is_waited_for_on_the_stream_of_the_request(monkeypatch, status, attempts, waits):
    """As of tensors on a GPU. Not what was never sent, nor what has ended."""
    error = KeyboardInterrupt() if status is None else kld._errors.from_status(kld.Status[status], "why")
    call, asked = object.__new__(kld._request.Call), []
    for name, value in {"connection": types.SimpleNamespace(_pending=[ctypes.c_uint64()]), "where": None, "in_place": True,
                        "result": types.SimpleNamespace(attempts=attempts), "_shared_out": True, "_written": [],
                        "request": kld._library.Request(stream=5), "_reference": None, "_meanwhile": None}.items():
        setattr(call, name, value)
    monkeypatch.setattr(kld._request, "have_ended", lambda connection, stream, keep: asked.append((stream, keep)) or True)

    def submit(*_):
        raise error
    monkeypatch.setattr(kld._request, "submit", submit)
    with pytest.raises(type(error)):
        call.submit()
    assert asked == ([(5, call)] if waits else [])


def test_a_server_that_does_not_end_it_is_told_of(make_server, monkeypatch):
    monkeypatch.setattr(kld._request, "LATE_SECONDS", 0.3)
    server = make_server()
    worker = server.child("worker")
    with kld.connect(server.url_unix) as connection:
        q, out = connection.empty((100, 1000)), connection.empty((100, 1000))
        q[:] = 1e-3
        connection.kl_div(q, q, out={"grad_predictions": out})  # the server knows them
        suspend(worker)
        try:
            start = time.monotonic()
            with pytest.raises(kld.KldTimeoutError, match="in out may still be written"):
                connection.kl_div(q, q, out={"grad_predictions": out}, timeout=0.1)
            assert time.monotonic() - start < 4
        finally:
            os.kill(worker, signal.SIGCONT)
        assert connection.kl_div(q, q, out={"grad_predictions": out}).loss == 0


def _calls(connection):
    """Of each kind that writes to new shared memory: NumPy's, PyTorch's first and known ones."""
    q = np.full((100, 1000), 1e-3, np.float32)
    yield lambda: connection.kl_div(q, q)
    try:
        import torch
    except ImportError:
        return
    from kld.functional import kl_div
    leaf, target = torch.from_numpy(q).log().requires_grad_(), torch.from_numpy(q)
    for more in ({}, {"row_mask": torch.ones(100, dtype=torch.bool)}):
        kl_div(leaf, target, connection=connection, **more)
        yield lambda more=more: kl_div(leaf, target, connection=connection, **more)


@pytest.mark.parametrize("statuses, attempts, kept", [
    (["INVALID"], 1, True), (["BUSY"], 0, True), (["TOO_LARGE", "INVALID"], 1, True), (["BUSY"], 2, False),
    (["NO_MEMORY", "NO_MEMORY"], 1, False), (["NO_MEMORY", "BUSY"], 1, False), (["DEADLINE"], 1, False)])
def test_memory_of_a_failed_request_is_kept_where_no_device_saw_it(server, monkeypatch, statuses, attempts, kept):
    """Neither at this attempt nor at one before."""
    with kld.connect(server.url_unix) as connection:
        for call in _calls(connection):
            connection._memory.forget_cached()
            left = list(statuses)

            def once(*_):
                connection._result.attempts = attempts
                return kld.Status[left.pop(0)]

            with monkeypatch.context() as patched:
                patched.setattr(kld._request, "_submit_once", once)
                patched.setattr(connection._memory, "forget_cached", lambda: True)
                with pytest.raises(kld.KldError):
                    call()
            gc.collect()
            connection.ping()
            assert not left and (connection._memory.cached_bytes > 0) == kept
