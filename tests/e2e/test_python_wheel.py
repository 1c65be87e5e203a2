"""The Python package as users get it: `make wheel` and `pip install ./client/python`, each installed into a
virtual environment of its own, in which the other tests of the package then run against what was installed."""
import email
import os
import pathlib
import re
import shutil
import subprocess
import zipfile

import pytest

from conftest import BIN, ROOT, clean_environment
from pythonlib import leave_build, sources_with_leftovers

PYTHON = "/usr/bin/python3"  # Debian's: has NumPy, PyTorch, pytest and setuptools


def is_ordinary():
    return (ROOT / "Makefile").exists() and (BIN / "libkld.a").exists() and not re.search(
        rb"__[at]san_init", (BIN / "kld-server").read_bytes())


pytestmark = [pytest.mark.skipif(not is_ordinary(), reason="needs the sources and an ordinary build"),
              pytest.mark.skipif(bool(os.environ.get("KLD_PYTHON_INSTALLED")), reason="runs inside itself")]


def clean(**more):
    """As little as a user's shell has: no path to this tree's package or library. pip asks no index."""
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8",
            "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}


def run(*arguments, cwd, **more):
    result = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, timeout=600, cwd=cwd,
                            env=clean(**more))
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Made where pip has been before."""
    cuda = int(b"kld_backend_cuda" in (BIN / "libkld.a").read_bytes())
    environment = {name: value for name, value in clean_environment().items()
                   if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "LD_LIBRARY_PATH")}
    tree = sources_with_leftovers(tmp_path_factory.mktemp("sources") / "kld")
    result = subprocess.run(["make", "wheel", f"BUILD={BIN}", f"CUDA={cuda}", f"CUDA_BUILD={ROOT}/build", "AS_BUILT=1"],
                            cwd=tree, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(BIN.glob("kld-*.whl"))


def commands():
    return re.findall(r"^```sh\n(.*?)^```$", (ROOT / "client/python/README.md").read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    """The README's environment, with Debian's NumPy, PyTorch and pytest."""
    folder = tmp_path_factory.mktemp("home")
    run("sh", "-ec", commands()[0].splitlines()[0], cwd=folder, **as_user(folder / "kld-venv"))
    return folder / "kld-venv"


def as_user(venv):
    """Whose home the environment is in, and whose Python is Debian's."""
    return {"HOME": str(venv.parent), "PATH": f"{pathlib.Path(PYTHON).parent}:{os.environ['PATH']}"}


def test_what_is_in_the_wheel(wheel):
    version = (ROOT / "proto/VERSION").read_text().strip()
    assert wheel.name == f"kld-{version}-py3-none-manylinux_2_36_x86_64.whl"
    names = zipfile.ZipFile(wheel).namelist()
    sources = {f"kld/{path.name}" for path in (ROOT / "client/python/kld").iterdir() if path.is_file()}
    assert sources | {"kld/VERSION", "kld/lib/libkld.so.0"} <= set(names) and "kld/py.typed" in sources
    assert not [name for name in names if not name.startswith(("kld/", f"kld-{version}.dist-info/"))]
    assert not [name for name in names if "_stale" in name or name == "kld/lib/libkld.so"]
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(f"kld-{version}.dist-info/METADATA"))
    assert (metadata["Name"], metadata["Version"], metadata["Requires-Python"]) == ("kld", version, ">=3.9")
    classifiers = metadata.get_all("Classifier")
    assert {"License :: OSI Approved :: MIT License", "Operating System :: POSIX :: Linux", "Typing :: Typed"} <= set(
        classifiers) and metadata["Home-page"] is metadata["Project-URL"] is metadata["Author"] is None
    assert "numpy (>=1.21)" in metadata.get_all("Requires-Dist") or "numpy>=1.21" in metadata.get_all("Requires-Dist")
    assert metadata.get_payload().startswith("# kld for Python")


# libkld's own, and what Debian's libcurl loads: its protocols cannot be chosen among.
LIBRARIES = {"libkld", "libcurl", "libnghttp2", "libidn2", "librtmp", "libssh2", "libpsl", "libssl", "libcrypto",
             "libgssapi_krb5", "libldap-2.5", "liblber-2.5", "libzstd", "libbrotlidec", "libbrotlicommon", "libz",
             "libunistring", "libgnutls", "libhogweed", "libnettle", "libgmp", "libkrb5", "libk5crypto",
             "libkrb5support", "libcom_err", "libkeyutils", "libsasl2", "libp11-kit", "libffi", "libtasn1"}
OF_CUDA = {"libstdc++", "libgcc_s"}  # where the wheel has the CUDA back end
GLIBC = re.compile(r"(libc|libm|libresolv|ld-linux-x86-64|libpthread|libdl|librt)\.so\.\d+")


def test_the_libraries_in_the_wheel(wheel, tmp_path):
    """Those that libkld needs and no more, each found by $ORIGIN and called what no system's is, with its licence."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    folder, info = tmp_path / "kld/lib", next(tmp_path.glob("kld-*.dist-info"))
    needs = {}
    for path in folder.iterdir():
        said = subprocess.run(["readelf", "-dW", path], capture_output=True, text=True, check=True).stdout
        assert re.findall(r"RUNPATH.*\[(.*)\]", said) == ["$ORIGIN"] and "RPATH)" not in said.replace("RUNPATH)", "")
        assert re.findall(r"SONAME.*\[(.*)\]", said) == [path.name]
        needs[path.name] = set(re.findall(r"NEEDED.*\[(.*)\]", said))
    assert {re.match(r"(.*?)(-[0-9a-f]{8})?\.so", name)[1] for name in needs} in (LIBRARIES, LIBRARIES | OF_CUDA)
    assert all(name == "libkld.so.0" or re.search(r"-[0-9a-f]{8}\.so\.\d+$", name) for name in needs)
    reached, left = set(), {"libkld.so.0"}
    while left:
        one = left.pop()
        reached.add(one)
        left |= {name for name in needs[one] if not GLIBC.fullmatch(name)} - reached
    assert reached == set(needs)
    bundled = dict(re.findall(r"^(lib\S+): (\S+) ", (info / "LICENSE.bundled").read_text(), re.M))
    assert set(bundled) == set(needs) - {"libkld.so.0"}
    said = email.message_from_bytes((info / "METADATA").read_bytes()).get_all("License-File")
    for name in {"LICENSE", "LICENSE.bundled"} | {f"LICENSE.{package}" for package in bundled.values()}:
        assert name in said and (info / name).stat().st_size > 500, name
    for text in info.glob("LICENSE.lib*"):
        for name in re.findall(r"/usr/share/common-licenses/([\w.+-]*\w)", text.read_text()):
            assert (info / f"LICENSE.common-{name}").is_file(), name


def test_the_wheel_in_a_bare_environment(wheel, tmp_path):
    """pip and nothing else: NumPy comes with it from PyPI, PyTorch does not."""
    run(PYTHON, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    got = subprocess.run([python, "-m", "pip", "install", "-q", "--only-binary=:all:", wheel], cwd=tmp_path,
                         capture_output=True, text=True)  # with the user's own settings of pip
    if got.returncode != 0 and os.environ.get("CI") != "true":
        pytest.skip("no PyPI")
    assert got.returncode == 0, got.stderr
    program = ("import kld; print(kld.kl_div([[.5, .5]], [[.25, .75]]).loss)\n"
               "try: import kld.nn\n"
               "except ImportError as error: print(error)")
    loss, error = run(python, "-c", program, cwd=tmp_path).splitlines()
    assert float(loss) == pytest.approx(0.1308120) and "pip install torch" in error


def test_the_commands_of_the_readme_are_those_tested_here():
    into = ". ~/kld-venv/bin/activate\n"
    assert commands() == [f"python3 -m venv --system-site-packages ~/kld-venv\n{into}pip install ./client/python\n",
                          f"make wheel\n{into}pip install build/kld-*.whl\n"]
    install = "`, `".join(commands()[0].splitlines())
    assert f"`{install}`" in " ".join((ROOT / "README.md").read_text().split())


def test_the_command_of_the_readme(venv, tmp_path):
    """In a tree of its own, in which `make` has built the library and pip has been before."""
    tree = tmp_path / "tree"
    for name in ("proto", "build"):
        (tree / name).mkdir(parents=True)
    shutil.copytree(ROOT / "client/python", tree / "client/python",
                    ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    shutil.copy(ROOT / "proto/VERSION", tree / "proto")
    shutil.copy(BIN / "libkld.so", tree / "build")
    leave_build(tree / "client/python")
    # Debian's setuptools builds it: nothing is downloaded.
    _, *install = commands()[0].splitlines()  # the first made the environment
    run("sh", "-ec", "\n".join(install), cwd=tree, PIP_NO_BUILD_ISOLATION="0", **as_user(venv))
    program = "import kld; print(kld.__file__, kld.connect('local:cpu').info().backend, kld.__version__)"
    where, backend, version = run(venv / "bin/python", "-c", program, cwd=tmp_path).split()
    assert where.startswith(f"{venv}/") and backend == "cpu"
    assert not pathlib.Path(where).with_name("_stale.py").exists()
    assert version == (ROOT / "proto/VERSION").read_text().strip()


# What the package is made of, each part of it once; what servers and signals do to it is the same code as in the tree.
INSTALLED = ("numpy", "torch", "parity", "half", "share")


def test_the_wheel_installed(wheel, venv, tmp_path):
    (tmp_path / "build").symlink_to(BIN)
    _, *install = commands()[1].splitlines()  # the first made the wheel
    run("sh", "-ec", "\n".join(install).replace("install", "install --force-reinstall --no-deps"), cwd=tmp_path,
        **as_user(venv))
    program = ("import kld; print(kld.kl_div([[.5, .5]], [[.25, .75]]).loss); "
               "print(''.join(line for line in open('/proc/self/maps') if '/' in line))")
    loss, maps = run(venv / "bin/python", "-c", program, cwd=tmp_path).split("\n", 1)
    assert float(loss) == pytest.approx(0.1308120)
    ours = {line.split()[-1] for line in maps.splitlines() if re.search(r"lib(kld|curl)[-.\w]*\.so", line)}
    assert len(ours) == 2 and all(path.startswith(f"{venv}/") for path in ours), ours
    shutil.copytree(ROOT / "tests/e2e", tmp_path / "tests/e2e")  # no package of the tree in reach
    said = run(venv / "bin/python", "-B", "-m", "pytest", "-v", "-p", "no:cacheprovider",
               # Without those that are not about what is installed; of the long ones, one of each dtype.
               "-k", "test_parity[batchmean-logprobs and 300 or test_gradcheck[row-logits-logits] or not test_parity["
               " and not gradcheck and not data_parallel and not teacher and not every_program",
               *(tmp_path / f"tests/e2e/test_python_{name}.py" for name in INSTALLED), cwd=tmp_path,
               KLD_BIN=str(BIN), KLD_PYTHON_INSTALLED="1", KLD_BACKEND=os.environ.get("KLD_BACKEND", "cpu"))
    assert int(re.search(r"(\d+) passed", said)[1]) > 160, said
    of_dtypes = re.findall(r"test_python_torch.py::test_parity\[batchmean-logprobs-(\w+)-\(64, 300\)\] PASSED", said)
    assert sorted(of_dtypes) == ["bfloat16", "float16", "float32", "float64"], said
    assert "test_python_torch.py::test_gradcheck[row-logits-logits] PASSED" in said, said
