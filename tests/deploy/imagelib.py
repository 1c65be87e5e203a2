"""The container's image, built once for all tests that want it: by buildah, on a base that debootstrap makes from where
this machine's apt takes Debian."""
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command, **more):
    """Not as a part of the make that runs the tests: what that hands on has a make of ours say more."""
    environment = {name: value for name, value in more.pop("env", os.environ).items() if not name.startswith("MAKE")}
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=1200,
                            env=environment, **more)
    assert result.returncode == 0, f"{command}: {result.stdout[-4000:]}{result.stderr[-4000:]}"
    return result.stdout.strip()


def mirror():
    """Where this machine's apt takes Debian from, and which Debian."""
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)', open("/etc/os-release").read(), re.M))["VERSION_CODENAME"]
    lines = run("apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT) $(CREATED_BY)")
    found = [line.split()[0] for line in lines.splitlines() if line.split()[1:] == [release, "main", "Packages"]]
    assert found, f"no mirror of {release} main in apt's sources"
    return release, found[0]


@pytest.fixture(scope="session")
def buildah(tmp_path_factory):
    """buildah(...) with a store of its own, removed in the end."""
    folder = tmp_path_factory.mktemp("store")
    store = ["buildah", "--root", folder / "root", "--runroot", folder / "run"]
    yield lambda *arguments, **more: run(*store, *arguments, **more)
    run(*store, "umount", "--all")
    run(*store, "rm", "--all")
    run(*store, "rmi", "--all", "--force")


@pytest.fixture(scope="session")
def base(buildah):
    container = buildah("from", "scratch")
    folder = buildah("mount", container)
    release, uri = mirror()
    for left in (2, 1, 0):  # a mirror may not answer, once
        try:
            run("debootstrap", "--variant=minbase", release, folder, uri)
            break
        except AssertionError:
            assert left
            run("find", folder, "-mindepth", "1", "-delete")
    run("sh", "-c", f"rm -rf {folder}/var/cache/apt/*.bin {folder}/var/cache/apt/archives/*.deb {folder}/var/lib/apt/lists/*")
    buildah("commit", "-q", "--rm", container, "base")
    return "localhost/base"


@pytest.fixture(scope="session")
def image(buildah, base):
    """Built as `make image` builds it; CUDA or not is up to the build base, which has no nvcc."""
    shown = run("make", "-n", "image", "BUILDER=buildah", f"BASE={base}", f"BUILD_BASE={base}", "IMAGE=kld:test",
                "IMAGE_ARGS=--isolation chroot", cwd=ROOT).replace("\\\n", " ")
    command = shown.split()
    assert command[:2] == ["buildah", "build"]
    buildah(*command[1:], cwd=ROOT)
    return "localhost/kld:test"
