"""The example in Python: a teacher's published tensor, read by students in other processes. The one in C is
in test_libkld.py."""
import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from conftest import BIN, ROOT, SANITIZER, clean_environment
from unixlib import softmax64

EXAMPLES = BIN / "examples" if (BIN / "examples").is_dir() else BIN.parent / "libexec"
SCRIPT = next((p for p in (ROOT / "client/examples/share.py", EXAMPLES / "share.py") if p.exists()), None)
LIBRARY = next((p for p in (BIN / "libkld.so", BIN.parent / "lib/libkld.so") if p.exists()), None)


def python_of(backend):
    """NumPy here; on a GPU an interpreter with PyTorch."""
    python = sys.executable
    if backend == "cuda" and subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        pytest.skip("the example needs PyTorch on a GPU")
    return python


def run(python, url):
    environment = clean_environment(KLD_LIBRARY=LIBRARY)
    if re.search("lib[at]san", subprocess.run(["ldd", LIBRARY], capture_output=True, text=True).stdout):
        pytest.skip("a library with a sanitizer cannot be loaded into this interpreter")
    return subprocess.run([python, SCRIPT, url], capture_output=True, text=True, timeout=120,
                          env=environment)


def logits(seed):
    return (np.random.default_rng(seed).random((64, 1000)) * 4).astype(np.float32)


def test_its_structs_are_those_of_the_headers(tmp_path):
    """One that is shorter than libkld's is written beyond its end."""
    headers = next((p for p in (ROOT, BIN.parent / "include") if (p / "client/kld.h").exists()), None)
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not headers or not compiler:
        pytest.skip("needs the headers and a compiler")
    pairs = {"Error": "kld_error", "Tensor": "kld_tensor", "Op": "kld_op", "Info": "kld_server_info",
             "Request": "kld_request", "Result": "kld_result", "View": "kld_tensor_view"}
    source = tmp_path / "sizes.c"
    sizes = "".join(f'printf("%zu ", sizeof(struct {name}));' for name in pairs.values())
    source.write_text(f'#include <stdio.h>\n#include "client/kld.h"\nint main(void) {{ {sizes} }}\n')
    subprocess.run([compiler, f"-I{headers}", source, "-o", tmp_path / "sizes"], check=True)
    expected = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True).stdout.split()
    spec = importlib.util.spec_from_file_location("share", SCRIPT)
    share = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(share)
    found = {name: ctypes.sizeof(getattr(share, name)) for name in pairs}
    assert found == dict(zip(pairs, map(int, expected)))


def test_python_teacher_and_student(make_server, backend):
    server = make_server(http="")
    result = run(python_of(backend), server.url_unix)
    assert result.returncode == 0, result.stderr
    assert "teacher: published example/py-logits" in result.stdout
    found = re.findall(r"student: temperature (\S+): loss (\S+), gradient\[0\] (\S+)", result.stdout)
    assert sorted(float(t) for t, _, _ in found) == [1, 2.5]
    for temperature, loss, gradient in ((float(x) for x in line) for line in found):
        p, q = softmax64(logits(1) / temperature), softmax64(logits(2) / temperature)
        assert loss == pytest.approx((p * np.log(p / q)).sum(axis=1).mean(), rel=1e-5)
        assert gradient == pytest.approx((q - p)[0, 0] / temperature / 64, rel=1e-3, abs=1e-12)
    assert not SANITIZER.search(server.log())


def test_python_says_that_it_needs_numpy(tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError(\"No module named 'numpy'\")\n")
    result = subprocess.run([sys.executable, SCRIPT, "local:"], capture_output=True, text=True, timeout=60,
                            env=clean_environment(PYTHONPATH=tmp_path))
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert result.stderr.startswith("share.py: it needs NumPy (Debian: python3-numpy; or pip install numpy)")


def test_python_says_what_is_wrong(backend):
    result = run(sys.executable, "socket:/nowhere")
    assert result.returncode != 0 and "unknown kind of server" in result.stderr
