"""Tensors that one process publishes and others attach to, over raw frames: the same bits as from memory
of one's own, and clear errors when the owner takes it back, drops it, leaves or is killed. And what a
back end without a GPU says about events."""
import os
import signal
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import wire
from conftest import ROOT, wait_until
from unixlib import (Case, case, client, no_leak, path, worker_server, forward_kl,  # noqa: F401
                     softmax64, RNG)
from wire import Client, Failed, Memory, description, tensor

SHAPE = (48, 200)


@pytest.fixture
def teacher(path):
    """A client that published 48 x 200 logits 64 bytes into a region of its own."""
    with Client(path, name="teacher") as one:
        one.memory = Memory(64 + 4 * SHAPE[0] * SHAPE[1])
        one.logits = one.memory.array(64, SHAPE, "<f4")
        one.logits[:] = RNG.normal(size=SHAPE) * 2
        one.region_id = one.region(one.memory)
        one.publish("teacher/logits", one.region_id, description(SHAPE, form="logits"), 64)
        yield one
        one.memory.close()


class Student:
    def __init__(self, path):
        self.client = Client(path, name="student")
        self.case = Case(self.client, *SHAPE)
        self.case.q[:] = RNG.normal(size=SHAPE)
        self.region, self.size, self.tensor = self.client.attach("teacher/logits")

    def run(self, **parameters):
        tensors = self.case.tensors("predictions", "grad_predictions", targets=tensor(self.region))
        return self.client.run(SHAPE, tensors, predictions_form="logits", targets_form="logits",
                               reduction="sum", **parameters)["loss"]

    def close(self):
        self.case.close()
        self.client.close()


@pytest.fixture
def student(path, teacher):
    one = Student(path)
    yield one
    one.close()


def test_students_read_the_teachers_memory(path, teacher, student):
    assert student.size == teacher.logits.nbytes
    assert student.tensor == {"dtype": "FP32", "form": wire.FORMS["logits"], "shape": SHAPE, "stride": 0,
                              "uid": os.geteuid()}
    second = Student(path)
    for one, temperature in ((student, 1.0), (second, 4.0)):
        z, w = one.case.q.astype(np.float64) / temperature, teacher.logits / temperature
        expected = forward_kl(softmax64(z), softmax64(w)).sum()
        assert one.run(temperature=temperature) == pytest.approx(expected, rel=1e-5)
    own = Memory(teacher.logits.nbytes)
    own.array(0, SHAPE, "<f4")[:] = teacher.logits
    copy = student.client.region(own)
    attached, student.region = student.region, copy
    loss = student.run()
    student.region = attached
    assert struct.pack("d", loss) == struct.pack("d", student.run())
    teacher.logits[:] = 0  # no copy: the next request sees it
    uniform = np.full(SHAPE, 1 / SHAPE[1])
    expected = forward_kl(softmax64(student.case.q), uniform).sum()
    assert student.run() == pytest.approx(expected, rel=1e-5)
    own.close()
    second.close()


def test_what_is_attached_is_read_only(teacher, student):
    before = teacher.logits.copy()
    with pytest.raises(Failed, match="forbidden.*grad_predictions.*can be read, not written"):
        student.client.run(SHAPE, student.case.tensors(grad_predictions=tensor(student.region)))
    with pytest.raises(Failed, match="forbidden.*destination.*can be read, not written"):
        student.client.copy(student.region, 0, student.case.region, 0, 4)
    student.client.copy(student.case.region, 0, student.region, 0, student.size)
    np.testing.assert_array_equal(student.case.q, before)
    np.testing.assert_array_equal(teacher.logits, before)


def test_outside_of_what_was_published(teacher, student):
    with pytest.raises(Failed, match="invalid.*targets"):
        student.client.run((SHAPE[0] + 1, SHAPE[1]), {"predictions": tensor(student.case.region),
                                                      "targets": tensor(student.region)})


@pytest.mark.parametrize("way", ["detach", "drop", "leave"])
def test_gone_is_told_and_nothing_breaks(path, teacher, student, way):
    loss = student.run()
    if way == "detach":
        teacher.detach("teacher/logits")
    elif way == "drop":
        teacher.drop(teacher.region_id)
    else:
        teacher.close()
        wait_until(lambda: student.client.stats()["clients"] == 1, what="the teacher's end")
    for _ in range(2):
        with pytest.raises(Failed, match="gone: targets: .*no longer published"):
            student.run()
    with pytest.raises(Failed, match="not_found: no tensor of this name"):
        student.client.attach("teacher/logits")
    student.client.drop(student.region)
    with Client(path) as successor:  # the name is free for the next one
        region = successor.region(teacher.memory)
        successor.publish("teacher/logits", region, description(SHAPE, form="logits"), 64)
        student.region = student.client.attach("teacher/logits")[0]
        assert student.run() == loss


def test_owner_is_killed_while_students_compute(path):
    """A teacher process dies under 4 students that never pause: each request ends rightly or as gone."""
    code = f"""if True:
        import sys, time
        sys.path.insert(0, {str(ROOT / "tests/e2e")!r})
        import numpy as np
        from wire import Client, Memory, description
        client = Client({path!r}, name="teacher")
        memory = Memory({4 * SHAPE[0] * SHAPE[1]})
        memory.array(0, {SHAPE}, "<f4")[:] = np.arange({SHAPE[1]}) / 50
        client.publish("teacher/logits", client.region(memory), description({SHAPE}, form="logits"))
        print("ready", flush=True)
        time.sleep(60)"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout.readline() == b"ready\n"
    seen, problems = [], []

    def work():
        one = Student(path)
        try:
            losses = {one.run() for _ in range(5)}
            started.wait()
            while True:
                losses.add(one.run())
        except Failed as failed:
            seen.append((failed.status, losses))
        except BaseException as problem:
            problems.append(problem)
        finally:
            one.close()

    started = threading.Barrier(5)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    time.sleep(0.05)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    for thread in threads:
        thread.join()
    assert not problems, problems
    assert [status for status, _ in seen] == ["gone"] * 4 and all(len(losses) == 1 for _, losses in seen)


@pytest.mark.parametrize("name", ["", "two words", "x" * 64, "tab\t", b"a\0b"])
def test_bad_names(teacher, name):
    with pytest.raises(Failed, match="invalid.*printable letters without blanks"):
        teacher.publish(name, teacher.region_id, description(SHAPE), 64)


BAD_TENSORS = {
    "rank 0": (description((), "FP32"), "rank 0"),
    "rank 9": (description((4, 4), rank=9), "rank 9"),
    "no rows": (description((0, 4)), "dimension 0 is 0"),
    "too long": (description((SHAPE[0] + 1, SHAPE[1])), "do not fit a region"),
    "overflow": (description((1 << 40, 1 << 40)), "overflows 64 bits"),
    "stride": (description(SHAPE, stride=100), "row stride of 100"),
    "behind its rank": (description((4, 4), rank=1), "beyond its rank"),
}


@pytest.mark.parametrize("what", BAD_TENSORS)
def test_bad_descriptions(teacher, what):
    raw, said = BAD_TENSORS[what]
    with pytest.raises(Failed, match=f"invalid: published tensor: .*{said}"):
        teacher.publish("bad", teacher.region_id, raw, 64)


def test_names_are_given_once(path, teacher):
    with Client(path) as other:
        memory = Memory(4096)
        region = other.region(memory)
        with pytest.raises(Failed, match="exists: this user publishes"):
            other.publish("teacher/logits", region, description((4, 4)))
        with pytest.raises(Failed, match="not_found.*this connection published no tensor"):
            other.detach("teacher/logits")
        with pytest.raises(Failed, match="not_found"):
            other.publish("other", region + 1, description((4, 4)))
        memory.close()


def test_only_the_named_users_attach(path, teacher):
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    teacher.publish("for/1234", teacher.region_id, description(SHAPE), 64, uids=[1234])
    code = f"""if True:
        import os, sys
        sys.path.insert(0, {str(ROOT / "tests/e2e")!r})
        import wire
        from wire import Client, Failed
        os.setresuid(-1, int(sys.argv[1]), -1)
        client = Client({path!r})
        for name in ("teacher/logits", "for/1234", "not/there"):
            for uid in ({os.geteuid()}, wire.UID_OWN):
                try:
                    _, size, about = client.attach(name, uid)
                    print(size, about["uid"])
                except Failed as failed:
                    print(failed)"""
    os.chmod(path, 0o666)
    os.chmod(os.path.dirname(path), 0o755)
    said = [subprocess.run([sys.executable, "-c", code, uid], capture_output=True, text=True, check=True)
            .stdout.splitlines() for uid in ("1234", "1235")]
    refused = f"not_found: no tensor of this name is published by user {os.geteuid()} for this user"
    unknown = ("not_found: no tensor of this name is published by this user; to attach to another user's, name "
               "that user")
    # What is there, and not for them, is told like what is not.
    assert said == [[refused, unknown, f"{teacher.logits.nbytes} {os.geteuid()}", unknown, refused, unknown],
                    [refused, unknown] * 3]


# ---- Without a GPU ---------------------------------------------------------------------------------

def test_a_cpu_says_that_it_has_no_events(client, case, backend):
    if backend != "cpu":
        pytest.skip("what a GPU does with them is in test_gpu.py")
    assert client.welcome["events_max"] == 0
    for kind, handle in ((wire.EVENT_READY, b"h"), (wire.EVENT_DONE, b"")):
        with pytest.raises(Failed, match="unimplemented: events need the cuda back end"):
            client.event_add(kind, handle=handle)
    with pytest.raises(Failed, match="unimplemented: events need the cuda back end"):
        client.fence_add(case.region)
    with pytest.raises(Failed, match="unimplemented: EARLY needs the cuda back end"):
        client.run(case.shape, case.tensors(), flags=wire.EARLY)
    for field in ("ready", "done"):
        with pytest.raises(Failed, match=f"not_found: {field}_event: no event 5"):
            client.run(case.shape, case.tensors(), **{field: 5})
    with open("/dev/null", "rb+") as null:
        with pytest.raises(Failed, match="unimplemented: CUDA handles need the cuda back end"):
            client.region_add(wire.CUDA_FD, 4096, [null.fileno()], base=1 << 21)


def test_priorities(client, case):
    for stream, priority in ((0, 1), (1, -1), (2, 0)):
        client.stream(stream, priority)
        client.run(case.shape, case.tensors(), stream=stream)
    with pytest.raises(Failed, match="invalid: stream 1 is in use"):
        client.stream(1, 1)
    with pytest.raises(Failed, match="invalid: stream 3; expected a number below 3"):
        client.stream(3, 1)
