"""What one process's fault costs the others: clients that die on the card, in various states, owners that free
what they share, handles that are none, and a fault of our own kernel; each with other clients' requests in
flight, without MPS and under an MPS daemon of the test's own. Whatever happens, every request is answered, and
clients of libkld go on by themselves. The victims are processes of their own: this one has no GPU context."""
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from conftest import ROOT, SANITIZER, Server, wait_until
from faultlib import SHAPE, Crowd, Mps, without_mps
from oip import infer
from unixlib import forward_kl, probabilities
from wire import Client, Ended, Failed, Memory, tensor

FOLDER = str(ROOT / "tests/e2e")
PROBE = f"import sys; sys.path.insert(0, {FOLDER!r}); import gpulib; print(int(gpulib.Gpu().mps))"


class Mode:
    def __init__(self, mps, environment):
        self.mps, self.environment = mps, environment

    def python(self, code, **more):
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, env={**os.environ, **self.environment, "KLD_BACKEND": "cuda"}, **more)


@pytest.fixture(scope="module", params=["without MPS", "with MPS"])
def mode(request, backend):
    mps = request.param == "with MPS"
    if backend != "cuda":
        if mps:
            pytest.skip("needs the CUDA back end")
        yield Mode(False, {})
        return
    if mps and not shutil.which("nvidia-cuda-mps-control"):
        pytest.skip("needs nvidia-cuda-mps-control")
    daemon = Mps() if mps else None
    try:
        if daemon and daemon.problem is not None:
            pytest.skip(f"MPS does not start: {daemon.problem}")
        one = Mode(mps, daemon.environment if daemon else without_mps())
        said, problem = one.python(PROBE).communicate(timeout=60)
        if said != f"{int(mps)}\n":
            pytest.skip(f"the card is not {request.param} here: {said}{problem[-300:]}")
        yield one
    finally:
        if daemon:
            daemon.stop()


@pytest.fixture(scope="module")
def server(mode, backend):
    one = Server(backend=backend, http="", pool_bytes_max="1G", restart_ms_max=200,
                 environment={"KLD_TEST_FAULTS": "1", **mode.environment})
    yield one
    status, log = one.stop(), one.log()
    one.remove()
    assert status == 0 and not SANITIZER.search(log), log


@pytest.fixture
def gpu_only(backend):
    if backend != "cuda":
        pytest.skip("needs the CUDA back end")


# A client with memory, events and a context of its own on the worker's card.
CLIENT = """if True:
    import os, select, sys, time
    sys.path.insert(0, {folder!r})
    import gpucase, gpulib, wire
    gpu, client = gpulib.Gpu(), wire.Client({path!r}, name="child")
    case = gpucase.Case(gpu, client, gpulib.Allocation(gpu, gpucase.ROOM))
    def right():
        return abs(case.run() / case.expected - 1) < 1e-6
    assert right()
"""
VICTIM = CLIENT + """
    stepper = gpucase.Stepper(gpu, client)
    stepper.step(case)
    gpu.finish(stepper.stream)
    {what}
    print("ready", flush=True)
    time.sleep(600)"""
ENDS = {
    "idle": "pass",
    "kernel running": "gpu.launch('spin', stepper.stream, 20_000_000_000)",
    "event that never comes": "gpu.wait_for_ever(stepper.stream); stepper.step(case)",
    "fault": "print('ready', flush=True); os.read(0, 1); gpu.launch('fault', stepper.stream); time.sleep(0.2)",
}
NEIGHBOUR = CLIENT + """
    print("ready", flush=True)
    count = 0
    while not select.select([0], [], [], 0)[0]:
        assert right()
        count += 1
    print("answers", count)"""
FREES_EARLY = CLIENT + """
    loss = case.run()
    numbers = [client.submit(gpucase.SHAPE, case.tensors()) for _ in range(8)]
    case.memory.free()
    for number in numbers:
        assert client.result(number)["loss"] == loss
    assert all(case.run() == loss for _ in range(50))
    for _ in range(4):
        client.submit(gpucase.SHAPE, case.tensors())
    print("right", flush=True)
    os._exit(0)"""
BAD_HANDLES = CLIENT + """
    whole = case.memory.handle
    for given in (dict(handle=whole[:20]), dict(handle=whole[:63]), dict(handle=bytes(range(64))),
                  dict(handle=bytes(64)), dict(uuid=b"another device!!")):
        try:
            case.register(client, **given)
        except wire.Failed as failed:
            assert failed.status == "invalid", (given, str(failed))
        else:  # a byte that the driver does not look at
            assert given == dict(handle=whole[:63]), given
    with open("/dev/null", "rb+") as null:
        try:
            client.region_add(wire.CUDA_FD, 4096, fds=[null.fileno()], base=1 << 21, uuid=gpu.uuid)
            raise SystemExit("a descriptor of nothing was taken")
        except wire.Failed as failed:
            assert failed.status == "invalid", str(failed)
    assert right()
    print("right", flush=True)"""

CYCLES = CLIENT + """
    if {kind!r} == "descriptor":
        client.drop(case.region)
        case = gpucase.Case(gpu, client, gpulib.Mapped(gpu, gpucase.ROOM))
        assert right()
    gpucase.leaks_nothing(case, {worker})
    print("right", flush=True)"""
# Its stream waits for what the worker was to record, and the worker is lost.
WAITS = CLIENT + """
    stepper, other = gpucase.Stepper(gpu, client), gpu.stream()
    stepper.step(case)
    gpu.finish(stepper.stream)
    print("ready", flush=True)
    sys.stdin.readline()
    gpu.launch("spin", stepper.stream, 500_000_000)
    stepper.step(case)
    print("waits", flush=True)
    sys.stdin.readline()

    def rests(seconds):
        end = time.monotonic() + seconds
        while gpu.is_busy(stepper.stream):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    try:
        alone = rests(3)
        if not alone:
            gpu.record(stepper.done, other)
        ended = alone or rests(5)
        with wire.Client({path!r}, name="again") as anew:
            again = case.run(case.register(anew), anew)
        assert not ended or abs(again / case.expected - 1) < 1e-6
        print("alone" if alone else "recorded" if ended else "hangs", flush=True)
    except gpulib.GpuError as error:
        print("context lost:", error, flush=True)
    time.sleep(600)"""
TEACHER = CLIENT + """
    import numpy as np
    np.save({file!r}, case.p)
    client.publish("gpu/targets", case.region, wire.description(gpucase.SHAPE), gpucase.TENSOR)
    print("ready", flush=True)
    time.sleep(600)"""


def start(mode, server, code, **more):
    return mode.python(code.format(folder=FOLDER, path=server.unix, **more), stdin=subprocess.PIPE)


def expect(child, line):
    assert select.select([child.stdout], [], [], 60)[0], "a child says nothing"
    said = child.stdout.readline()
    assert said == line, said + child.stderr.read()


def tell(child):
    child.stdin.write("now\n")
    child.stdin.flush()


def until_it_waits(server, worker, child, fault):
    """The child's stream waits for a job of the worker's, which may be told before that the job is to fault."""
    expect(child, "ready\n")
    if fault:
        count = server.log().count("a test asked for it")
        os.kill(worker, signal.SIGUSR2)
        wait_until(lambda: server.log().count("a test asked for it") > count, what="the worker to know")
    tell(child)
    expect(child, "waits\n")


def end_neighbour(neighbour, lost):
    """It computed all the time, or it fell with the others and was told so."""
    said, problem = neighbour.communicate(timeout=60)
    if lost:
        assert neighbour.returncode == 1 and ("device_lost" in problem or "Ended" in problem), problem
    else:
        assert neighbour.returncode == 0 and int(said.split()[1]) > 0, problem


def is_replaced(server, worker, seconds):
    """Within so many seconds?"""
    end = time.monotonic() + seconds
    while server.child("worker") == worker and time.monotonic() < end:
        time.sleep(0.005)
    return server.child("worker") != worker


def answers(server):
    try:
        with Client(server.unix, timeout=30) as one:
            one.ping()
            return True
    except (Ended, Failed, OSError):
        return False


def everything_is_given_back(server):
    """The worker has nothing of those who left."""
    def released():
        try:
            with Client(server.unix, timeout=30) as one:
                stats = one.stats()
                return stats["in_flight"] == 0 and stats["clients"] == 1 and stats["regions"] == 0
        except (Ended, Failed, OSError):
            return False

    wait_until(released, 30, "what the dead client had being given back")


def is_soon(took, backend, more_s=0):
    """On a card the aim is 0.6 s, and 0.24 to 0.46 s were measured; a CPU in a crowd of tests takes what it takes."""
    assert took < (2 + more_s if backend == "cuda" else 20), f"right answers only after {took:.2f} s"


def is_given_up(server, worker, died):
    """What waits for an event of a dead client cannot be ended but with the worker: KLD_ORPHAN_DEAD_MS (1 s) after
    the death, so that what shares a queue of the device with it goes on."""
    assert is_replaced(server, worker, 20), "a worker holds a job that can never end"
    took = time.monotonic() - died
    print(f"replaced {took * 1e3:.0f} ms after the death of who should have recorded the event")
    assert 0.9 < took < 3, f"{took:.2f} s\n{server.log()[-4000:]}"
    assert "a job waits for an event of a client that is gone" in server.log()


@pytest.mark.parametrize("end", ENDS)
def test_a_client_dies(gpu_only, mode, server, backend, end):
    """Without MPS nobody notices but for what the worker gives back, unless it waits for what the dead one should
    have recorded. With MPS a death in the middle of work takes every context along, the worker's too. What was in
    flight is told so, and the next worker serves."""
    everything_is_given_back(server)
    worker = server.child("worker")
    neighbour = start(mode, server, NEIGHBOUR)
    expect(neighbour, "ready\n")
    crowd = Crowd(server.unix, 7)  # first: some of it may share a queue of the device with what waits for ever
    victim = start(mode, server, VICTIM, what=ENDS[end])
    try:
        expect(victim, "ready\n")
        if end == "fault":
            victim.stdin.write("now")
            victim.stdin.flush()
            expect(victim, "ready\n")
    finally:
        victim.kill()
        victim.communicate()
    died = time.monotonic()
    if end == "event that never comes":
        is_given_up(server, worker, died)
    elif mode.mps and end != "idle":
        is_replaced(server, worker, 3)
    crowd.answer_again(20)
    took = time.monotonic() - died
    report = crowd.end()
    lost = server.child("worker") != worker
    end_neighbour(neighbour, lost)
    everything_is_given_back(server)
    print(f"{end}, MPS {mode.mps}: right answers after {took * 1e3:.0f} ms, worker replaced {lost}, "
          f"{crowd.lost} told device_lost, {report['repeated']} sent again")
    is_soon(took, backend, 1 if end == "event that never comes" else 0)  # which the worker waits for, for 1 s
    if end == "idle" or (not mode.mps and end != "event that never comes"):
        assert not lost and crowd.lost == crowd.reconnects == report["repeated"] == 0
    else:
        assert lost and crowd.lost + report["repeated"] > 0, "what was in flight was not told"


def test_an_idle_worker_is_lost_too(gpu_only, mode, server):
    """Under MPS: nobody asks the worker for anything, and it makes way for a next one all the same, which is
    what lets new processes of everybody onto the card."""
    if not mode.mps:
        pytest.skip("nothing is lost without MPS")
    everything_is_given_back(server)
    worker = server.child("worker")
    victim = start(mode, server, VICTIM, what=ENDS["kernel running"])
    expect(victim, "ready\n")
    victim.kill()
    victim.communicate()
    died = time.monotonic()
    assert is_replaced(server, worker, 5), "an idle worker kept its dead context"
    wait_until(lambda: server.child("worker") != worker and answers(server), 20, "the next worker")
    with start(mode, server, CLIENT + "    print('right', flush=True)") as newcomer:
        expect(newcomer, "right\n")
    print(f"a process that came after the death computes {(time.monotonic() - died) * 1e3:.0f} ms after it")


def test_a_living_client_holds_up_others(gpu_only, mode, backend):
    """Its event does not come. That is its own affair, until others stand still for it: memory that one of them
    gives back is unpinned when the device has come to rest, and what comes behind that waits too."""
    one = Server(backend=backend, http="", restart_ms_max=200, event_hold_ms=1500, environment=mode.environment)
    holder = start(mode, one, VICTIM, what=ENDS["event that never comes"])
    try:
        expect(holder, "ready\n")
        worker = one.child("worker")
        with Client(one.unix, timeout=30) as other:
            assert not is_replaced(one, worker, 3), "nobody was held up:\n" + one.log()
            other.ping()
            pieces = [Memory(1 << 20) for _ in range(9)]
            for region in [other.region(piece) for piece in pieces[1:]]:
                other.drop(region)
            began = time.monotonic()
            with pytest.raises((Ended, Failed), match="device_lost|^$"):
                other.region(pieces[0])
                other.ping()
            assert is_replaced(one, worker, 10), "others are held up for ever"
            took = time.monotonic() - began
        log = one.log()
        assert f"of the client with pid {holder.pid}, which does not come, and holds up others" in log, log
        assert 1.4 < took < 4, f"{took:.2f} s\n{log}"
        wait_until(lambda: answers(one), 20, "the next worker")
        print(f"MPS {mode.mps}: replaced {took * 1e3:.0f} ms after the first that waited")
    finally:
        holder.kill()
        holder.communicate()
        status = one.stop()
        one.remove()
    assert status == 0


class Student(threading.Thread):
    """Computes against the teacher's tensor until that is gone."""

    def __init__(self, path, targets):
        super().__init__(daemon=True)
        self.client, self.right, self.ending = Client(path, timeout=30), 0, None
        self.memory, q = Memory(targets.nbytes), probabilities(*targets.shape)
        self.memory.array(0, targets.shape, "<f4")[:] = q
        self.shape, self.expected = targets.shape, forward_kl(q, targets).mean()
        self.tensors = {"predictions": tensor(self.client.region(self.memory)),
                        "targets": tensor(self.client.attach("gpu/targets")[0])}

    def run(self):
        try:
            while True:
                assert abs(self.client.run(self.shape, self.tensors)["loss"] / self.expected - 1) < 1e-6
                self.right += 1
        except BaseException as ending:
            self.ending = ending


def test_a_teacher_with_gpu_memory_is_killed(gpu_only, mode, server, tmp_path):
    """Students of its published tensor are answered rightly, and then told that it is gone: no crash, no garbage."""
    everything_is_given_back(server)
    worker, file = server.child("worker"), str(tmp_path / "targets.npy")
    teacher = start(mode, server, TEACHER, file=file)
    expect(teacher, "ready\n")
    students = [Student(server.unix, np.load(file)) for _ in range(4)]
    for one in students:
        one.start()
    wait_until(lambda: all(one.right > 20 or one.ending for one in students), 30, "answers")
    teacher.kill()
    teacher.communicate()
    for one in students:
        one.join(30)
        assert isinstance(one.ending, Failed) and one.ending.status == "gone", one.ending
        one.client.ping()
        one.client.close()
        one.memory.close()
    assert server.child("worker") == worker
    everything_is_given_back(server)


@pytest.mark.xfail(reason="an event has no remedy: on an H200 it hangs without MPS, and with MPS after a kill; recorded anew by "
                   "another process it does not free who waited for the old one. Fences do: test_gpu_fences.py", strict=False)
@pytest.mark.parametrize("how", ["killed", "fault"])
def test_a_stream_that_waits_for_a_lost_worker_goes_on(gpu_only, mode, server, how):
    """Behind an early answer the client's stream waits for the worker's done event. Where the worker ends first nobody
    records that any more, so the client does, on another stream of its own. With MPS its context may be lost too,
    which it is told."""
    everything_is_given_back(server)
    worker = server.child("worker")
    child = start(mode, server, WAITS)
    try:
        until_it_waits(server, worker, child, how == "fault")
        if how == "killed":
            os.kill(worker, signal.SIGKILL)
        assert is_replaced(server, worker, 20)
        tell(child)  # with MPS no other worker computes while this one's dead context is there
        assert select.select([child.stdout], [], [], 60)[0], "the client says nothing"
        said = child.stdout.readline()
    finally:
        child.kill()
        _, problem = child.communicate()
    print(f"{how}, MPS {mode.mps}: {said}")
    assert said in ("alone\n", "recorded\n") or (mode.mps and said.startswith("context lost")), said + problem
    everything_is_given_back(server)


@pytest.mark.parametrize("kind", ["handle", "descriptor"])
def test_register_and_drop_leak_nothing(gpu_only, mode, server, kind):
    """10,000 times under MPS; without it: test_gpu.py."""
    if not mode.mps:
        pytest.skip("test_gpu.py does it without MPS")
    everything_is_given_back(server)
    child = start(mode, server, CYCLES, worker=server.child("worker"), kind=kind)
    expect(child, "right\n")
    child.communicate(timeout=60)


@pytest.mark.parametrize("what", ["frees early", "bad handles"])
def test_what_a_client_may_do_to_its_own(gpu_only, mode, server, what):
    """Memory freed while requests use it: the worker reads what was there. Handles that are cut, made up or
    of another device are refused. Nobody else notices either."""
    worker = server.child("worker")
    crowd = Crowd(server.unix, 4)
    child = start(mode, server, FREES_EARLY if what == "frees early" else BAD_HANDLES)
    expect(child, "right\n")
    child.communicate(timeout=60)
    report = crowd.end()
    assert server.child("worker") == worker
    assert crowd.lost == crowd.reconnects == report["repeated"] == report["different"] == 0
    everything_is_given_back(server)


def test_a_fault_of_our_own(mode, server, backend):
    """The worker's next operator ends its device, whoever asked for it."""
    everything_is_given_back(server)
    worker = server.child("worker")
    neighbour = start(mode, server, NEIGHBOUR) if backend == "cuda" else None
    if neighbour:
        expect(neighbour, "ready\n")
    crowd = Crowd(server.unix, 5)
    began = time.monotonic()
    os.kill(worker, signal.SIGUSR2)
    assert is_replaced(server, worker, 20)
    crowd.answer_again(20)
    took = time.monotonic() - began
    report = crowd.end()
    if neighbour:
        end_neighbour(neighbour, True)
    print(f"own fault, MPS {mode.mps}: right answers to all after {took * 1e3:.0f} ms, {crowd.lost} told "
          f"device_lost, {report['repeated']} sent again")
    is_soon(took, backend)
    assert crowd.lost + report["repeated"] > 0 and crowd.reconnects > 0 and report["different"] == 0
    everything_is_given_back(server)


@pytest.mark.parametrize("whose", ["our own", "a client killed"])
def test_http_callers_see_slower_answers(mode, backend, whose):
    """And no error, whatever the worker's context was lost by."""
    if whose != "our own" and not mode.mps:
        pytest.skip("nothing is lost without MPS")
    server = Server(backend=backend, pool_bytes_max="1G", restart_ms_max=200,
                    environment={"KLD_TEST_FAULTS": "1", **mode.environment})
    q, p = probabilities(*SHAPE), probabilities(*SHAPE)
    truth, stop, waits, problems = forward_kl(q, p).mean(), threading.Event(), [], []

    def call():
        while not stop.is_set() and not problems:
            began = time.monotonic()
            try:
                _, got = infer(server, {"predictions": q, "targets": p})
                assert got["loss"][0] == pytest.approx(truth, rel=1e-6)
                waits.append(time.monotonic() - began)
            except BaseException as problem:
                problems.append(problem)

    threads = [threading.Thread(target=call) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        wait_until(lambda: problems or len(waits) > 40, 60, "answers")
        worker = server.child("worker")
        if whose == "our own":
            os.kill(worker, signal.SIGUSR2)
        else:
            victim = start(mode, server, VICTIM, what=ENDS["kernel running"])
            expect(victim, "ready\n")
            victim.kill()
            victim.communicate()
        assert problems or is_replaced(server, worker, 20)
        before = len(waits)
        wait_until(lambda: problems or len(waits) > before + 40, 60, "answers")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        status = server.stop()
        log = server.log()
        server.remove()
    print(f"{whose}, MPS {mode.mps}: the longest of {len(waits)} answers took {max(waits) * 1e3:.0f} ms")
    assert not problems, f"{problems[0]!r}\n{log}"
    assert status == 0 and not SANITIZER.search(log), log
