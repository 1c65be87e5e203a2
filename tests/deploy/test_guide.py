"""deploy/README.md, the operator's guide: its files and options are there, its numbers of limits are today's; the
version is in one place."""
import json
import re
import shlex
import subprocess

import pytest

from conftest import BIN, ROOT

GUIDE = (ROOT / "deploy/README.md").read_text()
VERSION = (ROOT / "proto/VERSION").read_text().strip()
HELP = subprocess.run([BIN / "kld-server", "--help"], capture_output=True, text=True).stdout


def test_files_are_there():
    named = set(re.findall(r"`((?:deploy/|tests/|server/|systemd/|kubernetes/|mps/|prometheus/)[\w./-]*)`", GUIDE))
    assert len(named) > 8
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "deploy" / name).exists(), name
    listed = {name.rstrip("/") for row in re.findall(r"^\| (`.*?`) \|", GUIDE, re.M) for name in re.findall(r"`([\w./-]+)`", row)}
    there = {path.name for path in (ROOT / "deploy").iterdir()} - {"README.md"}
    assert there <= listed, there - listed


def test_options_are_the_servers():
    known = set(re.findall(r"--[a-z][a-z-]+", HELP))
    of_others = {"--build", "--count", "--from-file", "--from-literal", "--gpus", "--read-only", "--rm",
                 "--stop-timeout"}  # docker's, kld's, kubectl's
    for name in set(re.findall(r"--[a-z][a-z-]+", GUIDE)) - of_others:
        assert name in known, name


def test_reasons_of_refusals_are_the_servers():
    listed = re.search(r"^- The reasons of `kld_rejected_total`.*?(?=^- )", GUIDE, re.M | re.S).group(0)
    of_http, of_unix = (set(re.findall(r"`(\w+)`", text)) for text in listed.split("Over the Unix socket"))
    known = re.findall(r"^ +X\((http|unix), (\w+)\)", (ROOT / "server/stats.h").read_text(), re.M)
    assert known and {(front, reason) for front, reasons in (("http", of_http), ("unix", of_unix))
                      for reason in reasons - {"kld_rejected_total"}} == set(known)


def test_defaults_that_it_states():
    assert re.search(r"--staging-bytes-max .*\[1G\]", HELP) and "`--staging-bytes-max` (1 GiB)" in GUIDE
    assert "half of its memory" in HELP and "(half of the device's memory)" in GUIDE


def test_version_in_one_place():
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
    top = re.search(r"^## (\S+?),? ", (ROOT / "deploy/CHANGELOG.md").read_text(), re.M).group(1)
    assert top == VERSION
    for program in ("kld-server", "kld"):
        shown = subprocess.run([BIN / program, "--version"], capture_output=True, text=True).stdout
        assert VERSION in shown.split(), shown


def test_commands_parse():
    """Of the fenced commands: what the shell would make of them, and HAProxy's words as its configuration has them."""
    blocks = re.findall(r"^ *```\n(.*?)^ *```", GUIDE, re.M | re.S)
    assert blocks
    for block in blocks:
        assert subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True).returncode == 0
    config = (ROOT / "deploy/haproxy.cfg").read_text()
    assert "backend replicas" in config and "stats socket /run/haproxy/kld.sock" in config


def test_the_image_is_of_the_version(tmp_path):
    """What the labels and tags are made of."""
    shown = subprocess.run(["make", "-n", "image", "BUILDER=x"], cwd=ROOT, capture_output=True, text=True).stdout
    assert f"VERSION={VERSION}" in shown and f"-t kld:{VERSION}" in shown


def started_by_docker(path):
    """The words behind `docker run` of each command in a document, or in a file's comments."""
    text = re.sub(r"^# ?", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    return [shlex.split(words) for words in re.findall(r"^ *(?:docker|podman) run (.*)", text, re.M)]


def test_containers_are_started_as_the_server_needs():
    """Of this version; told to stop, with time for what is in flight; reached from the host alone; on a card with the
    image that has the CUDA back end, which is made so in the same document."""
    default = int(re.search(r"--drain-ms .*\[(\d+)\]", HELP).group(1))
    documents = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("deploy/*.yaml"), ROOT / "Dockerfile"]
    found = {path: started_by_docker(path) for path in documents}
    assert len(found[ROOT / "Dockerfile"]) == 3 and len(found[ROOT / "deploy/README.md"]) == 2
    for path, commands in found.items():
        for words in commands:
            image = next(word for word in words if word.startswith("kld:"))
            docker, server = words[:words.index(image)], words[words.index(image) + 1:]
            options = dict(zip(server, server[1:]))
            assert float(docker[docker.index("--stop-timeout") + 1]) * 1000 > int(options.get("--drain-ms", default)), words
            if "-p" in docker:
                published = docker[docker.index("-p") + 1].split(":")
                assert published[0] == "127.0.0.1" and options["--http"] == f"0.0.0.0:{published[2]}", words
            else:
                assert "--http" not in options and ["--network", "host"] == docker[docker.index("--network"):][:2], words
            card = "--gpus" in docker
            assert image == f"kld:{VERSION}{'-cuda' * card}", words
            assert options.get("--backend") == ("cuda" if card else None), words
            made = rf" IMAGE={re.escape(image)} BUILD_BASE=" if card else "( {2,}|$)"
            assert re.search(rf"^(#   )?make image{made}", path.read_text(), re.M), path
    compose = (ROOT / "deploy/compose.yaml").read_text()
    assert int(re.search(r"stop_grace_period: (\d+)s", compose).group(1)) * 1000 > default and "drain" not in compose


@pytest.mark.parametrize("builder, told", [("docker", False), ("buildah", True), ("podman", True), ("/usr/bin/podman", True),
                                           ("sudo", False), ("podman --log-level=error", True)])
def test_the_image_keeps_its_healthcheck(builder, told):
    """buildah and podman drop it from OCI images, which are what they build by themselves; docker has no such option."""
    shown = subprocess.run(["make", "-n", "image", f"BUILDER={builder}"], cwd=ROOT, capture_output=True, text=True).stdout
    command = next(line for line in shown.splitlines() if not line.startswith("make"))  # which says where it goes
    assert command.startswith(f"{builder} build ") and ("--format docker" in shown) == told


@pytest.mark.skipif(not (ROOT / "client/python/pyproject.toml").exists(), reason="no package here")
def test_the_package_is_of_the_version():
    assert json.dumps(VERSION) not in (ROOT / "client/python/pyproject.toml").read_text()
