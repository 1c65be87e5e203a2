"""What the HTTP tests share: made-up tensors, how close an answer must be, shared memory, certificates, counting."""
import functools
import math
import mmap
import os
import pathlib
import re
import subprocess
import time
import warnings

import numpy as np
import pytest

from conftest import sanitizer, wait_until
from faillib import BLOCKS_OF_CACHES

PREFIX = "/kld-test-"
POOL = 'kld_pool_bytes{worker="0"}'


def is_sanitized():
    return sanitizer() is not None


def probabilities(shape, seed, dtype="<f4"):
    x = np.random.default_rng(seed).random(shape) + 0.05
    return (x / x.sum(-1, keepdims=True)).astype(dtype)


def logits(shape, seed, dtype="<f4"):
    return (np.random.default_rng(seed).standard_normal(shape) * 2).astype(dtype)


def close(got, truth, dtype):
    tolerance = {"FP64": 1e-12, "FP32": 2e-6, "FP16": 2e-3, "BF16": 1e-2}[dtype]
    assert got.shape == truth.shape
    np.testing.assert_allclose(np.asarray(got, np.float64), truth, rtol=tolerance,
                               atol=tolerance * max(1e-3, np.abs(truth).max()))


class Late(Exception):
    """The test, not the server, was too slow for what it tries: on a busy machine anybody may be."""


def unless_late(test):
    """Of a test that has to do something in time: begun again, on new servers, where it did not."""
    @functools.wraps(test)
    def tried(**arguments):
        for _ in range(4):
            try:
                return test(**arguments)
            except Late as late:
                warnings.warn(f"{test.__name__}: begun again: {late!r:.300}")
        return test(**arguments)
    return tried


class Pace:
    """What a sender of so many bytes a second has to send by now, beyond what he has sent: whoever looks late sends more.
    What fails inside of it is Late if he was silent for half of slow_ms, of which the server has a right to cut him off.
    Silence ends at a look, so what is judged is looked behind first: a wait for the server that fails is no silence."""

    def __init__(self, bytes_per_s, slow_ms):
        self.rate, self.sent, self.silence_s, self.most_s = bytes_per_s, 0, 0, slow_ms / 2000
        self.begin = self.last = time.monotonic()

    def look(self):
        now = time.monotonic()
        self.silence_s, self.last = max(self.silence_s, now - self.last), now

    def seen(self, what):
        """What the server said, behind a look: it may have been cut off while nobody sent."""
        self.look()
        return what

    def over(self):
        """He has sent all, and was answered: what fails from here on is not for his silence."""
        self.most_s = math.inf

    def due(self):
        self.look()
        due = int((self.last - self.begin) * self.rate) - self.sent
        self.sent += due
        return due

    def __enter__(self):
        return self

    def __exit__(self, kind, problem, trace):
        if kind and issubclass(kind, Exception) and self.silence_s > self.most_s:  # pytest's own end of a test is none
            raise Late(f"silent for {self.silence_s:.1f} s", problem) from problem


def socket_mib():
    """What lies between two processes unread, at most."""
    return sum(int(pathlib.Path(f"/proc/sys/net/ipv4/tcp_{of}mem").read_text().split()[2]) for of in "rw") >> 20


class Shared:
    """A POSIX shared-memory object."""

    def __init__(self, size, name="a"):
        self.key = f"{PREFIX}{os.getpid()}-{name}"
        self.path = "/dev/shm" + self.key
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)

    def __enter__(self):
        return self

    def __exit__(self, *ignored):
        os.unlink(self.path)
        os.close(self.fd)


def register(server, name, shared, size, offset=0):
    return server.json(f"/v2/systemsharedmemory/region/{name}/register",
                       {"key": shared.key, "offset": offset, "byte_size": size})


def unregister(server, name=None):
    path = "/v2/systemsharedmemory" + (f"/region/{name}" if name else "") + "/unregister"
    return server.request(path, b"", method="POST")[0]


def in_region(name, shape, offset, dtype="FP32", size=4):
    return {"name": name, "shape": list(shape), "datatype": dtype, "parameters": {
        "shared_memory_region": "r", "shared_memory_offset": offset,
        "shared_memory_byte_size": int(np.prod(shape)) * size}}


def fds_of(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_of(pid):
    """Bytes in memory of its own, shared ones (the staging, taken by first use), and the most that both have been."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return {name: int(re.search(rf"{key}:\s+(\d+)", text).group(1)) << 10
            for name, key in (("own", "RssAnon"), ("shared", "RssShmem"), ("peak", "VmHWM"))}


class Flat:
    """Around what must leave nothing behind: gateway and worker are the same processes before and after, with no more
    descriptors, no memory in use, and no more of their own but what an allocator may keep. Where large JSON comes, each
    thread of the pool is to have had such before. growth: bytes that each may keep, where the same came often before;
    headers: of who may read /metrics; page: of faillib.counting(), in whose environment the server was started: the
    blocks of malloc() are counted, since what is lost in the room of what was freed before shows in no size."""
    ROLES, GROWTH = ("gateway", "worker"), 4 << 20

    def __init__(self, server, growth=GROWTH, headers=None, page=None):
        self.server, self.growth, self.headers, self.page = server, growth, headers, page

    def is_idle(self):
        metrics = self.server.metrics(self.headers)
        return metrics["kld_http_connections"] == 1 and not any(
            metrics[name] for name in ("kld_staging_bytes", "kld_http_requests_in_flight", POOL))

    def blocks_now(self):
        pages = [self.page.read(role) for role in self.ROLES] if self.page else []
        assert not pages or [page["pid"] for page in pages] == self.pids
        return [page["blocks"] for page in pages]

    def __enter__(self):
        self.server.wait_linked()  # else the worker has a descriptor more in the end
        wait_until(self.is_idle, what="an idle server")
        self.pids = [self.server.child(role) for role in self.ROLES]
        self.fds = [fds_of(pid) for pid in self.pids]
        self.bytes = [memory_of(pid)["own"] for pid in self.pids]
        self.blocks = self.blocks_now()
        return self

    def __exit__(self, kind, *ignored):
        if kind:
            return
        assert self.pids == [self.server.child(role) for role in self.ROLES], "a child died"
        wait_until(lambda: self.is_idle() and fds_of(self.pids[0]) <= self.fds[0] + 1, 20, "an idle server")
        wait_until(lambda: fds_of(self.pids[1]) <= self.fds[1], what="closed descriptors of the worker")
        grown = [memory_of(pid)["own"] - before for pid, before in zip(self.pids, self.bytes)]
        assert is_sanitized() or max(grown) < self.growth, grown
        wait_until(lambda: all(now <= before + BLOCKS_OF_CACHES for now, before in zip(self.blocks_now(), self.blocks)),
                   what=f"no more blocks of malloc() than {self.blocks}")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """ca.crt signs server.crt (for localhost) and client.crt; other.crt is signed by itself."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for name in ("ca", "other"):
        openssl("req", "-x509", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj",
                f"/CN={name}", "-days", "2")
    for name, more in (("server", "subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth"),
                       ("client", "extendedKeyUsage=clientAuth")):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "more").write_text(more + "\n")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-out", f"{name}.crt", "-extfile", "more")
    return folder


def tls_flags(folder, **more):
    return {"tls_cert": folder / "server.crt", "tls_key": folder / "server.key", **more}
