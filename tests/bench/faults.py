#!/usr/bin/env python3
"""How long a lost device is missed: faults a kernel of the server's own, some times over, and measures until
the client is told (device_lost) and until the next right answer to a new connection. Prints JSON, and with
--log the server's log of the last fault. Needs the programs in KLD_BIN.

  faults.py [--backend cuda] [--count 5] [--fault own|killed|other] [--log]

The client has no context of its own, so under MPS nothing but the worker is lost. killed and other, under MPS only: a
process on the same card is killed in the middle of its kernel, or ends because its own kernel faults; times count from
its end, the last dead client's."""
import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
import wire  # noqa: E402
from argumentlib import how_many, need  # noqa: E402
from conftest import BIN, Server, wait_until  # noqa: E402
from unixlib import forward_kl, probabilities  # noqa: E402

SHAPE = (64, 1000)


class Case:
    def __init__(self, path):
        size = 4 * SHAPE[0] * SHAPE[1]
        self.client, self.memory = wire.Client(path), wire.Memory(2 * size)
        q, p = (self.memory.array(i * size, SHAPE, "<f4") for i in range(2))
        q[:], p[:] = probabilities(*SHAPE), probabilities(*SHAPE)
        self.expected = forward_kl(q, p).mean()
        region = self.client.region(self.memory)
        self.tensors = {"predictions": wire.tensor(region), "targets": wire.tensor(region, size)}

    def run(self):
        loss = self.client.run(SHAPE, self.tensors)["loss"]
        assert abs(loss / self.expected - 1) < 1e-6, (loss, self.expected)


VICTIM = """if True:
    import sys, time
    sys.path.insert(0, {!r})
    import gpulib
    gpu = gpulib.Gpu()
    print(int(gpu.mps), flush=True)
    if {!r} == "killed":
        gpu.launch("spin", gpu.stream(), 20_000_000_000)
        print("computes", flush=True)
        time.sleep(60)
    stream = gpu.stream()
    gpu.launch("fault", stream)
    gpu.finish(stream)"""


def another(server, fault):
    """The same, from the end of the process that takes the worker's context along."""
    case = Case(server.unix)
    case.run()
    code = VICTIM.format(str(pathlib.Path(wire.__file__).parent), fault)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as victim:
        mps = victim.stdout.readline()
        if victim.stdout.readline():
            victim.kill()
        victim.wait()
    start = time.monotonic()
    assert mps == "1\n", "without MPS nobody else's context is lost"
    try:
        while time.monotonic() < start + 5:
            case.run()
        raise AssertionError("the worker did not lose its context")
    except wire.Failed as failure:
        assert failure.status == "device_lost", failure
    except wire.Ended:
        pass
    return time.monotonic() - start, until_answered(server, start)


def until_answered(server, start):
    while True:
        try:
            Case(server.unix).run()
            return time.monotonic() - start
        except (wire.Ended, wire.Failed, OSError):
            pass  # a worker that was refused by MPS


def one(server):
    """-> (seconds until device_lost, seconds until a right answer)."""
    case = Case(server.unix)
    case.run()
    asked = server.log().count("a test asked for it")
    os.kill(server.child("worker"), signal.SIGUSR2)
    wait_until(lambda: server.log().count("a test asked for it") > asked, what="the worker to know")
    start = time.monotonic()
    try:
        case.run()
        raise AssertionError("the fault was not seen")
    except wire.Failed as failure:
        assert failure.status == "device_lost", failure
    told = time.monotonic() - start
    return told, until_answered(server, start)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--count", type=how_many, default=5)
    parser.add_argument("--fault", choices=["own", "killed", "other"], default="own")
    parser.add_argument("--log", action="store_true")
    args = parser.parse_args()
    need(BIN / "kld-server")
    server = Server(backend=args.backend, http="", environment={"KLD_TEST_FAULTS": "1"}, restart_ms_max=100)
    try:
        times = []
        for i in range(args.count):
            if i > 0:
                time.sleep(5.2)  # a worker that served so long is started again without a pause
            before = len(server.log())
            times.append(one(server) if args.fault == "own" else another(server, args.fault))
        told, answered = zip(*times)
        print(json.dumps({"what": "faults", "fault": args.fault, "backend": server.backend, "count": args.count,
                          "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
                          "told_ms": [round(1e3 * t, 1) for t in told],
                          "answered_ms": [round(1e3 * t, 1) for t in answered],
                          "answered_ms_median": round(1e3 * statistics.median(answered), 1)}))
        if args.log:
            print(server.log()[before:], file=sys.stderr)
        assert server.stop() == 0
    finally:
        server.remove()


if __name__ == "__main__":
    main()
