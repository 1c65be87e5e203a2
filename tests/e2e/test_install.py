"""make install and make dist: what they put where compiles, links and runs, also after a move."""
import os
import re
import shutil
import subprocess
import tarfile

import pytest

from conftest import BIN, DATA, ROOT, clean_environment, sanitizer
from pythonlib import sources_with_leftovers

PROGRAM = r"""
#include <kld/kld.h>
#include <stdio.h>
int main(void) {
    struct kld_connection *connection = NULL;
    struct kld_error error;
    struct kld_op op;
    kld_op_init(&op);
    if (kld_connect("local:cpu", NULL, &connection, &error) != KLD_OK) return 1;
    kld_close(connection);
    printf("%s %s %s\n", kld_version(), kld_divergence_name(op.divergence), kld_status_name(KLD_BUSY));
    return 0;
}
"""


pytestmark = pytest.mark.skipif(
    not (ROOT / "Makefile").exists() or not (BIN / "libkld.a").exists() or sanitizer() is not None,
    reason="needs the sources and an ordinary build")


def environment(**more):
    return {**{name: value for name, value in clean_environment().items()
               if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "LD_LIBRARY_PATH")}, **more}


def make(*arguments, tree=ROOT, **more):
    """With a umask that keeps to itself what is made: others are to read what was installed. What is yet to be compiled is
    for all tests."""
    cuda = int(b"kld_backend_cuda" in (BIN / "libkld.a").read_bytes())
    common = f"BUILD={BIN}", f"CUDA={cuda}", f"CUDA_BUILD={ROOT}/build", "AS_BUILT=1"
    for what, umask, where in (["all", "examples", "bench-programs"], 0o022, ROOT), (arguments, 0o077, tree):
        result = subprocess.run(["make", *what, *common], cwd=where, capture_output=True, text=True,
                                env=environment(**more), umask=umask)
        assert result.returncode == 0, result.stdout + result.stderr


def run(*arguments, **more):
    result = subprocess.run(list(map(str, arguments)), capture_output=True, text=True,
                            env=environment(**more))
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def is_for_all(mode):
    """Others may read it, and, where the owner may, run it or look into it."""
    return mode & 0o044 == 0o044 and bool(mode & 0o100) == (mode & 0o111 == 0o111)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A tree as a package would have it: PREFIX=/usr below DESTDIR."""
    folder = tmp_path_factory.mktemp("install")
    make("install", "PREFIX=/usr", f"DESTDIR={folder}")
    return folder / "usr"


def test_what_is_installed(installed):
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if not path.is_dir()}
    version = (ROOT / "proto" / "VERSION").read_text().strip()
    assert files == {"bin/kld", "bin/kld-server", "lib/libkld.a", "lib/libkld.so", "lib/libkld.so.0",
                     f"lib/libkld.so.{version}", "lib/pkgconfig/kld.pc", "include/kld/kld.h",
                     "include/kld/op.h", "include/kld/status.h", "share/bash-completion/completions/kld",
                     "share/man/man1/kld.1", "share/man/man3/libkld.3", "share/man/man8/kld-server.8"}
    assert not [path for path in [installed, *installed.rglob("*")] if not is_for_all(path.stat().st_mode)]
    for name in ("lib/libkld.so", "lib/libkld.so.0"):
        assert not os.readlink(installed / name).startswith("/")


@pytest.mark.parametrize("uid, destdir, ran", [(0, False, True), (0, True, False), (1000, False, False)],
                         ids=["root", "package", "user"])
def test_the_loader_is_told(uid, destdir, ran, tmp_path):
    """By ldconfig, a stub here, which knows the folder; else -lkld links and the program finds no libkld.so.0."""
    prefix, log = tmp_path / "usr", tmp_path / "log"
    programs = {"id": f"echo {uid}",
                "ldconfig": f"echo ran \"$@\" >>{log}\n[ -z \"$1\" ] || printf '/lib: (of the system)\\n{prefix}/lib: (its own)\\n'"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    make("install", f"PREFIX={prefix}", f"DESTDIR={tmp_path if destdir else ''}", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (log.read_text().splitlines() if log.exists() else []) == (["ran -NXv", "ran"] if ran else [])


@pytest.mark.parametrize("compiler", [["gcc", "-std=c99", "-x", "c"], ["gcc", "-std=c17", "-x", "c"],
                                      ["g++", "-std=c++11", "-x", "c++"]], ids=["c99", "c17", "c++"])
def test_a_program_from_the_installed_tree(installed, tmp_path, compiler):
    source = tmp_path / "program.txt"
    source.write_text(PROGRAM)
    program = tmp_path / "program"
    run(*compiler, "-Wall", "-Wextra", "-Wpedantic", "-Werror", source, "-x", "none", "-o", program,
        f"-I{installed}/include", f"-L{installed}/lib", "-lkld")
    output = run(program, LD_LIBRARY_PATH=f"{installed}/lib")
    assert output.split()[1:] == ["forward_kl", "busy"]


def test_pkg_config_and_static_link(installed, tmp_path):
    (tmp_path / "program.c").write_text(PROGRAM)
    flags = run("pkg-config", "--cflags", "--libs", "--static", "kld",
                PKG_CONFIG_PATH=f"{installed}/lib/pkgconfig",
                PKG_CONFIG_SYSROOT_DIR=str(installed.parent)).split()
    flags = [f"{installed}/lib/libkld.a" if flag == "-lkld" else flag for flag in flags]
    run("gcc", tmp_path / "program.c", "-o", tmp_path / "program", *flags)
    assert "forward_kl" in run(tmp_path / "program")


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "client/examples").glob("*.c")))
def test_an_example_against_the_installed_tree(installed, tmp_path, name):
    """As README.md says, with no include path to the sources."""
    flags = run("pkg-config", "--cflags", "--libs", "kld", PKG_CONFIG_PATH=f"{installed}/lib/pkgconfig",
                PKG_CONFIG_SYSROOT_DIR=str(installed.parent)).split()
    source = tmp_path / f"{name}.c"
    shutil.copy(ROOT / "client/examples" / f"{name}.c", source)
    run("gcc", "-Wall", "-Werror", source, "-o", tmp_path / name, *flags, "-lm")
    if name in ("sync", "async"):  # the others want a server
        assert "loss" in run(tmp_path / name, "local:cpu", LD_LIBRARY_PATH=f"{installed}/lib")


def test_only_the_interface_is_exported(installed):
    names = {line.split()[-1] for line in
             run("nm", "-D", "--defined-only", installed / "lib" / "libkld.so").splitlines()}
    assert {"kld_connect", "kld_run", "kld_op_init", "kld_error_set"} <= names
    assert not [name for name in names if not name.startswith("kld_")]
    assert not [name for name in names if name.startswith(("kld_frame", "kld_cpu"))]
    servers_own = {"kld_backends", "kld_backends_release", "kld_backend_find"}  # kernels/backend.h
    assert {name for name in names if name.startswith("kld_backend")} == servers_own


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The tarball, made where pip has been before, and moved."""
    folder = tmp_path_factory.mktemp("tarball")
    make("dist", tree=sources_with_leftovers(folder / "sources"))
    tarball = next(BIN.glob("kld-*-linux-x86_64.tar.gz"))
    with tarfile.open(tarball) as packed:
        assert not [member.name for member in packed if not is_for_all(member.mode)]
    run("tar", "-xzf", tarball, "-C", folder)
    tree = folder / "moved here"
    next(folder.glob("kld-*")).rename(tree)
    yield tree
    shutil.rmtree(folder)


def test_tarball_runs_from_anywhere(unpacked, tmp_path):
    tree = unpacked
    for program in ("bin/kld-server", "bin/kld", "lib/libkld.so"):
        loaded = run("ldd", tree / program)
        assert "not found" not in loaded
        outside = [line for line in loaded.splitlines() if "=> /" in line and str(tree) not in line]
        assert all(re.search(r"lib(c|m|resolv|dl|rt|pthread)\.so", line) for line in outside), outside
    loss = run(tree / "bin" / "kld", "div", DATA / "digits" / "student.npy",
               DATA / "digits" / "teacher.npy", "--server", "local:cpu", "--quiet")
    assert float(loss) == pytest.approx(0.52633884867853531, rel=1e-6)
    folder = tmp_path / "run"
    folder.mkdir()
    process = subprocess.Popen([tree / "bin" / "kld-server", "--http=127.0.0.1:0",
                                f"--unix={folder}/s", "--backend=cpu"], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, env=environment())
    try:
        assert process.stdout.readline().startswith(b"ready ")
        run(tree / "bin" / "kld", "ping", "--server", f"unix:{folder}/s")
    finally:
        process.terminate()
        assert process.wait(30) == 0
        process.stdout.close()


def test_nothing_that_pip_left_is_in_the_tarball(unpacked):
    names = {path.name for path in (unpacked / "python").iterdir()}
    assert not [name for name in names if name == "build" or name.endswith(".egg-info")], names


def test_what_the_readme_points_at_is_in_the_tarball(unpacked):
    """By its name, and what those files point at in turn; sources are not in it."""
    named = set(re.findall(r"(?<![\w/.])((?:client|kernels|proto|server|deploy|tests)(?:/[\w.-]+)+)", (unpacked / "README.md").read_text()))
    assert {"deploy/README.md", "client/python/README.md", "tests/bench/results/peers-h200.svg"} <= named
    scripts = {"deploy/deps.sh"}
    assert not [name for name in named - scripts if not (unpacked / name).exists() and not (unpacked / f"{name}.c").exists()]
    guide = (unpacked / "deploy/README.md").read_text()
    for name in re.findall(r"`((?:systemd|kubernetes|mps|prometheus)/[\w./-]*)`|deploy/([\w./-]+\.ya?ml)", guide):
        assert (unpacked / "deploy" / "".join(name)).exists(), name
    assert not (unpacked / "Makefile").exists()


def test_the_python_package_from_the_tarball(unpacked, tmp_path):
    """Debian's setuptools builds it: nothing is downloaded."""
    of_debian = {"PATH": f"/usr/bin:{os.environ['PATH']}", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    run("python3", "-m", "venv", "--system-site-packages", tmp_path / "venv", **of_debian)
    tree = shutil.copytree(unpacked, tmp_path / "tree", symlinks=True)  # pip leaves what it builds where it does
    run(tmp_path / "venv/bin/pip", "install", "-q", "--no-build-isolation", tree / "python", **of_debian)
    program = ("import kld, os; print(kld.__file__, kld.__version__, kld.connect('local:cpu').info().backend, "
               "os.listdir(os.path.join(os.path.dirname(kld.__file__), 'lib')))")
    where, version, backend, libraries = run(tmp_path / "venv/bin/python", "-c", program).split()
    assert where.startswith(f"{tmp_path}/venv/") and backend == "cpu" and libraries == "['libkld.so']"
    assert version == (ROOT / "proto/VERSION").read_text().strip()
