"""Every program in client/python/README.md is run, in order, in one interpreter, and that of the top
README.md. The commands that install are test_python_wheel.py's."""
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


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="needs the sources")
def test_the_program_of_the_top_readme(server):
    program, = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert "unix:/tmp/kld.sock" in program
    result = subprocess.run([sys.executable, "-c", program.replace("unix:/tmp/kld.sock", server.url_unix)],
                            capture_output=True, text=True, timeout=120, env=environment())
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.split()[0]) == pytest.approx(0.2138333, rel=1e-6)
