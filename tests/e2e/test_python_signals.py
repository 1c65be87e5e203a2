"""Signals that come into a call of the Python package: the first Ctrl-C, the second, a handler that closes the
connection, at any moment. Each in a process of its own, since signals are for its main thread."""
import os
import signal
import subprocess
import sys
import time

import pytest

from conftest import suspend
from httplib import Late, unless_late
from pythonlib import beside_a_stopped_worker, environment, import_kld

import_kld()
BEGINNING = """
import gc, os, signal, sys, threading, time, numpy as np, kld
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it

def interrupt(*after, running=False):  # seconds; of what is running, not from now
    def work():
        while running and connection._held is None:
            time.sleep(0.002)
        for seconds in after:
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    return thread

def tell():  # once a request is on its way
    def work():
        while not connection._pending[0].value:
            time.sleep(0.002)
        print("running", flush=True)
    threading.Thread(target=work).start()

def long(rows=4000):  # a second and more of work for one thread
    return dict(predictions=np.tile(np.linspace(0, 9, 4000), (rows, 1)), targets=np.ones((rows, 4000)),
                predictions_form="logits", targets_form="logits", divergence="js", grad="both")

connection = kld.connect(sys.argv[1], **({"threads": 1} if sys.argv[1].startswith("local:") else {}))
few = np.full((4, 8), 1 / 8)
connection.kl_div(few, few)
"""


ENDED = "AssertionError: the job has ended: nothing was tested"  # a signal that came behind it


def run(program, url, timeout=60):
    done = subprocess.run([sys.executable, "-c", BEGINNING + program, url], capture_output=True, text=True,
                          timeout=timeout, env=environment())
    if ENDED in done.stderr.splitlines()[-1:]:
        raise Late(done.stderr)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


@unless_late
def test_a_second_ctrl_c_leaves_the_memory_of_what_still_computes():
    """local: cannot take a job back. Its inputs, which nobody else has, stay; so do its outputs; and what is asked for
    next comes behind it."""
    assert run("""
thread = interrupt(0.05, 0.05, running=True)
try:
    connection.kl_div(**long())
except KeyboardInterrupt:
    pass
thread.join()
gc.collect()
assert connection._pending[0].value, "the job has ended: nothing was tested"
try:
    connection.kl_div(few, few, timeout=0.01)
except TimeoutError as error:
    print("late:", error)
mine = [np.full((4000, 4000), 7.0), connection.empty((4000, 4000), float)]  # the second behind the job
mine[1][:] = 7
assert not connection._pending[0].value and connection._held is None
assert connection.kl_div(few, few).loss == 0
assert all((one == 7).all() for one in mine)
""", "local:cpu") == "late: the timeout passed behind another request of this connection\n"


@pytest.mark.parametrize("end", ["connection.close()", "pass"])
@unless_late
def test_the_end_of_the_process_waits_for_what_still_computes(end):
    run(f"""
thread = interrupt(0.05, 0.05, running=True)
try:
    connection.kl_div(**long())
except KeyboardInterrupt:
    pass
thread.join()
assert connection._pending[0].value, "the job has ended: nothing was tested"
{end}
""", "local:cpu")


STOPPED = """
out, q = connection.empty((100, 1000)), connection.empty((100, 1000))
q[:] = 1e-3
connection.kl_div(q, q, out={"grad_predictions": out})
library = kld._library.library()
cancel = library.kld_cancel
def cancelled(*more):
    cancel(*more)
    print("cancelled", flush=True)
library.kld_cancel = cancelled
print("ready", flush=True)
sys.stdin.readline()
tell()
try:
    connection.kl_div(q, q, out={"grad_predictions": out}, timeout=60)
except KeyboardInterrupt:
    print("interrupted", connection._pending[0].value > 0, flush=True)
sys.stdin.readline()
print(connection.kl_div(few, few).loss, connection._pending[0].value, connection._held, flush=True)
"""


def test_a_second_ctrl_c_beside_a_worker_that_is_stopped(make_server):
    with beside_a_stopped_worker(make_server(), BEGINNING + STOPPED) as (client, go_on):
        for word in ("running\n", "cancelled\n"):
            assert client.stdout.readline() == word
            time.sleep(0.1)  # for the call that it says it in
            client.send_signal(signal.SIGINT)
        assert client.stdout.readline() == "interrupted True\n"
        go_on()
        out, err = client.communicate("go\n", timeout=30)
        assert out == "0.0 0 None\n", err


def test_at_any_moment_the_lock_is_let_go_of():
    """Signals at moments of all kinds, into calls that do nothing but take the lock, and into requests."""
    assert run("""
import random
random.seed(1)
signal.signal(signal.SIGALRM, signal.default_int_handler)
found = [0, 0]
def look():
    if connection._lock.acquire(blocking=False):
        connection._lock.release()
        held.append(False)
begin = time.monotonic()
while time.monotonic() < begin + (2.5 if found[0] > 500 else 30):  # a busy machine takes its time
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 4e-4))
        while True:
            connection._alone(int)
            connection.kl_div(few, few)
    except KeyboardInterrupt:
        found[0] += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    held = []
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    if held != [False]:
        found[1] += 1
        break
assert found[0] > 500, found
print(found[1])
""", "local:cpu") == "0\n"


@unless_late
def test_a_handler_may_close_the_connection():
    """...into whose request it came: that is over first. It may not ask for more there."""
    assert run("""
said = []
def handler(*_):
    try:
        connection.ping()
    except kld.KldBusyError as error:
        said.append(str(error))
    connection.close()
    said.append(connection.closed)

signal.signal(signal.SIGINT, handler)
thread = interrupt(0.05, running=True)
result = connection.kl_div(**long(2000))
thread.join()
assert len(said) == 2, "the job has ended: nothing was tested"
assert result.grad_targets.shape == (2000, 4000) and connection._handle.value is None
try:
    connection.kl_div(few, few)
except kld.KldConnectionError as error:
    print(said[1], error)
assert "in the middle of a call of this thread" in said[0]
""", "local:cpu") == "True this connection was closed\n"


def test_a_handler_may_close_the_connection_while_an_array_is_given_back(server):
    """...which takes the connection's lock, too, and then lets go of it for good."""
    assert run("""
signal.signal(signal.SIGINT, lambda *_: connection.close())
published = connection.publish("test/closed", few)
array, collect = connection.empty((8, 4000)), connection._memory.collect

def collect_under_a_signal():
    connection._memory.collect = collect
    assert connection._is_mine()
    signal.raise_signal(signal.SIGINT)
    collect()

connection._memory.collect = collect_under_a_signal
del array
assert connection._memory.collect is collect, "nothing was given back"
assert connection.closed and published.closed and connection._handle.value is None
with kld.connect(sys.argv[1]) as other:
    try:
        other.attach("test/closed")
        print("it is still there")
    except LookupError:
        pass
try:
    connection.kl_div(few, few)
except kld.KldConnectionError as error:
    print(error)
""", server.url_unix) == "this connection was closed\n"


@pytest.mark.parametrize("call", ['connection.attach("test/nobody", timeout=50)',
                                  'kld.connect("unix:/nowhere/kld.sock", connect_timeout=50)'])
def test_ctrl_c_ends_a_wait(server, call):
    assert float(run(f"""
start = time.monotonic()
try:
    interrupt(0.3)  # in here: it may come before the call begins
    {call}
except KeyboardInterrupt:
    print(time.monotonic() - start)
assert connection.kl_div(few, few).loss == 0
""", server.url_unix)) < 30


def said_beside_a_stopped_worker(server, program, *arguments, go_on=True):
    """What a program said while its worker stood still, and at its end. It reads a line before that, and the worker goes on
    before it gets it, or not."""
    with beside_a_stopped_worker(server, BEGINNING + program, *arguments) as (client, worker_goes_on):
        said = client.stdout.readline()
        if go_on:
            worker_goes_on()
        out, err = client.communicate("go\n", timeout=50)
        assert client.returncode == 0, (out, err)
        return said, out


def test_a_connection_that_comes_behind_a_ctrl_c_is_closed(make_server):
    """The worker lets nobody in while it is stopped."""
    assert said_beside_a_stopped_worker(make_server(http=""), """
print("ready", flush=True)
sys.stdin.readline()
try:
    interrupt(0.3)
    kld.connect(sys.argv[1], connect_timeout=20)
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
for _ in range(600):
    if connection.stats()["clients"] == int(sys.argv[2]):
        break
    time.sleep(0.05)
print(connection.stats()["clients"])
""", "1") == ("interrupted\n", "1\n")  # this one; there is no gateway


def test_a_timeout_holds_behind_another_thread(server):
    run("""
over = threading.Event()
def busy():
    with connection._lock:
        over.wait(50)
thread = threading.Thread(target=busy)
thread.start()
time.sleep(0.1)
start = time.monotonic()
try:
    connection.kl_div(few, few, timeout=0.3)
    raise SystemExit("in time")
except TimeoutError:
    assert 0.25 < time.monotonic() - start < 30
over.set()
thread.join()
assert connection.kl_div(few, few, timeout=30).loss == 0
waits = threading.Thread(target=lambda: [connection.attach("test/nobody", timeout=20)], daemon=True)
threading.excepthook = lambda _: None  # nobody publishes it
waits.start()
time.sleep(0.2)
start = time.monotonic()
assert connection.kl_div(few, few, timeout=15).loss == 0 and time.monotonic() - start < 15
""", server.url_unix)


@pytest.mark.parametrize("kind, child", [("http", "gateway"), ("unix", "worker")])
@unless_late
def test_a_daemon_thread_that_waits_in_vain_does_not_keep_the_process(make_server, kind, child):
    """It asks again and again, of a server that takes requests and answers none."""
    server = make_server()
    stopped = server.child(child)
    with subprocess.Popen([sys.executable, "-c", BEGINNING + """
q = connection.empty((100, 1000))
q[:] = 1e-3
connection.kl_div(q, q)
print("ready", flush=True)
sys.stdin.readline()
def work():
    while not connection.closed:
        try:
            connection.kl_div(q, q)
        except kld.KldError as error:
            print(error, flush=True)
threading.Thread(target=work, daemon=True).start()
while not connection._pending[0].value:
    time.sleep(0.002)
""", server.http if kind == "http" else server.url_unix], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, env=environment()) as client:
        try:
            assert client.stdout.readline() == "ready\n"
            suspend(stopped)
            out, err = client.communicate("go\n", timeout=30)  # it takes a second; else it has no end
            assert client.returncode == 0, (client.returncode, out, err)
            if not out:
                raise Late("the thread got no processor in the second that it has for its word")
            assert "given up" in out, (out, err)
        finally:
            os.kill(stopped, signal.SIGCONT)
            client.kill()


def test_what_a_daemon_thread_computes_here_is_waited_for():
    run("""
threading.Thread(target=lambda: connection.kl_div(**long()), daemon=True).start()
while not connection._pending[0].value:
    time.sleep(0.002)
import atexit
atexit._run_exitfuncs()
assert connection._handle.value is None and not connection._pending[0].value
""", "local:cpu")


ASKED = """
connection = kld.connect(sys.argv[1], connect_timeout=60)
few = connection.empty((4, 8))
few[:] = 1 / 8
connection.kl_div(few, few)
other = kld.connect(sys.argv[1])
there = other.publish("test/there", few)
before = -1
while before != (now := connection.stats()["regions"]):  # of all clients; some may just be taken or given back
    before = now
    time.sleep(0.3)
print("ready", flush=True)
sys.stdin.readline()
start = time.monotonic()
try:
    interrupt(0.3)
    connection.%s
except KeyboardInterrupt:
    print("interrupted", flush=True)
assert time.monotonic() - start < 30, time.monotonic() - start
%s
"""
CALLS = ["ping()", "stats()", 'publish("test/left", few)', 'attach("test/there")', 'attach("test/there", timeout=60)']


def ask_stopped(make_server, call, then, go_on):
    return said_beside_a_stopped_worker(make_server().wait_linked(), ASKED % (call, then), go_on=go_on)


@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_ends_a_call_that_the_server_does_not_answer(make_server, call):
    """And what comes of it later is taken back."""
    assert ask_stopped(make_server, call, """
sys.stdin.readline()
connection.publish("test/left", few).close()
for _ in range(1500):
    if connection.stats()["regions"] == before:
        break
    time.sleep(0.02)
print(connection._asked, connection.stats()["regions"] - before, connection.kl_div(few, few).loss)
""", go_on=True) == ("interrupted\n", "None 0 0.0\n")


@pytest.mark.parametrize("call", CALLS[1:4])
def test_close_does_not_wait_for_a_call_that_was_left(make_server, call):
    assert ask_stopped(make_server, call, """
connection.close()
few[:] = 1
assert connection.closed and time.monotonic() - start < 30, time.monotonic() - start
""", go_on=False) == ("interrupted\n", "")


def test_where_no_thread_can_be_started_the_call_is_made_all_the_same(server):
    """As at the interpreter's end, where atexit calls one that ends a publication (Python 3.12 starts no thread there)."""
    run("""
import _thread
def none(*ignored):
    raise RuntimeError("can't create new thread at interpreter shutdown")
_thread.start_new_thread = threading._start_new_thread = none
assert connection.ping() > 0
with kld.connect(sys.argv[1]) as other:
    assert other.ping() > 0
published = connection.publish("test/end", connection.empty((2, 3)))
published.close()
try:
    connection.attach("test/end")
    raise SystemExit("it is still there")
except LookupError:
    pass
""", server.url_unix)


@pytest.mark.parametrize("last", ["published.close()", "connection.ping()", "connection.stats()",
                                  'connection.attach("test/nobody", timeout=0.1)',
                                  'connect("http://127.0.0.1:1", connect_timeout=0.2)', "connect(connection.url).ping()"])
def test_what_a_global_object_asks_for_at_the_end(server, last):
    """Its __del__() runs while the interpreter is finalized, when no other thread has a turn any more."""
    assert run(f"""
class Last:
    connect, KldError = staticmethod(kld.connect), kld.KldError

    def __init__(self):
        self.connection = connection
        self.published = connection.publish("test/last", few)

    def __del__(self):
        connect, connection, published = self.connect, self.connection, self.published
        try:
            {last}
        except self.KldError:
            pass
        print("over", connection.closed)

last = Last()
print("script ends")
""", server.url_unix, 20) == "script ends\nover False\n"


def test_what_was_left_and_has_no_answer_does_not_keep_the_process(make_server):
    """Its thread has no turn any more when a global object asks for more."""
    assert said_beside_a_stopped_worker(make_server(), """
class Last:
    def __init__(self):
        self.connection, self.error = connection, kld.KldError

    def __del__(self):
        try:
            self.connection.ping()
        except self.error as error:
            print(type(error).__name__, flush=True)

last = Last()
print("ready", flush=True)
sys.stdin.readline()
try:
    interrupt(0.3)
    connection.ping()
except KeyboardInterrupt:
    print("interrupted", flush=True)
""", go_on=False) == ("interrupted\n", "KldTimeoutError\n")
