"""Tests of what is in deploy/: servers and fixtures are those of the end-to-end tests; tools of others (buildah,
promtool, haproxy, ...) are Debian's, `deploy/deps.sh deploy` installs them."""
import importlib
import importlib.util
import os
import pathlib
import shutil

import pytest

from imagelib import base, buildah, image  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[2]
_path = ROOT / "tests" / "e2e" / "conftest.py"
_spec = importlib.util.spec_from_file_location("e2e_conftest", _path)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
globals().update({name: value for name, value in vars(_module).items() if not name.startswith("__")})


def needs(*tools, root=False):
    """Skips what needs a tool that is not here; in CI, which installs them, that is a failure."""
    missing = [tool for tool in tools if not shutil.which(tool)]
    if root and os.geteuid() != 0:
        missing.append("root")
    if missing and os.environ.get("CI") == "true":
        return pytest.mark.usefixtures("nothing_is_missing")
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)} (deploy/deps.sh deploy)")


def library(name):
    """A module of tests/requirements.txt or Debian; without it the test is skipped, in CI it fails."""
    try:
        return importlib.import_module(name)
    except ImportError:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"needs Python's {name}", allow_module_level=True)


@pytest.fixture
def nothing_is_missing():
    pytest.fail("a tool is missing that deploy/deps.sh deploy installs")
