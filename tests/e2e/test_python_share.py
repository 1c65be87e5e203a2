"""Published and attached tensors from Python, on the CPU: a teacher's process and those of students, what is copied,
how each end finishes; and Ctrl-C while a request runs."""
import copy
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from conftest import suspend, wait_until
from pythonlib import beside_a_stopped_worker, environment, import_kld, import_torch, probabilities

kld = import_kld()
from kld import _library, _request  # noqa: E402

SHAPE = (80, 300)
LOGITS = {"predictions_form": "logits"}


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu(backend):
    if backend != "cpu":
        pytest.skip("of CPU memory; test_python_cuda.py has the same on a GPU")


@pytest.fixture
def connections(server):
    with kld.connect(server.url_unix) as one, kld.connect(server.url_unix) as other:
        yield one, other


def test_attached_in_the_place_of_an_array(connections):
    teacher, student = connections
    p, q = probabilities(1, SHAPE), probabilities(2, SHAPE)
    shared = teacher.empty(SHAPE)
    shared[:] = p
    right = student.kl_div(q, p, grad="predictions")
    with teacher.publish("test/probs", shared) as published, student.attach("test/probs") as attached:
        assert published.array is shared and teacher.copied_bytes == 0
        assert (attached.shape, attached.dtype, attached.form) == (SHAPE, "float32", "probs")
        assert attached.owner_uid == os.getuid()
        assert repr(attached) == "<kld.Attached 'test/probs' probs float32[80, 300]>"
        mine = student.empty(SHAPE)
        mine[:] = q
        before = student.copied_bytes
        result = student.kl_div(mine, attached)
        assert student.copied_bytes == before
        assert result.loss == right.loss
        np.testing.assert_array_equal(result.grad_predictions, right.grad_predictions)
        shared[:] = q  # what is there when the request runs
        assert student.kl_div(mine, attached).loss == 0
        with pytest.raises(ValueError, match="attached over another connection"):
            teacher.kl_div(mine, attached)
        with pytest.raises(ValueError, match="must be the same"):
            student.kl_div(mine[1:], attached)
        for tensor, instead in ((attached, "give it to kl_div"), (published, "that is its `array`")):
            with pytest.raises(TypeError, match=instead):
                np.asarray(tensor)
    with pytest.raises(ConnectionError, match="was closed"):
        student.kl_div(mine, attached)


def test_closing_what_is_published_from_within_a_request(connections):
    """As a signal's handler would: refused, and then it is as it was."""
    teacher, student = connections
    published = teacher.publish("test/within", probabilities(1, SHAPE))

    def within():
        with pytest.raises(kld.KldBusyError):
            published.close()

    teacher._alone(within)
    assert not published.closed
    student.attach("test/within", timeout=0).close()
    published.close()
    published.close()
    with pytest.raises(kld.KldLookupError):
        student.attach("test/within")


def test_a_late_gradient_of_a_closed_tensor(connections):
    """The backward pass of the reduction none with logits asks again: not where a closed tensor lay."""
    torch = import_torch()
    from kld import functional
    teacher, student = connections
    z = torch.zeros(SHAPE, requires_grad=True)
    with teacher.publish("test/late", probabilities(1, SHAPE)), student.attach("test/late") as attached:
        loss = functional.kl_div(z, attached, reduction="none", input_form="logits").sum()
        torch.autograd.grad(loss, z, retain_graph=True)
        view = attached.view(student)
    with pytest.raises(kld.KldConnectionError, match="'test/late' was closed"):
        loss.backward()
    with pytest.raises(kld.KldConnectionError, match="was closed"):
        kld._request.Call(student, kld._request.Parameters(), SHAPE, None).input("targets", view)
    assert student.kl_div(probabilities(2, SHAPE), probabilities(1, SHAPE)).loss > 0


def test_forms_dtypes_and_what_is_copied(connections):
    teacher, student = connections
    z = np.random.default_rng(3).normal(size=(2, 5, 30))
    wide = teacher.empty((2, 5, 50), np.float64)
    wide[..., 10:40] = z
    for name, array in (("plain", z), ("gaps", wide[..., 10:40]), ("turned", np.asfortranarray(z))):
        with teacher.publish("test/" + name, array, "logits") as published:
            np.testing.assert_array_equal(published.array, z)
            assert (published.array is array) == (name == "gaps")
            with student.attach("test/" + name) as attached:
                assert (attached.form, attached.dtype, attached.shape) == ("logits", "float64", (2, 5, 30))
                q = np.random.default_rng(4).normal(size=z.shape)
                mine = student.kl_div(q, attached, temperature=2.0, **LOGITS)
                right = student.kl_div(q, z, temperature=2.0, targets_form="logits", **LOGITS)
                assert mine.loss == right.loss
                other = student.kl_div(attached, attached, temperature=2.0, divergence="js", grad=False)
                assert other.loss == 0


def test_names(connections, server):
    teacher, student = connections
    p = probabilities(1, SHAPE)
    with pytest.raises(kld.KldLookupError):
        student.attach("test/nobody")

    def waited():
        began = time.monotonic()
        try:
            student.attach("test/nobody", timeout=0.2)
        except TimeoutError:  # a worker without a processor says nothing in time
            return None
        except LookupError:
            return time.monotonic() - began
    assert 0.1 < wait_until(waited, what="the answer that nobody published it") < 20
    published = teacher.publish("test/name", p)
    with pytest.raises(kld.KldError, match="already") as raised:
        student.publish("test/name", p)
    assert raised.value.status == kld.Status.EXISTS
    for wrong, error in (("", ValueError), ("a b", ValueError), (7, TypeError)):
        with pytest.raises(error):
            teacher.publish(wrong, p)
    with pytest.raises(ValueError, match="unknown form 'odds'"):
        teacher.publish("test/other", p, "odds")
    for seconds in (-1, 1e9, float("nan")):
        with pytest.raises(ValueError, match="timeout is a number of seconds from 0 on, below 1e9, or inf"):
            student.attach("test/name", timeout=seconds)
    with pytest.raises(ValueError, match="this connection published 'test/name' itself; use the `array`"):
        teacher.attach("test/name")
    attached = student.attach("test/name", uid=os.getuid())
    published.close()
    published.close()
    with pytest.raises(kld.KldLookupError, match="the attached tensor 'test/name' is no longer published"):
        student.kl_div(p, attached)
    with kld.connect("local:cpu") as local, kld.connect(server.http) as http:
        for other in (local, http):
            with pytest.raises(NotImplementedError):
                other.publish("test/name", p)
            with pytest.raises(NotImplementedError):
                other.attach("test/name")


TEACHER = """
import sys, numpy as np, kld
connection = kld.connect(sys.argv[1])
logits = connection.empty((40, 300))
logits[:] = np.random.default_rng(7).normal(size=(40, 300))
connection.publish("test/teacher", logits, "logits")
print("published", flush=True)
sys.stdin.read()
"""
STUDENT = """
import os, sys, kld, torch
from kld.functional import kl_div
teacher = kld.attach("test/teacher", timeout=20)
torch.manual_seed(0)
z = torch.zeros(teacher.shape, requires_grad=True)
for _ in range(30):
    loss = kl_div(z, teacher, reduction="batchmean", input_form="logits", temperature=2.0, scale=4.0)
    loss.backward()
    with torch.no_grad():
        z -= 300 * z.grad
        z.grad = None
print(float(loss))
none = kl_div(z, teacher, reduction="none", input_form="logits").sum(-1)
none.sum().backward()
print(float((none - kl_div(z, teacher, reduction="row", input_form="logits")).abs().max()), float(z.grad.abs().max()))
"""


def test_a_teacher_and_two_students(server):
    pytest.importorskip("torch")
    with subprocess.Popen([sys.executable, "-c", TEACHER, server.url_unix], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, env=environment()) as teacher:
        try:
            assert teacher.stdout.readline() == "published\n"
            said = [subprocess.run([sys.executable, "-c", STUDENT], capture_output=True, text=True, timeout=100,
                                   env=environment(KLD_SERVER=server.url_unix)) for _ in range(2)]
        finally:
            teacher.stdin.close()
    assert all(one.returncode == 0 for one in said), said[0].stderr
    losses = [float(one.stdout.split()[0]) for one in said]
    assert losses[0] == losses[1] < 0.1
    assert float(said[0].stdout.split()[1]) < 1e-5 < float(said[0].stdout.split()[2])


INTERRUPTED = """
import signal, sys, threading, time, numpy as np, kld
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it
connection = kld.connect(sys.argv[1])
q = np.full((4, 8), 1 / 8)
connection.kl_div(q, q)
library = kld._library.library()
cancel, cancelled = library.kld_cancel, []
library.kld_cancel = lambda *more: cancelled.append(more[1].value) or cancel(*more)
def tell():
    while not connection._pending[0].value:
        time.sleep(0.002)
    print("running", flush=True)
print("ready", flush=True)
sys.stdin.readline()
threading.Thread(target=tell).start()
try:
    connection.kl_div(q, q, timeout=60)
    print("done")
except KeyboardInterrupt:
    print("interrupted", [number > 0 for number in cancelled], flush=True)
sys.stdin.readline()
print(connection.kl_div(q, q).loss, flush=True)
"""


def test_what_is_not_published_again_is_told(make_server):
    """Another connection of the user takes the name of one that was lost with its server."""
    server, values = make_server(http=""), probabilities(1, SHAPE)
    with kld.connect(server.url_unix) as teacher, kld.connect(server.url_unix) as other:
        published = teacher.publish("test/again", values)
        for _ in range(2):
            server.kill_child("worker")
            teacher.kl_div(values, values)
            published.check()
        server.kill_child("worker")
        with other.publish("test/again", values):
            with pytest.raises(kld.KldError, match="not published again after its server was lost"):
                wait_until(published.check, what="the refusal")
        published.close()
        published.check()  # of what is closed nothing is wanted
        teacher.publish("test/again", values).close()


def test_ctrl_c_gives_a_request_up(make_server):
    """The worker is stopped, so the request waits; after it the connection works."""
    with beside_a_stopped_worker(make_server(), INTERRUPTED) as (client, go_on):
        assert client.stdout.readline() == "running\n"
        client.send_signal(signal.SIGINT)
        time.sleep(1)
        assert client.poll() is None  # its memory is the worker's until that has answered
        go_on()
        assert client.stdout.readline() == "interrupted [True]\n"
        out, err = client.communicate("go\n", timeout=30)
        assert re.fullmatch(r"0\.0\n", out), err


def test_attach_holds_its_timeout_where_the_server_does_not_answer(make_server):
    server = make_server()
    worker = server.child("worker")
    with kld.connect(server.url_unix, connect_timeout=60) as connection:
        q = probabilities(1, SHAPE)
        suspend(worker)
        try:
            for call, error in (((lambda: connection.attach("test/left", timeout=0.2)), "did not answer within"),
                                ((lambda: connection.kl_div(q, q, timeout=0.1)), "behind another request")):
                start = time.monotonic()
                with pytest.raises(kld.KldTimeoutError, match=error):
                    call()
                assert time.monotonic() - start < 30
        finally:
            os.kill(worker, signal.SIGCONT)
        assert connection.kl_div(q, q).loss == 0
        with pytest.raises(kld.KldLookupError):
            connection.attach("test/left")


def test_memory_of_a_published_array_goes_with_it(server):
    with kld.connect(server.url_unix) as connection:
        first = connection._memory.counts()[0]
        published = connection.publish("test/gone", probabilities(1, (100, 1000)))
        assert connection._memory.counts()[0] == first + 1
        published.close()
        del published
        wait_until(lambda: connection._tidy() or connection._memory.cached_bytes > 0, what="memory given back")


def test_memory_of_a_request_behind_its_tensors_end_is_used_again(connections):
    """No device saw it: who goes on asking, or asks by another one that is gone as well, makes no new memory each time."""
    teacher, student = connections
    p = probabilities(1, (100, 1000))
    published = [teacher.publish(f"test/ended-{i}", p) for i in range(2)]
    attached = [student.attach(f"test/ended-{i}") for i in range(2)]
    assert student.kl_div(attached[0], attached[1]).loss == 0
    for one in published:
        one.close()
    made, spans = student._memory._map, []
    student._memory._map = lambda size: spans.append(size) or made(size)
    for _ in range(10):
        for pair in ((p, attached[0]), (p, attached[1]), (attached[0], attached[1])):
            with pytest.raises(kld.KldLookupError, match="no longer published"):
                student.kl_div(*pair)
    assert len(spans) < 4


@pytest.mark.parametrize("losses, unseen", [((0, 0), (True, True)), ((1, 1), (False, True)), ((0, 1), (True, False))])
def test_a_tensor_that_did_not_come_back_says_nothing_of_the_first_server(connections, monkeypatch, losses, unseen):
    """A server that had the request may have been lost before libkld says that the tensor is gone."""
    student, counted = connections[1], list(losses)
    monkeypatch.setattr(_library.library(), "kld_losses", lambda _: counted.pop(0))
    gone = kld.Status.GONE
    assert tuple(_request._failure(student, gone, gone).is_unseen for _ in losses) == unseen


def test_a_child_made_by_fork_keeps_no_connection_open(connections, server):
    """...that its parent closes. Nor does it end the parent's."""
    student = connections[1]
    program = """
import os, sys, numpy as np, kld
connection = kld.connect(sys.argv[1])
connection.publish("test/forked", np.ones((4, 8)) / 8)
stay, leave = os.pipe()
if os.fork() == 0:
    from kld import _library
    if sys.argv[2] == "child":
        _library.library().kld_close(connection._handle)
    print("child", flush=True)
    os.close(leave)
    os.read(stay, 1)
    os._exit(0)
sys.stdin.readline()
if sys.argv[2] == "parent":
    connection.close()
print("on", flush=True)
sys.stdin.readline()
"""
    for who in ("parent", "child"):
        with subprocess.Popen([sys.executable, "-c", program, server.url_unix, who], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True, env=environment()) as process:
            assert process.stdout.readline() == "child\n"
            student.attach("test/forked").close()
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "on\n"
            if who == "parent":
                wait_until(lambda: not attachable(student, "test/forked"), what="the end of what was published")
            else:
                student.attach("test/forked").close()
            process.stdin.close()


def attachable(student, name):
    try:
        student.attach(name).close()
    except kld.KldLookupError:
        return False
    return True


def test_what_went_wrong_is_not_hidden_by_a_server_that_is_gone(make_server):
    server = make_server()
    with pytest.raises(RuntimeError, match="mine"):
        with kld.connect(server.url_unix, connect_timeout=60) as connection:
            with connection.publish("test/hidden", probabilities(1, SHAPE)):
                server.stop()
                start = time.monotonic()
                raise RuntimeError("mine")
    assert time.monotonic() - start < 30


def test_a_number_is_no_tensor_to_publish(connections):
    with pytest.raises(ValueError, match="0 dimensions; kld takes 1 to 8"):
        connections[0].publish("test/scalar", np.float32(3))


def test_an_attached_tensor_that_nobody_has_any_more_is_let_go_of(connections, server):
    """Beyond the regions that a client may have, 1024."""
    teacher, student = connections
    with teacher.publish("test/dropped", probabilities(1, SHAPE)):
        for _ in range(1100):
            attached = student.attach("test/dropped")
        region = attached._region
        with student._lock:  # in use, by a thread that has the last one
            del attached
            assert [one is region for one in student._dropped] == [True]
        student.ping()
        assert not student._dropped


@pytest.mark.parametrize("arguments, error, text", [
    ({"name": "test/a\0b"}, ValueError, "has a NUL"), ({"name": "test/\udc80"}, ValueError, "no UTF-8"),
    ({"uids": [-1]}, ValueError, "user -1; expected 0 to 4294967294"),
    ({"uids": [1 << 32]}, ValueError, "user 4294967296"), ({"uids": ["x"]}, TypeError, "not str")])
def test_what_publish_and_attach_refuse(connections, arguments, error, text):
    teacher, student = connections
    with pytest.raises(error, match=text):
        teacher.publish(**{"name": "test/refused", "array": probabilities(1, SHAPE), **arguments})
    with teacher.publish("test/a", probabilities(1, SHAPE)), pytest.raises(error, match=text):
        for uid in arguments.get("uids", [None]):
            student.attach(arguments.get("name", "test/a"), uid=uid)


@pytest.mark.parametrize("seconds", [None, float("inf")])
def test_attach_without_a_limit(connections, seconds):
    teacher, student = connections
    timer = threading.Timer(0.3, lambda: teacher.publish("test/some-time", probabilities(1, SHAPE)))
    timer.start()
    student.attach("test/some-time", timeout=seconds).close()
    timer.join()


def test_what_cannot_be_published_is_called_array(connections):
    teacher, student = connections
    p = probabilities(1, SHAPE)
    with teacher.publish("test/array", p), student.attach("test/array") as attached:
        for array, error, text in ((p.astype(int), TypeError, "array has dtype int64"),
                                   (np.ma.masked_array(p, p > 1), ValueError, "array is a masked array"),
                                   ([[1.0], [1.0, 2.0]], (TypeError, ValueError), "array"),
                                   (attached, TypeError, "array is <kld.Attached 'test/array'.* published already")):
            for connection in connections:
                with pytest.raises(error, match=text) as raised:
                    connection.publish("test/refused", array)
                assert isinstance(raised.value, kld.KldError) and "predictions" not in str(raised.value)
    with pytest.raises(kld.KldTypeError, match="uids is a list of users, not int"):
        teacher.publish("test/refused", p, uids=5)


def test_copies_and_pickles_of_what_is_shared(connections):
    """A copy would be another one that ends it."""
    teacher, student = connections
    with teacher.publish("test/copied", probabilities(1, SHAPE)) as published, student.attach("test/copied") as attached:
        for one in (published, attached):
            assert copy.copy(one) is one and copy.deepcopy({"of": one})["of"] is one
            with pytest.raises(kld.KldTypeError, match="cannot be pickled; give others its name, for attach()"):
                pickle.dumps(one)
        gc.collect()
        student.attach("test/copied").close()


def test_what_is_shared_is_closed_with_its_connection(server):
    with kld.connect(server.url_unix) as teacher, kld.connect(server.url_unix) as student:
        published = teacher.publish("test/ends", probabilities(1, SHAPE))
        attached = student.attach("test/ends")
        assert not published.closed and not attached.closed
    assert published.closed and attached.closed and repr(attached).endswith("(closed)>")
    published.close()
    attached.close()


def test_log_target_and_the_form_that_was_published(connections):
    torch = import_torch()
    from kld.functional import kl_div
    teacher, student = connections
    q = torch.from_numpy(probabilities(1, SHAPE)).log()
    with teacher.publish("test/logits", q.numpy(), "logits"), student.attach("test/logits") as attached:
        with pytest.raises(kld.KldValueError, match="the attached tensor 'test/logits' was published as 'logits'"):
            kl_div(q, attached, log_target=True)
        assert kl_div(q, attached, log_target=True, target_form="logprobs") == 0
    with teacher.publish("test/logprobs", q.numpy(), "logprobs"), student.attach("test/logprobs") as attached:
        assert kl_div(q, attached, log_target=True) == kl_div(q, attached) == 0
