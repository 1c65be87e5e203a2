"""What the HTTP tests share: made-up tensors, how close an answer must be, shared memory, counting."""
import mmap
import os

import numpy as np

PREFIX = "/kld-test-"


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
