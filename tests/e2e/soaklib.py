"""What the clients of the soak do (tests/bench/soak.py), each in a process of its own that may be killed at any time, and how
they account for it: what was asked is answered rightly, wrongly or not at all, taken back by the client itself (a cancel, a
deadline, a connection that it closed), or was in flight when the client was killed. No server is started here."""
import http.client
import json
import mmap
import os
import pathlib
import random
import time

import numpy as np

import oip
import wire
from httplib import PREFIX, Shared, close, logits, probabilities

FIELDS = ["asked", "right", "wrong", "lost", "taken_back", "left_by_the_dead"]
# What a client may meet where the server's processes are killed; a name registered with a process goes with it.
BROKEN = (wire.Ended, ConnectionError, FileNotFoundError, http.client.HTTPException)
GONE_WITH_IT = {"http_shm": (400, 404, 409, 503), "http_tensors": (400, 404, 410, 503)}
OUTPUTS = ["loss", "grad_predictions"]
IN_FLIGHT = 6     # of one client of the Unix socket
A_LIFE = 40       # requests on one connection
ROOM = 2 << 20    # inputs and results of one job


class Job:
    """A request and what NumPy says about it in FP64."""

    def __init__(self, number, shape, dtype, divergence, form, reduction):
        make = probabilities if form == "probs" else logits
        self.q, self.p = make(shape, 2 * number, dtype), make(shape, 2 * number + 1, dtype)
        self.parameters = {"divergence": divergence, "predictions_form": form, "targets_form": form, "reduction": reduction,
                           **oip.DIVERGENCES[divergence]}
        self.name = oip.NAMES[self.q.dtype]
        truth = oip.expected(self.q, self.p, **self.parameters)
        self.truth = {name: truth[name] for name in OUTPUTS}

    def check(self, got):
        for name, array in got.items():
            close(array, self.truth[name].reshape(array.shape), self.name)


def make_jobs():
    """(small ones, those that travel in pieces where `staging_request_bytes_max` is 1M)."""
    small, shapes = [], [(2, 8), (7, 33), (3, 5, 40), (16, 257), (64, 1000)]
    for i, divergence in enumerate(oip.DIVERGENCES):
        for j, form in enumerate(("probs", "logits")):
            shape, reduction = shapes[(2 * i + j) % 5], ("batchmean", "sum", "mean", "row")[(i + j) % 4]
            small.append(Job(len(small), shape, "<f8" if i % 4 == 3 else "<f4", divergence, form, reduction))
    small.append(Job(len(small), (16, 257), "<f2", "forward_kl", "probs", "batchmean"))
    return small, [Job(100, (100, 3000), "<f4", "forward_kl", "probs", "batchmean"),
                   Job(101, (150, 1777), "<f4", "js", "logits", "sum")]


class Ledger:
    """A row of counters for each client, in memory that outlives it, and a file of what went wrong."""

    def __init__(self, clients):
        self.memory = mmap.mmap(-1, 8 * (1 + clients * len(FIELDS)))
        numbers = np.frombuffer(self.memory, "<u8")
        self.stop, self.rows = numbers[:1], numbers[1:].reshape(clients, len(FIELDS))
        self.problems = os.memfd_create("kld-soak-problems", os.MFD_CLOEXEC)

    def tell(self, text):
        os.write(self.problems, text.encode(errors="replace")[:2000] + b"\n")

    def told(self):
        return os.pread(self.problems, 1 << 16, 0).decode(errors="replace").splitlines()

    def bury(self, index):
        """What a killed client had in flight is nobody's any more."""
        row = self.rows[index]
        row[5] += row[0] - row[1:].sum()

    def sums(self):
        return dict(zip(FIELDS, map(int, self.rows.sum(axis=0))))


class Refused(Exception):
    """An HTTP status that is not 200."""

    def __init__(self, status, text):
        super().__init__(f"{status}: {text}")
        self.status = status


class Left(Exception):
    """A client that closed its connection with requests in flight."""


class Client:
    """What all kinds share. `server`: one of conftest.py. under_fire: the roles of it that are killed, and what a client meets then
    it takes for an answer (counted as taken back), but for silence and wrong numbers."""

    def __init__(self, kind, index, ledger, server, jobs, pause, under_fire=()):
        self.under_fire = under_fire
        self.kind, self.index, self.ledger, self.server = kind, index, ledger, server
        self.row, (self.jobs, self.large), self.pause = ledger.rows[index], jobs, pause
        self.random = random.Random(time.monotonic_ns())
        self.region = f"soak-{index}"

    @property
    def stopping(self):
        return bool(self.ledger.stop[0])

    def chance(self, share):
        return self.random.random() < share

    def note(self, field, count=1):
        self.row[FIELDS.index(field)] += count

    def rest(self):
        if self.pause:
            time.sleep(self.random.expovariate(1 / self.pause))

    def judge(self, job, got):
        try:
            job.check(got)
        except AssertionError as problem:
            self.note("wrong")
            self.ledger.tell(f"{self.kind} {self.index}: wrong: {job.parameters}: {problem}")
        else:
            self.note("right")

    def run(self):
        """Until it is told to stop. An exception is an answer that did not come: the client connects anew."""
        life = getattr(self, self.kind)
        while not self.stopping:
            before = int(self.row[0]) - int(self.row[1:].sum())
            try:
                life()
            except Left:
                pass
            except Exception as problem:  # noqa: BLE001 - all of it is counted and told
                lost = int(self.row[0]) - int(self.row[1:].sum()) - before
                if self.may_be(problem):
                    self.note("taken_back", lost)
                    time.sleep(0.02)
                    continue
                self.note("lost", max(lost, 0))
                self.ledger.tell(f"{self.kind} {self.index}: {lost} lost: {problem!r}")
                time.sleep(0.1)

    def may_be(self, problem):
        if not self.under_fire:
            return False
        if isinstance(problem, Refused):
            return problem.status in GONE_WITH_IT.get(self.kind, (503,))
        if isinstance(problem, wire.Failed):
            return problem.status in ("unavailable", "device_lost", "gone")
        # The gateway keeps its connections whoever else dies; but a reply in pieces that has begun ends with its worker.
        gateways = not {"gateway", "supervisor"}.isdisjoint(self.under_fire)
        return isinstance(problem, BROKEN if gateways or self.kind.startswith("unix") else http.client.IncompleteRead)

    # ---- HTTP ----------------------------------------------------------------------------------
    def http(self, binary):
        with oip.Connection(self.server) as connection:
            for _ in range(A_LIFE):
                if self.stopping:
                    return
                large = binary and self.chance(0.04)
                job = self.random.choice(self.large if large else self.jobs if binary else self.jobs[:12])
                outputs = {name: {"binary_data": True} if binary else None for name in OUTPUTS}
                headers, data = oip.body({"predictions": job.q, "targets": job.p}, outputs, job.parameters, binary)
                self.note("asked")
                if self.chance(0.03):  # it leaves without its answer
                    connection.http.request("POST", oip.INFER, data, headers)
                    self.note("taken_back")
                    return
                status, reply_headers, reply = connection.ask("POST", oip.INFER, data, headers)
                if status != 200:
                    raise Refused(status, reply[:300])
                self.judge(job, oip.parse(reply_headers, reply)[1])
                self.rest()

    def http_json(self):
        self.http(False)

    def http_binary(self):
        self.http(True)

    def http_tensors(self):
        """Targets that stay on the device."""
        with oip.Connection(self.server) as connection:
            for _ in range(4):
                if self.stopping:
                    return
                job = self.random.choice(self.jobs)
                shape = ",".join(map(str, job.p.shape))
                path = f"/v2/tensors/{self.region}"
                status, _, reply = connection.ask("PUT", f"{path}?datatype={job.name}&shape={shape}", job.p.tobytes())
                if status != 200:
                    raise Refused(status, reply[:300])
                tensor = {"shape": list(job.q.shape), "datatype": job.name}
                head = json.dumps({"inputs": [
                    {"name": "predictions", **tensor, "parameters": {"binary_data_size": job.q.nbytes}},
                    {"name": "targets", **tensor, "parameters": {"stored_tensor": self.region}}],
                    "outputs": [{"name": n, "parameters": {"binary_data": True}} for n in OUTPUTS],
                    "parameters": job.parameters}).encode()
                for _ in range(4):
                    self.note("asked")
                    status, reply_headers, reply = connection.ask("POST", oip.INFER, head + job.q.tobytes(),
                                                                  {oip.LENGTH: str(len(head))})
                    if status != 200:
                        raise Refused(status, reply[:300])
                    self.judge(job, oip.parse(reply_headers, reply)[1])
                    self.rest()
                status, _, reply = connection.ask("DELETE", path)
                if status not in (200, 204):
                    raise Refused(status, reply[:300])

    def http_shm(self):
        """Tensors in shared memory; the name may still be registered by one who was killed."""
        size = ROOM
        with oip.Connection(self.server) as connection, Shared(size, f"{self.index}") as shared:
            base = f"/v2/systemsharedmemory/region/{self.region}"
            connection.ask("POST", f"{base}/unregister", b"")
            status, _, reply = connection.ask("POST", f"{base}/register",
                                              b'{"key": "%s", "offset": 0, "byte_size": %d}' % (shared.key.encode(), size))
            if status != 200:
                raise Refused(status, reply[:300])
            for _ in range(A_LIFE // 2):
                if self.stopping:
                    break
                self.one_in_shared_memory(connection, shared)
                self.rest()
            status, _, reply = connection.ask("POST", f"{base}/unregister", b"")
            if status != 200:
                raise Refused(status, reply[:300])
            shared.map.close()

    def one_in_shared_memory(self, connection, shared):
        job, at, inputs = self.random.choice(self.jobs), 0, {"predictions": 0, "targets": 0}
        place = {}
        for name, array in (("predictions", job.q), ("targets", job.p), ("grad_predictions", job.q)):
            place[name] = {"shared_memory_region": self.region, "shared_memory_offset": at,
                           "shared_memory_byte_size": array.nbytes}
            if name in inputs:
                shared.map[at:at + array.nbytes] = array.tobytes()
            at += (array.nbytes + 63) // 64 * 64
        request = {"inputs": [{"name": name, "shape": list(job.q.shape), "datatype": job.name, "parameters": place[name]}
                              for name in inputs], "parameters": job.parameters,
                   "outputs": [{"name": "loss"}, {"name": "grad_predictions", "parameters": place["grad_predictions"]}]}
        self.note("asked")
        status, reply_headers, reply = connection.ask("POST", oip.INFER, json.dumps(request).encode())
        if status != 200:
            raise Refused(status, reply[:300])
        got = {"loss": oip.parse(reply_headers, reply)[1]["loss"]}
        begin = place["grad_predictions"]["shared_memory_offset"]
        got["grad_predictions"] = np.frombuffer(shared.map[begin:begin + job.q.nbytes], job.q.dtype).reshape(job.q.shape)
        self.judge(job, got)

    # ---- The Unix socket -----------------------------------------------------------------------
    def submit(self, client, region, view, at, job, **more):
        """Inputs at `at` of the region, the gradient and rows behind them -> (number, job, its results)."""
        size, tensors, arrays = (job.q.nbytes + 63) // 64 * 64, {}, {}
        for name, value in (("predictions", job.q), ("targets", job.p), ("grad_predictions", None)):
            arrays[name] = view(at, job.q.shape, job.q.dtype)
            arrays[name][...] = np.nan if value is None else value
            tensors[name] = wire.tensor(region, at, job.name)
            at += size
        if job.parameters["reduction"] == "row":
            arrays["loss"] = view(at, job.truth["loss"].shape, job.q.dtype)
            tensors["loss"] = wire.tensor(region, at, job.name)
        self.note("asked")
        return client.submit(job.q.shape, tensors, **job.parameters, **more), job, arrays

    def take(self, client, number, job, arrays, may_fail=False):
        """True: it was answered with a result."""
        try:
            done = client.result(number)
        except wire.Failed as failed:
            if not may_fail or failed.status not in ("cancelled", "deadline"):
                raise
            self.note("taken_back")
            return False
        got = {"grad_predictions": arrays["grad_predictions"]}
        got["loss"] = arrays["loss"] if "loss" in arrays else np.atleast_1d(np.asarray(done["loss"]))
        self.judge(job, got)
        return True

    def unix(self):
        """Several in flight, a region for a while; some are cancelled, some have a deadline that passes."""
        slot = ROOM
        with wire.Client(self.server.unix) as client:
            for _ in range(3):
                memory = wire.Memory(IN_FLIGHT * slot)
                region, calm = client.region(memory), True
                for _ in range(A_LIFE // 10):
                    if self.stopping or not calm:
                        break
                    calm = self.batch(client, region, memory, slot)
                    self.rest()
                # What was taken back may still run: its memory is the server's until then.
                client.drop(region)
                memory.close()

    def batch(self, client, region, memory, slot):
        sent, hasty = [], set()
        for i in range(self.random.randint(1, IN_FLIGHT)):
            more = {}
            if self.chance(0.03):
                more["timeout_ns"] = self.random.choice([1, 20000, 200000])
            sent.append(self.submit(client, region, memory.array, i * slot, self.random.choice(self.jobs), **more))
            if more:
                hasty.add(sent[-1][0])
        if self.chance(0.2):
            number = self.random.choice(sent)[0]
            hasty.add(number)
            try:
                client.cancel(number)
            except wire.Failed as failed:
                if failed.status != "not_found":
                    raise
        if self.chance(0.02):  # it leaves without its answers
            self.note("taken_back", len(sent))
            raise Left
        return all([self.take(client, *one, may_fail=one[0] in hasty) for one in sent])

    def unix_share(self):
        """A teacher publishes targets, a student computes with them, then the teacher leaves."""
        job = self.random.choice([job for job in self.jobs if job.parameters["reduction"] != "row"])
        memory, own = wire.Memory(1 << 20), wire.Memory(1 << 20)
        name = f"soak/{self.index}/{os.getpid()}"
        with wire.Client(self.server.unix) as teacher, wire.Client(self.server.unix) as student:
            memory.array(0, job.p.shape, job.p.dtype)[...] = job.p
            description = wire.description(job.p.shape, job.name, job.parameters["targets_form"])
            teacher.publish(name, teacher.region(memory), description)
            targets, region = student.attach(name)[0], student.region(own)
            q, gradient = (own.array(i << 19, job.q.shape, job.q.dtype) for i in range(2))
            q[...] = job.q
            tensors = {"predictions": wire.tensor(region, 0, job.name), "targets": wire.tensor(targets, 0, job.name),
                       "grad_predictions": wire.tensor(region, 1 << 19, job.name)}
            for _ in range(A_LIFE // 4):
                if self.stopping:
                    break
                gradient[...] = np.nan
                self.note("asked")
                self.take(student, student.submit(job.q.shape, tensors, **job.parameters), job, {"grad_predictions": gradient})
                self.rest()
            teacher.close()
        memory.close()
        own.close()


def sweep(pid):
    """Removes the shared memory of a client that was killed: it is the client's own, not the server's."""
    for path in pathlib.Path("/dev/shm").glob(f"{PREFIX[1:]}{pid}-*"):
        path.unlink(missing_ok=True)


KINDS = ["http_json"] * 7 + ["http_binary"] * 7 + ["http_shm"] * 5 + ["http_tensors"] * 2 + ["unix"] * 8 + ["unix_share"] * 3
