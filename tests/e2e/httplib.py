"""What the HTTP tests share: made-up tensors, how close an answer must be, shared memory, certificates, counting."""
import mmap
import os
import subprocess

import numpy as np
import pytest

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
