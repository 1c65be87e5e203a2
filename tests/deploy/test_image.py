"""The container: built by buildah on a base that debootstrap makes, and run as an orchestrator would: as an
ordinary user, the root file system read-only, no new privileges, no shell in reach."""
import json
import os
import re
import shutil
import signal
import subprocess
import textwrap

import pytest

from conftest import ROOT, needs, wait_until
from imagelib import run

pytestmark = [needs("buildah", "debootstrap", "unshare", "nsenter", "setpriv", root=True), pytest.mark.timeout(1500)]
MIB = 1 << 20
REQUEST = {"inputs": [
    {"name": "predictions", "datatype": "FP32", "shape": [2, 3], "data": [0.2, 0.3, 0.5, 0.1, 0.1, 0.8]},
    {"name": "targets", "datatype": "FP32", "shape": [2, 3], "data": [0.1, 0.4, 0.5, 0.3, 0.3, 0.4]}]}

# What is run as root, in namespaces of its own: mounts, then the server as PID 1, with nothing left to it.
RUN = textwrap.dedent("""\
    set -eu
    root=$1
    shift
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount -t tmpfs -o size=64m shm "$root/dev"
    mkdir "$root/dev/shm"
    touch "$root/dev/null"
    mount --bind /dev/null "$root/dev/null"
    mount -t tmpfs -o size=1m,mode=755,uid=10001,gid=10001 sockets "$root/run/kld"
    for shell in bash dash; do [ ! -e "$root/usr/bin/$shell" ] || mount --bind /dev/null "$root/usr/bin/$shell"; done
    mount -o remount,bind,ro "$root"
    exec setpriv --no-new-privs chroot --userspec=10001:10001 --groups= "$root" "$@"
    """)


@pytest.fixture(scope="module")
def config(buildah, image):
    return json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]


@pytest.fixture(scope="module")
def root(buildah, image):
    return buildah("mount", buildah("from", image))


def size(buildah, image):
    found = json.loads(buildah("images", "--json", image))[0]["size"]
    number, unit = found.split()
    return float(number) * {"KB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def test_metadata(config):
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in config["Labels"].items()}
    assert labels["version"] == (ROOT / "proto/VERSION").read_text().strip()
    assert labels["licenses"] == "MIT" and labels["base.name"] == "localhost/base"
    assert labels["title"] == "kld" and labels["description"] and labels["revision"] != "unknown"
    assert config["User"] == "10001:10001" and config["StopSignal"] == "SIGTERM"
    assert config["Entrypoint"] == ["/opt/kld/bin/kld-server"] and list(config["Volumes"]) == ["/run/kld"]
    assert config["Healthcheck"]["Test"] == ["CMD", "/opt/kld/bin/kld", "ping", "--count", "1", "--timeout", "2"]
    assert config["Healthcheck"]["Timeout"] > 2 * 10**9  # it says what is wrong before it is killed


def test_size(buildah, base, image, capsys):
    added = size(buildah, image) - size(buildah, base)
    with capsys.disabled():
        print(f"\n  image: {size(buildah, image) / MIB:.0f} MiB, {added / MIB:.1f} MiB on its base")
    assert added < 32 * MIB


def test_the_build_stays_behind(root):
    """No compiler, no header, no test; what the base had is there still."""
    brought = {os.path.relpath(os.path.join(folder, name), root) for folder, _, names in os.walk(f"{root}/opt")
               for name in names}
    assert {name.split("/")[2] for name in brought} == {"bin", "lib", "share", "LICENSE"}
    assert {os.path.basename(name) for name in brought if "/bin/" in name} == {"kld-server", "kld"}
    assert not os.path.exists(f"{root}/usr/bin/gcc") and not os.path.exists(f"{root}/src")
    assert "Package: libc6\n" in open(f"{root}/var/lib/dpkg/status").read()


def test_bill_of_materials(root):
    """Each library beside the programs, with the Debian package and version that it is from."""
    bill = json.load(open(f"{root}/opt/kld/share/kld/kld.cdx.json"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    assert bill["metadata"]["component"]["version"] == (ROOT / "proto/VERSION").read_text().strip()
    listed = {}
    for part in bill["components"]:
        listed[part["properties"][0]["value"]] = part
        assert re.fullmatch(r"pkg:deb/debian/[a-z0-9.+-]+@[^?+:]+\?arch=amd64&distro=debian-\d+", part["purl"])
        assert part["version"][0].isdigit() or ":" in part["version"]
    there = {f"lib/{name}" for name in os.listdir(f"{root}/opt/kld/lib") if not name.startswith("libkld.so")}
    assert set(listed) == there and len(there) > 10


GLIBC = ["ld-linux-x86-64.so.2", "libc.so.6", "libm.so.6", "libpthread.so.0", "librt.so.1", "libdl.so.2",
         "libresolv.so.2"]


@pytest.fixture
def bare(root, tmp_path):
    """What the image adds, on a base of glibc's libraries and nothing else."""
    made = tmp_path / "root"
    for folder in ("proc", "dev", "run/kld", "usr/bin", "lib64", "lib/x86_64-linux-gnu"):
        (made / folder).mkdir(parents=True)
    shutil.copytree(f"{root}/opt/kld", made / "opt/kld", symlinks=True)
    for name in GLIBC:
        shutil.copy(f"{root}/lib/x86_64-linux-gnu/{name}", made / "lib/x86_64-linux-gnu")
    shutil.copy(f"{root}/lib/x86_64-linux-gnu/{GLIBC[0]}", made / "lib64")
    return made


class Container:
    """The image's root file system, and its entry point in it."""

    def __init__(self, root, config, *arguments):
        self.environment = dict(variable.split("=", 1) for variable in config["Env"])
        self.process = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--propagation=private",
             "sh", "-c", RUN, "run", root, *config["Entrypoint"], *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=self.environment, text=True)
        self.line = self.process.stdout.readline()
        assert self.line.startswith("ready "), self.line + self.process.stderr.read()
        self.address = re.search(r"http=(\S+)", self.line).group(1)
        children = open(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read().split()
        self.pid = int(children[0])  # PID 1 in there

    def enter(self, *command):
        return subprocess.run(["nsenter", "--target", str(self.pid), "--mount", "--pid", "--ipc", "--root", "--wd",
                               "--setuid", "10001", "--setgid", "10001", *command], env=self.environment,
                              capture_output=True, text=True, timeout=60)

    def kill(self):
        """Its PID 1: a signal to unshare would not reach it, since it has become another user."""
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.process.communicate(timeout=60)


@pytest.fixture
def container(root, config):
    one = Container(root, config, "--http=127.0.0.1:0", "--backend=cpu")
    yield one
    one.kill()


def test_it_serves(container, config):
    curl = ["curl", "-s", "-f", "-m", "60"]
    run(*curl, "--retry", "30", "--retry-delay", "1", f"http://{container.address}/v2/health/ready")  # 503 so far
    reply = json.loads(run(*curl, f"http://{container.address}/v2/models/kl_div/infer", "-d", json.dumps(REQUEST)))
    assert reply["outputs"][0]["data"] == [0.213833317]
    check = config["Healthcheck"]["Test"]
    assert check[0] == "CMD"  # no shell
    healthy = container.enter(*check[1:])
    assert healthy.returncode == 0, healthy.stderr
    # Supervisor, worker and gateway: an ordinary user, no capability, nothing to write to but the socket's folder.
    children = open(f"/proc/{container.pid}/task/{container.pid}/children").read().split()
    assert len(children) == 2
    for pid in [container.pid, *children]:
        status = open(f"/proc/{pid}/status").read()
        assert re.search(r"^Uid:\t10001\t10001\t10001\t10001$", status, re.M)
        assert re.search(r"^CapEff:\t0+$", status, re.M) and re.search(r"^NoNewPrivs:\t1$", status, re.M)
    mounts = open(f"/proc/{container.pid}/mountinfo").read().splitlines()
    assert [line.split()[5].split(",")[0] for line in mounts if line.split()[4] == "/"][-1] == "ro"
    with pytest.raises(OSError):
        open(f"/proc/{container.pid}/root/opt/kld/new", "w")
    assert container.enter("/bin/sh", "-c", "true").returncode != 0


def test_it_needs_nothing_of_its_base_but_glibc(bare, config):
    one = Container(bare, config, "--http=127.0.0.1:0", "--backend=cpu")
    try:
        test_it_serves(one, config)
    finally:
        one.kill()


def test_it_heals_and_stops(container):
    """As PID 1: a killed worker is replaced and unhealthy while it is not there; SIGTERM ends it with 0."""
    children = open(f"/proc/{container.pid}/task/{container.pid}/children").read().split()
    for pid in children:
        os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: container.enter("/opt/kld/bin/kld", "ping", "--count", "1").returncode == 0, 30, "an answer")
    os.kill(container.pid, signal.SIGTERM)
    _, log = container.process.communicate(timeout=60)
    assert container.process.returncode == 0, log
    assert log.count("child died") >= 2, log
