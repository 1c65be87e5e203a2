"""The Python package under test: client/python of this tree over the library of KLD_BIN, or, where
KLD_PYTHON_INSTALLED is set, what is installed in this interpreter's environment. Skips where there is none.
"""
import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from conftest import BIN, ROOT, suspend

PACKAGE = next((p for p in (ROOT / "client/python", ROOT / "python") if (p / "kld").is_dir()), None)
LIBRARY = next((p for p in (BIN / "libkld.so", BIN.parent / "lib/libkld.so") if p.exists()), None)
INSTALLED = bool(os.environ.get("KLD_PYTHON_INSTALLED"))


def import_kld():
    """The package `kld`, for a test module's top level."""
    if not INSTALLED:
        if PACKAGE is None or LIBRARY is None:
            pytest.skip("no package here", allow_module_level=True)
        needs = subprocess.run(["ldd", LIBRARY], capture_output=True, text=True).stdout
        if re.search("lib[at]san", needs):
            pytest.skip("a library with a sanitizer cannot be loaded into this interpreter",
                        allow_module_level=True)
        os.environ["KLD_LIBRARY"] = str(LIBRARY)
        sys.path.insert(0, str(PACKAGE))
    return importlib.import_module("kld")


def import_torch():
    """torch; missing, its tests are skipped, which in CI is a failure."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip("no torch", allow_module_level=True)


def sources_with_leftovers(folder):
    """The sources in a folder of their own, with what pip would have left among them: client/python/build and an
    .egg-info, of a version that had a module more."""
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns("build*", ".git", "__pycache__", ".*_cache"))
    if (ROOT / ".git").exists():
        (folder / ".git").symlink_to(ROOT / ".git")
    leave_build(folder / "client/python")
    return folder


def leave_build(package):
    for name in ("lib", *(f"lib.linux-x86_64-cpython-3{minor}" for minor in range(9, 16))):
        old = package / "build" / name / "kld"
        (old / "lib").mkdir(parents=True)
        (old / "_stale.py").write_text("")
        (old / "lib/libkld.so").write_text("")
    (package / "kld.egg-info").mkdir()
    (package / "kld.egg-info/SOURCES.txt").write_text("kld/_stale.py\n")


def environment(**more):
    """For a script of its own that imports kld."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KLD_")}
    if not INSTALLED:
        clean.update(KLD_LIBRARY=str(LIBRARY), PYTHONPATH=str(PACKAGE))
    return {**clean, **more}


def probabilities(seed, shape, dtype=np.float32):
    values = np.random.default_rng(seed).random(shape) + 0.05
    return (values / values.sum(axis=-1, keepdims=True)).astype(dtype)


def needs_card(backend, torch):
    if backend != "cuda":
        pytest.skip("needs the CUDA back end")
    if not torch.cuda.is_available():
        pytest.skip("needs a torch with CUDA")


@contextlib.contextmanager
def beside_a_stopped_worker(server, program, *arguments):
    """A program, given the server's URL and these, that says "ready" and then reads a line: its worker stands still from in between
    on. -> the process, and what has the worker go on, as it does at the end."""
    worker = server.child("worker")
    with subprocess.Popen([sys.executable, "-c", program, server.url_unix, *arguments], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as client:
        try:
            assert client.stdout.readline() == "ready\n"
            suspend(worker)
            client.stdin.write("go\n")
            client.stdin.flush()
            yield client, lambda: os.kill(worker, signal.SIGCONT)
        finally:
            os.kill(worker, signal.SIGCONT)
            client.kill()
