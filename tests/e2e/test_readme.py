"""Every command in README.md is run, in order, as it stands there, in one shell.

What is changed: 127.0.0.1:8080 and 8081 become free ports, build/ the programs under test, and /tmp/ a folder
of the test's own, so that two runs do not meet. `make demo` runs the script behind it on what is
built, `make check` is this very run, and `make dist` has a test of its own.
"""
import json
import os
import re
import shutil
import signal
import socket
import subprocess

import numpy as np
import pytest

from conftest import BIN, ROOT, clean_environment, sanitizer

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
COMMANDS = [text for language, text in BLOCKS if language == "sh"]
from_sources = pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="needs the sources")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def as_tested(text, folder, ports):
    for number, port in enumerate(ports):
        text = text.replace(f"127.0.0.1:{8080 + number}", f"127.0.0.1:{port}")
    text = text.replace("/tmp/", f"{folder}/")
    text = re.sub(r"(?<![\w/])build/", f"{BIN}/", text)
    text = re.sub(r"^make demo$", f"deploy/demo.sh {BIN}", text, flags=re.M)
    text = re.sub(r"^make (check|dist)$", r"grep -q ^\1: Makefile", text, flags=re.M)
    return re.sub(r"^make install", f"make install AS_BUILT=1 BUILD={BIN} CUDA={int(has_cuda())}", text, flags=re.M)


def has_cuda():
    """Was this build made with the CUDA back end? (An install must not rebuild it another way.)"""
    return b"kld_backend_cuda" in (BIN / "libkld.a").read_bytes()


def test_options_are_current():
    shown = re.search(r"<!-- kld-server --help -->\n```\n(.*?)```", README, re.S).group(1)
    result = subprocess.run([str(BIN / "kld-server"), "--help"], capture_output=True, text=True,
                            env=clean_environment())
    assert shown == result.stdout


def looks_like(output, shown):
    """The demonstration's lines are in the output, in order, but for numbers and what computes."""
    def shape(line):
        return re.sub(r"\(.*\)|[\d.]+(e-?\d+)?|(?<==)\S+|\s+", "", line.strip())
    lines = iter([shape(line) for line in output.splitlines()])
    for line in shown.splitlines():
        if " on cpu" in output or "Headline" not in line:
            assert shape(line) in lines, (line, output)


@from_sources
def test_there_are_commands():
    assert len(COMMANDS) >= 6 and "make demo\n" in COMMANDS and "make check\n" in COMMANDS


@from_sources
def test_the_commands_of_the_protocol(server, tmp_path):
    """Those of proto/README.md: the same request in JSON and with binary tensors."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "proto/README.md").read_text(), re.M | re.S)
    script = "\necho\n".join(blocks).replace("127.0.0.1:8080", server.address)
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=clean_environment(),
                          capture_output=True, text=True, timeout=60)
    replies = [json.loads(line)["outputs"] for line in done.stdout.splitlines()]
    assert len(replies) == len(blocks) == 2 and replies[0] == replies[1], done
    assert replies[0][0]["data"] == pytest.approx([0.25 * np.log(0.5) + 0.75 * np.log(1.5)], rel=1e-6)


@from_sources
@pytest.mark.timeout(600)
def test_every_command(tmp_path):
    if not (BIN / "libkld.a").exists():
        pytest.skip("not a build folder")
    sanitized = sanitizer() is not None
    ports = free_port(), free_port()
    program = next(text for language, text in BLOCKS if language == "c")
    (tmp_path / "loss.c").write_text(program.replace("/tmp/", f"{tmp_path}/"))
    parts = []
    for number, text in enumerate(COMMANDS):
        if sanitized and ("make install" in text or "make demo" in text):
            continue  # their programs are another build's
        text = as_tested(text, tmp_path, ports).replace("gcc loss.c", f"gcc {tmp_path}/loss.c")
        parts.append(f'echo "== block {number}"\n{text}')
    script = "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null; wait' EXIT\n" + "\n".join(parts)
    environment = {name: value for name, value in clean_environment().items()
                   if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    process = subprocess.Popen(["bash", "-c", script], cwd=ROOT, env=environment,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output

    expected = json.loads(next(text for language, text in BLOCKS if language == "json"))
    replies = [json.loads(line) for line in re.findall(r'^\{"model_name".*?\}\]\}', output, re.M)]
    # The last digit depends on the width of the processor's vectors.
    assert len(replies) == 1, output
    for said, meant in zip(replies[0]["outputs"], expected["outputs"], strict=True):
        assert said.pop("data") == pytest.approx(meant.pop("data"), rel=1e-6), output
    assert replies == [expected], output
    assert "kld_requests_total" in output
    assert re.search(r'^\{"name":"kld",', output, re.M), output  # by the token
    if not sanitized:
        looks_like(output, shown=next(text for language, text in BLOCKS if "nothing left behind" in text))
        loss = re.search(r"^loss (\S+)$", output, re.M)
        assert loss and float(loss[1]) == pytest.approx(0.2138333, rel=1e-6), output
    assert (tmp_path / "gradient.npy").exists()
    shutil.rmtree(tmp_path / "kld", ignore_errors=True)
