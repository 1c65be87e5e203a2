"""What the linker and the compiler were told to guard programs with is in every one of them: read from the files
themselves by readelf. That the compiler's guards work is tests/unit/test_hardening.c's."""
import os
import re
import shutil
import subprocess

import pytest

from conftest import BIN, ROOT, sanitizer

TREE = BIN if (BIN / "libkld.so").exists() else BIN.parent  # a build folder, or the tarball's tree
FOUND = sorted({path.resolve() for folder in (BIN, TREE / "lib", TREE / "libexec", TREE / "examples", TREE / "bench")
                if folder.is_dir() for path in folder.iterdir()
                if path.is_file() and path.open("rb").read(4) == b"\x7fELF"})
# The tarball brings Debian's libraries along, which are Debian's to build.
OURS = [path for path in FOUND if path.suffix != ".so" and ".so." not in path.name or path.name.startswith("libkld")]


pytestmark = pytest.mark.skipif(not shutil.which("readelf") and os.environ.get("CI") != "true",
                                reason="needs readelf (Debian: binutils)")


def readelf(path, *arguments):
    return subprocess.run(["readelf", "-W", *arguments, path], capture_output=True, text=True, check=True,
                          env={**os.environ, "LC_ALL": "C"}).stdout


def test_all_were_found():
    names = {path.name for path in OURS}
    assert {"kld-server", "kld"} <= names and any(name.startswith("libkld.so") for name in names), names


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_position_relocations_and_stack(path):
    assert "DYN (" in readelf(path, "-h"), "loaded at an address of its own"
    dynamic, segments = readelf(path, "-d"), readelf(path, "-l")
    if not path.name.startswith("libkld"):
        assert re.search(r"FLAGS_1\).*\bPIE\b", dynamic), "a program at any address"
    assert "GNU_RELRO" in segments and re.search(r"\((FLAGS|FLAGS_1)\).*\b(BIND_NOW|NOW)\b", dynamic), \
        "all relocations are done, and read only, before main()"
    assert "TEXTREL" not in dynamic
    stack = re.search(r"GNU_STACK.* (\w+)\s+0x", segments)
    assert stack and "E" not in stack[1], "no code on the stack"
    assert not re.search(r"^\s+LOAD .*\bRWE\b", segments, re.M), "nothing that can be written can be run"
    paths = re.search(r"RUNPATH\).*\[(.*)\]", dynamic)
    for folder in paths[1].split(":") if paths else ():
        assert re.fullmatch(r"\$ORIGIN(/\.\.)?(/lib)?", folder), "libraries come from beside it or from the system"
    assert "RPATH)" not in dynamic


@pytest.mark.skipif(sanitizer() is not None, reason="a sanitizer's build has its own")
@pytest.mark.parametrize("path", [path for path in OURS if path.name.startswith(("kld", "libkld"))],
                         ids=lambda path: path.name)
def test_checked_calls_and_stacks(path):
    needed = set(re.findall(r" UND (\w+)", readelf(path, "--dyn-syms")))
    assert "__stack_chk_fail" in needed
    assert {name for name in needed if re.fullmatch(r"__\w+_chk", name)} >= {"__snprintf_chk"}, needed
    if ".nv_fatbin" not in readelf(path, "-S"):  # CUDA's runtime, linked in, has its own
        assert not needed & {"gets", "strcpy", "strcat", "sprintf", "vsprintf"}, "what cannot be checked"


@pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="needs the sources")
def test_every_object_is_compiled_so(tmp_path):
    """As make would, from nothing. (Code for the card has no stack to smash; what starts it is in the .cu files, whose
    host code nvcc has compiled with the same guards.)"""
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    said = subprocess.run(["make", "-n", "V=1", "CUDA=0", f"BUILD={tmp_path}/build", "all", "unit", "examples",
                           "bench-programs"], cwd=ROOT, capture_output=True, text=True, check=True, env=clean).stdout
    compiled = [line for line in said.splitlines() if re.search(r"\.c( |$)", line) and " -std=c17 " in line]
    assert len(compiled) > 200, said[:2000]
    for line in compiled:
        assert "-D_FORTIFY_SOURCE=3" in line and "-fstack-protector-strong" in line, line
        assert " -fPIC " in line or " -fPIE " in line, line
        assert re.search(r" -O[123] ", line), "without optimisation nothing is fortified"
    card = subprocess.run(["make", "-n", "V=1", "NVCC=nvcc", f"CUDA_BUILD={tmp_path}/build",
                           f"{tmp_path}/build/cuda/kernels/cuda/rows_fp32.cu.o"],
                          cwd=ROOT, capture_output=True, text=True, check=True, env=clean).stdout
    [host] = re.findall(r"^nvcc .*-Xcompiler (\S+).* -c ", card, re.M)
    assert {"-D_FORTIFY_SOURCE=3", "-fstack-protector-strong", "-fPIC"} <= set(host.split(",")), host
