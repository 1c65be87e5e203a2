"""What make compiles: again what had other flags, and for the demonstration and the tests what this machine can run."""
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CARD = any(pathlib.Path("/dev").glob("nvidia[0-9]*"))


def run_make(*arguments, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CUDA") and name not in
             ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "SANITIZE", "CFLAGS", "CPPFLAGS", "LDFLAGS")}
    return subprocess.run(["make", "-j1", *arguments], cwd=ROOT, capture_output=True, text=True, env={**clean, **variables})


def make(*arguments, **variables):
    done = run_make(*arguments, **variables)
    assert done.returncode == 0, done
    return done.stdout


def test_what_was_found_wants_a_folder(tmp_path):
    """Without one a target's name was taken for it, and the archive was written without that target's inputs."""
    clean = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["make", "-j1", "fuzz-found", "FUZZ_NAMES=", "SELF=+true", f"BUILD={tmp_path}"], cwd=ROOT,
                          capture_output=True, text=True, env=clean)
    assert done.returncode == 2 and "OUT=FOLDER is missing" in done.stderr, done
    done = subprocess.run([ROOT / "deploy/fuzz-found.sh", tmp_path, tmp_path / "none"], cwd=tmp_path,
                          capture_output=True, text=True, env=clean)
    assert done.returncode == 2 and f"there is no {tmp_path}/none/corpus" in done.stderr, done


@pytest.mark.parametrize("seconds", ["1m", "", "0", "-1", "soon"])
def test_fuzzing_wants_a_number_of_seconds(seconds, tmp_path):
    """libFuzzer took what it could read of it, and 0 of a word, which is without end."""
    done = subprocess.run(["sh", "deploy/fuzz.sh", tmp_path, seconds, "none"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and f"SECONDS='{seconds}': expected" in done.stderr, done
    assert not list(tmp_path.iterdir())


def test_other_flags_compile_again(tmp_path):
    name = f"{tmp_path}/obj/proto/status.c.o"
    arguments = name, f"BUILD={tmp_path}", "CUDA=0"
    assert "proto/status.c" in make(*arguments)
    assert "proto/status.c" not in make(*arguments)
    assert "proto/status.c" in make(*arguments, "CFLAGS=-O1")
    assert "proto/status.c" not in make(*arguments, "CFLAGS=-O2", "AS_BUILT=1")
    assert "proto/status.c" in make(*arguments, "CFLAGS=-O2")
    # The linker's too: what is linked of it is linked again.
    assert "proto/status.c" in make(*arguments, "CFLAGS=-O2", "LDFLAGS=-Wl,-O1")
    assert "proto/status.c" not in make(*arguments, "CFLAGS=-O2", "LDFLAGS=-Wl,-O1")


def test_the_compiler_is_gcc_unless_somebody_says_another(tmp_path):
    """It was cc: CC ?= gcc leaves a variable that make has by itself."""
    target = "V=1", "-n", f"{tmp_path}/obj/proto/status.c.o", f"BUILD={tmp_path}", "CUDA=0"
    clean = {name: value for name, value in os.environ.items() if name not in ("CC", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")}

    def compiles(*arguments, **variables):
        done = subprocess.run(["make", "-j1", *target, *arguments], cwd=ROOT, capture_output=True, text=True,
                              env={**clean, **variables})
        assert done.returncode == 0, done
        return next(line.split()[0] for line in done.stdout.splitlines() if " -c proto/status.c" in line)

    empty = tmp_path / "bin"
    empty.mkdir()
    for program in ("make", "sh", "cat", "cksum", "cut", "git", "find", "sort", "nproc"):
        (empty / program).symlink_to(shutil.which(program))
    assert compiles() == "gcc"
    assert compiles(CC="clang-7") == compiles("CC=clang-7") == "clang-7"
    assert compiles(PATH=str(empty)) == "cc"


def test_no_default_is_for_a_variable_of_makes_own():
    """?= would do nothing."""
    said = subprocess.run(["make", "-pf", "/dev/null"], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}).stdout
    own = set(re.findall(r"^# default\n(\w+) :?= ", said, re.M))
    assert {"CC", "AR", "CXX", "LD"} <= own
    assert own.isdisjoint(re.findall(r"^(\w+)\s*\?=", (ROOT / "Makefile").read_text(), re.M))


def test_without_makes_own_variables(tmp_path):
    said = make("-n", "-R", "V=1", f"{tmp_path}/libkld.a", f"{tmp_path}/obj/proto/status.c.o", f"BUILD={tmp_path}", "CUDA=0")
    assert "\ngcc " in said and "&& ar rcs " in said, said


def test_archives_are_made_by_the_archiver_that_was_asked_for(tmp_path):
    said = make("-n", "V=1", f"{tmp_path}/libkld.a", f"{tmp_path}/libkernels.a", f"BUILD={tmp_path}", "CUDA=0", "AR=gcc-ar")
    assert said.count("&& gcc-ar rcs ") == 2, said


@pytest.mark.skipif(not pathlib.Path("/usr/local/cuda/include/cuda_runtime.h").exists(), reason="needs CUDA's headers")
@pytest.mark.parametrize("source", ["tests/emulate/runtime.c", "tests/unit/kernels/cuda/test_thread.c"])
def test_the_double_of_the_runtime_compiles_without_warnings(source, tmp_path):
    """With the double of the kernels and alone, where a function of it was unused."""
    make(f"{tmp_path}/obj/{source}.o", f"BUILD={tmp_path}", "CUDA=1", "CUDA_CU=", "CFLAGS=-O1 -Werror",
         "NVCC=/usr/local/cuda/bin/nvcc")


THEIRS = {"CPPFLAGS": "-DTHEIRS=1 -D_FORTIFY_SOURCE=2", "LDFLAGS": "-Wl,-O1"}


@pytest.mark.parametrize("where", ["argument", "environment", "a make within"])
def test_flags_are_added_to_the_projects(where, tmp_path):
    """As dpkg-buildflags gives them: they took the place of -I. and of what the linker is told to guard programs with."""
    arguments = "V=1", "CC=cc", "CUDA=0", f"BUILD={tmp_path}"
    said = (make("-n", "all", "unit", "examples", "bench-programs", *arguments, **THEIRS) if where == "environment" else
            make("-n", "check-programs" if where == "a make within" else "programs", *arguments,
                 *(f"{name}={value}" for name, value in THEIRS.items())))
    lines = [line for line in said.splitlines() if line.startswith("cc ")]
    compiled = [line for line in lines if " -std=c17 " in line and " -c " in line]
    linked = [line for line in lines if " -Wl,-z," in line]
    assert len(compiled) > 200 and len(linked) > 100
    for line in compiled:
        assert " -I. -D_GNU_SOURCE " in line and line.count("-DTHEIRS=1") == line.count("_FORTIFY_SOURCE") == 1, line
    for line in linked:
        assert line.count("-Wl,-z,relro,-z,now") == line.count("-Wl,-O1") == 1, line
        assert line.count("_FORTIFY_SOURCE") <= 1, line


@pytest.mark.parametrize("where", ["argument", "environment"])
@pytest.mark.parametrize("name, value", [("SANITIZE", "undefined"), ("SANITIZE", "adress"), ("SANITIZE", "address "),
                                         ("CUDA", "yes"), ("CUDA", "/usr/local/cuda"), ("CUDA_PTX_ONLY", "0")])
def test_what_is_misspelt_is_not_another_build(name, value, where):
    """It was one without sanitizers or without CUDA, whose tests pass, and 0 left out of the kernels what 1 leaves out."""
    arguments = "-n", "all", "NVCC=/none/bin/nvcc", "BUILD=build-none"
    done = run_make(*arguments, **{name: value}) if where == "environment" else run_make(*arguments, f"{name}={value}")
    origin = "command line" if where == "argument" else "environment"
    assert done.returncode == 2 and f"{name}='{value}' ({origin}): expected one of" in done.stderr, done


@pytest.mark.parametrize("name", ["BUILD", "CUDA_BUILD"])
@pytest.mark.parametrize("value", ["", "two words"])
def test_a_build_has_one_folder(name, value):
    """Without a name it went to /obj, /kld and so on."""
    done = run_make("-n", "all", "CUDA=0", f"{name}={value}")
    assert done.returncode == 2 and f"{name}='{value}' (command line): expected the name of one folder" in done.stderr, done


def test_what_there_is_to_choose():
    for name, values in {"SANITIZE": ("", "address", "thread", "coverage"), "CUDA": ("", "0", "1"),
                         "CUDA_PTX_ONLY": ("", "1")}.items():
        for value in values:
            make("print-cuda", "NVCC=/none/bin/nvcc", f"{name}={value}")
    for nvcc, found in {"/none/bin/nvcc": "1\n", "": "0\n"}.items():
        arguments = "-s", "print-cuda", f"NVCC={nvcc}"
        assert make(*arguments) == make(*arguments, "CUDA=") == make(*arguments, CUDA="") == found


@pytest.mark.parametrize("nvcc", ["", " "])
def test_cuda_without_its_compiler(nvcc):
    """The recipe's first word was -O3 then: make took the dash for its own, and ignored that there is no such program."""
    done = run_make("-n", "build-none/cuda/kernels/cuda/rows_any.cu.o", "CUDA=1", f"NVCC={nvcc}", "CUDA_BUILD=build-none")
    assert done.returncode == 2 and "CUDA=1 needs the CUDA toolkit: no nvcc" in done.stderr, done


@pytest.mark.parametrize("where", ["argument", "environment"])
def test_the_bill_of_materials_has_the_cuda_that_is_compiled_with(where, tmp_path):
    """It had that of the nvcc in PATH, where make takes that of /usr/local/cuda first, or the one that it is told."""
    for folder, version in ("asked", "13.1.5"), ("path", "12.0.1"):
        program = tmp_path / folder / "nvcc"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\n[ "$1" != --version ] || echo "Cuda compilation tools, release 1, V{version}"\n')
        program.chmod(0o755)
    asked = f"NVCC={tmp_path}/asked/nvcc"
    script = '. deploy/sbom.sh && cuda_of CUDA=1 "$@"'
    done = subprocess.run(["env", f"PATH={tmp_path}/path:{os.environ['PATH']}", *([asked] if where == "environment" else []),
                           "bash", "-c", script, "-", *([asked] if where == "argument" else [])],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "13.1.5\n", done


def asked_of(target, *arguments, **variables):
    """The variables of the make that a target calls, as the last one says that names it."""
    said = make("-n", target, "NVCC=nvcc", "BUILD=build-none", "CUDA_BUILD=build-none", *arguments, **variables)
    line = next(line for line in said.splitlines() if "--no-print-directory" in line and "SANITIZE=" in line)
    words = [word.split("=", 1) for word in line.split() if "=" in word]
    return {name: value for name, value in words}


@pytest.mark.skipif(CARD, reason="compiles for the card")
def test_the_demonstration_without_a_card_compiles_no_kernel():
    assert asked_of("demo")["CUDA"] == "0"
    assert asked_of("demo", "CUDA=1")["CUDA"] == "1", "what was asked for"


@pytest.mark.skipif(CARD, reason="compiles for the card")
def test_the_tests_without_a_card_compile_kernels_quickly():
    asked = asked_of("check-programs")
    assert asked["CUDA"] == "1" and asked["CUDA_PTX_ONLY"] == "1" and asked["CUDA_ARCHS"] == "90"
    assert "CUDA_ARCHS" not in asked_of("check-programs", "CUDA_ARCHS=80")


def test_the_cards_that_are_there_are_compiled_for():
    asked = asked_of("demo", "CARDS=/dev/nvidia0", "CARD_ARCHS=86")
    assert asked["CUDA"] == "1" and asked["CUDA_ARCHS"] == '"86"'


@pytest.mark.parametrize("card", [True, False])
def test_the_demonstration_says_why_the_card_is_not_used(card, tmp_path):
    """With a server that does not start, in the tarball's layout: what comes after is not for here."""
    script = (ROOT / "deploy/demo.sh").read_text()
    (tmp_path / "demo").write_text(script.replace("/dev/nvidia", f"{tmp_path}/nvidia"))
    for name, text in {"kld": "kld: no back end 'cuda' in this build; it has: auto, cpu\n     more", "kld-server": "stub"}.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{text}" >&2\nexit 2\n')
        program.chmod(0o755)
    (tmp_path / "libexec").mkdir()
    if card:
        (tmp_path / "nvidia0").touch()
    done = subprocess.run(["bash", tmp_path / "demo"], capture_output=True, text=True)
    assert done.returncode == 1 and "did not start" in done.stderr
    said = "demo: the GPU is not used: this build has no CUDA back end: no nvcc found when it was built, or CUDA=0 asked for\n"
    assert done.stdout == (said if card else "")


@pytest.mark.parametrize("asked, variables", [([], {}), ([], {"CUDA_ARCHS": ""}), (["CUDA_ARCHS="], {})],
                         ids=["none", "environment", "argument"])
def test_no_architectures_are_the_usual_ones(asked, variables):
    """An image's build has the variable, empty, where nobody said for which cards."""
    said = make("-n", "build-none/cuda/kernels/cuda/rows_any.cu.o", "CUDA=1", "NVCC=/none/nvcc", "CUDA_BUILD=build-none",
                *asked, **variables)
    assert "compute_80,code=sm_80" in said and "compute_100,code=compute_100" in said
    assert "compute_," not in said
    assert asked_of("demo", "CARDS=/dev/nvidia0", "CARD_ARCHS=86", *asked, **variables)["CUDA_ARCHS"] == '"86"'


def test_the_usual_ones_are_those_that_the_toolkit_knows(tmp_path):
    """compute_100 came with CUDA 12.8; who asks for one by name gets nvcc's own word."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\n[ \"$1\" != --list-gpu-arch ] || printf 'compute_%s\\n' 50 70 75 80 86 87 89 90\n")
    nvcc.chmod(0o755)
    arguments = "-n", "build-none/cuda/kernels/cuda/rows_any.cu.o", "CUDA=1", f"NVCC={nvcc}", "CUDA_BUILD=build-none"
    said = make(*arguments)
    assert "compute_80,code=sm_80" in said and "compute_90,code=compute_90" in said and "_100" not in said, said
    assert "_87" not in said and "_75" not in said, said
    assert "compute_100,code=sm_100" in make(*arguments, "CUDA_ARCHS=80 100")
