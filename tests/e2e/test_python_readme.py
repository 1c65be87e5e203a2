"""Every program in client/python/README.md is run, in order, in one interpreter; the command that installs
is test_python_wheel.py's."""
import re
import subprocess
import sys

import pytest

from conftest import ROOT
from pythonlib import PACKAGE, environment, import_kld, import_torch

kld = import_kld()
import_torch()
README = PACKAGE / "README.md" if PACKAGE else None


@pytest.mark.skipif(README is None, reason="needs the package's README")
@pytest.mark.parametrize("server_of", ["KLD_SERVER", "local:"])
def test_every_program(server, server_of, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)
    assert len(blocks) >= 4
    url = server.url_unix if server_of == "KLD_SERVER" else "local:"
    program = "\n".join(blocks).replace('kld.connect("local:")', f"kld.connect({url!r})")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
                            env=environment(KLD_SERVER=url), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    loss, shape = result.stdout.split(" ", 1)
    assert 0 < float(loss) < 1 and shape.strip() == "(64, 1000)"


def test_commands_are_those_that_are_tested():
    if not (ROOT / "Makefile").exists():
        pytest.skip("needs the sources")
    commands = re.findall(r"^```sh\n(.*?)^```$", README.read_text(), re.M | re.S)
    assert commands == ["pip install ./client/python\n"]
