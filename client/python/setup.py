"""Builds the package kld: the version of the tree it lies in, and libkld beside it.

Bundled into kld/lib: every library in the folder KLD_BUNDLE (`make wheel` sets it: libkld with what it
needs), else ../../build/libkld.so where `make` has built one, in the unpacked tarball ../lib/libkld.so;
else nothing, and the package looks for libkld where it is imported (kld/_library.py). No code is compiled here.
"""
import os
import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = pathlib.Path(__file__).resolve().parent
TREE = HERE.parents[1]
if HERE == TREE / "client" / "python":
    VERSION, BUILT = TREE / "proto" / "VERSION", TREE / "build" / "libkld.so"
else:  # the tarball, which has the version in the package
    VERSION, BUILT = HERE / "kld" / "VERSION", HERE.parent / "lib" / "libkld.so"


def libraries():
    bundle = os.environ.get("KLD_BUNDLE")
    if bundle is not None:
        found = sorted(path for path in pathlib.Path(bundle).iterdir() if ".so" in path.name)
        if not any(path.name.startswith("libkld.so") for path in found):
            raise SystemExit("setup.py: no libkld.so in the folder that KLD_BUNDLE names")
        return found
    return [BUILT] if BUILT.exists() else []


class BuildWithLibraries(build_py):
    def run(self):
        # What an earlier build, of another version, has left there would be packed as well.
        shutil.rmtree(pathlib.Path(self.build_lib, "kld"), ignore_errors=True)
        super().run()
        shutil.copyfile(VERSION, pathlib.Path(self.build_lib, "kld", "VERSION"))
        to = pathlib.Path(self.build_lib, "kld", "lib")
        for library in libraries():
            to.mkdir(exist_ok=True)
            shutil.copyfile(library, to / library.name)
            (to / library.name).chmod(0o755)


class Binary(Distribution):
    """A wheel with a library in it is of one platform."""

    def has_ext_modules(self):
        return bool(libraries())


try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    from wheel.bdist_wheel import bdist_wheel


class AnyPython(bdist_wheel):
    """libkld is loaded with ctypes: one wheel for every Python 3."""

    def get_tag(self):
        platform = os.environ.get("KLD_PLATFORM") or super().get_tag()[2]
        return "py3", "none", platform


setup(version=VERSION.read_text().strip(), distclass=Binary,
      cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": AnyPython})
