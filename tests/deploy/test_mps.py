"""What deploy/mps starts is what the programs take: the command lines in the compose file and the manifest are
run here, on the CPU and without MPS."""
import json
import re
import subprocess

import pytest

from conftest import BIN, ROOT, clean_environment

FILES = sorted((ROOT / "deploy" / "mps").glob("*.yaml"))


def texts_of(path):
    """Lines without comments."""
    return [line.split(" #")[0] for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]


def lists_of(path, key):
    """The flow lists behind a key: command: ["a", "b"] -> ["a", "b"]."""
    found = re.findall(rf"{key}: (\[\".*?\"\])", "\n".join(texts_of(path)))
    return [json.loads(text) for text in found]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_server_takes_its_options(path, make_server):
    servers = [words for key in ("command", "args") for words in lists_of(path, key) if "--unix" in words]
    assert len(servers) == 1
    options = dict(zip(servers[0][::2], servers[0][1::2]))
    assert options.pop("--unix") == "/run/kld/kld.sock" and options.pop("--backend") == "cuda"
    options["--http"] = re.sub(r":\d+$", ":0", options["--http"])
    server = make_server(**{name.lstrip("-").replace("-", "_"): value for name, value in options.items()})
    probes = [words for words in lists_of(path, "command") if words[0].endswith("/kld")]
    for words in probes:  # the container has it at /opt/kld/bin
        words = [str(BIN / "kld") if word == "/opt/kld/bin/kld" else
                 f"unix:{server.unix}" if word == "unix:/run/kld/kld.sock" else word for word in words]
        result = subprocess.run(words, capture_output=True, text=True, timeout=60, env=clean_environment())
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_server_and_daemon_meet(path):
    """The same pipe folder on a volume that both mount, one user and one IPC namespace."""
    text = "\n".join(texts_of(path))
    assert "nvidia-cuda-mps-control" in text and "/mps/pipe" in text
    assert text.count("*mps") == 1 and text.count("&mps") == 1
    users = set(re.findall(r'(?:user: "|runAsUser: )(\d+)', text)) - {"0"}
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert users == {re.search(r"^USER (\d+):", dockerfile, re.M).group(1)}
    assert "ipc: service:mps" in text or "hostIPC: true" in text
