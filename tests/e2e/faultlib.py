"""What the tests of faults share: an MPS daemon of their own, and clients that never pause and account for
every request: computed rightly, or told that the device was lost. No process here has a GPU context."""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import threading
import time

import wire
from conftest import BIN, clean_environment, wait_until
from unixlib import forward_kl, probabilities
from wire import Ended, Failed, tensor

SHAPE = (64, 1000)
IN_FLIGHT = 4


class Mps:
    """A private nvidia-cuda-mps-control, which starts its server with the first client."""

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="kld-mps-", dir="/tmp"))  # sockets: short names
        pipe, log = self.folder / "pipe", self.folder / "log"
        pipe.mkdir()
        log.mkdir()
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
        said = self.folder / "said"  # not a pipe, which the daemon would hold open
        with open(said, "w") as file:
            status = subprocess.run(["nvidia-cuda-mps-control", "-d"], stdin=subprocess.DEVNULL, stdout=file,
                                    stderr=file, timeout=30, env={**os.environ, **self.environment}).returncode
        self.problem = said.read_text() if status else None

    def tell(self, command):
        try:
            return subprocess.run(["nvidia-cuda-mps-control"], input=command + "\n", capture_output=True,
                                  text=True, timeout=15, env={**os.environ, **self.environment}).stdout
        except subprocess.TimeoutExpired:
            return ""

    def processes(self):
        servers = [int(word) for word in self.tell("get_server_list").split() if word.isdigit()]
        try:
            control = (self.folder / "pipe/nvidia-cuda-mps-control.pid").read_text().split()
        except OSError:
            control = []
        return servers + [int(word) for word in control if word.isdigit()]

    def stop(self):
        left = [] if self.problem else self.processes()
        if not self.problem:
            self.tell("quit")
        end = time.monotonic() + 10
        while left and time.monotonic() < end:
            left = [pid for pid in left if os.path.exists(f"/proc/{pid}")]
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def without_mps():
    """An environment in which CUDA finds no daemon, also where one runs."""
    return {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}


class Bystander(threading.Thread):
    """A client without a GPU that has requests in flight all the time. What the worker has read (a PONG says
    so) is answered: by the right loss, or by device_lost, and by nothing else. After a lost device or worker
    it connects anew, as any client must."""

    def __init__(self, path):
        super().__init__(daemon=True)
        self.path, self.right, self.lost, self.reconnects = path, 0, 0, 0
        self.problem, self.ending = None, threading.Event()
        size = 4 * SHAPE[0] * SHAPE[1]
        self.memory = wire.Memory(2 * size)
        q, p = (self.memory.array(i * size, SHAPE, "<f4") for i in range(2))
        q[:], p[:] = probabilities(*SHAPE), probabilities(*SHAPE)
        self.expected, self.second = forward_kl(q, p).mean(), size

    def take(self, client, request):
        """True: the device is still there."""
        try:
            loss = client.result(request)["loss"]
        except Failed as failed:
            assert failed.status == "device_lost", failed
            self.lost += 1
            return False
        assert abs(loss / self.expected - 1) < 1e-6, (loss, self.expected)
        self.right += 1
        return True

    def take_said(self, client, requests):
        try:
            for request in requests:
                self.take(client, request)
        except (Ended, ConnectionError):
            pass

    def work(self, client):
        region = client.region(self.memory)
        tensors = {"predictions": tensor(region), "targets": tensor(region, self.second)}
        while not self.ending.is_set():
            requests = []
            try:
                for _ in range(IN_FLIGHT):
                    requests.append(client.submit(SHAPE, tensors))
                client.ping()
            except (Ended, ConnectionError):  # the worker ended in between: what it has said is read
                self.take_said(client, requests)
                raise
            try:
                there = [self.take(client, request) for request in requests]
            except Ended:
                raise AssertionError("a request that the worker had read was not answered") from None
            if not all(there):
                return

    def run(self):
        try:
            while not self.ending.is_set():
                try:
                    with wire.Client(self.path, timeout=30) as client:
                        self.work(client)
                except (Ended, ConnectionError, FileNotFoundError):
                    pass  # between two workers
                except Failed as failed:  # a frame that met a worker about to end
                    assert failed.status in ("device_lost", "unavailable"), failed
                self.reconnects += not self.ending.is_set()
                self.ending.wait(0.002)
        except BaseException as problem:  # told by check()
            self.problem = problem

    def check(self):
        if self.problem:
            raise self.problem

    def answers_again(self, seconds):
        """Waits until it is answered rightly; returns how long that took."""
        start, before = time.monotonic(), self.right
        wait_until(lambda: self.problem or self.right > before, seconds, "a right answer to a bystander")
        self.check()
        return time.monotonic() - start

    def stop(self):
        self.ending.set()
        self.join(60)
        alive = self.is_alive()
        self.memory.close()
        assert not alive, "a bystander waits for an answer that does not come"
        self.check()


class Crowd:
    """Three bystanders and a program that uses libkld, around a fault."""

    def __init__(self, path, seconds):
        self.bystanders = [Bystander(path) for _ in range(3)]
        for one in self.bystanders:
            one.start()
        self.bench = subprocess.Popen(
            [BIN / "kld", "bench", "--server", f"unix:{path}", "--shape", "64x1000", "--grad", "--check",
             "--in-flight", "4", "--seconds", str(seconds), "--json"], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=clean_environment())
        for one in self.bystanders:
            one.answers_again(60)

    def answer_again(self, seconds):
        return max(one.answers_again(seconds) for one in self.bystanders)

    @property
    def lost(self):
        return sum(one.lost for one in self.bystanders)

    @property
    def reconnects(self):
        return sum(one.reconnects for one in self.bystanders)

    def end(self):
        """All were answered; libkld went on by itself, with the same bits throughout. Returns its report."""
        try:
            output, problem = self.bench.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            self.bench.kill()
            raise
        for one in self.bystanders:
            one.stop()
        assert self.bench.returncode == 0, output + problem
        return json.loads(output)
