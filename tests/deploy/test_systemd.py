"""deploy/systemd: what systemd's own tools say of the units, and the server under the unit's limits, as far as
they can be set without systemd as PID 1: its filter of system calls and its resource limits. What the server says to
systemd is tested in tests/e2e/test_service_manager.py."""
import json
import pathlib
import re
import shutil
import subprocess
import textwrap

import pytest

from conftest import BIN, ROOT, Server, children_of, library, needs, wait_until

UNITS = ROOT / "deploy" / "systemd"
pytestmark = needs("systemd-analyze")
EXPOSURE_MAX = 1.3  # of 10, as measured with systemd 252
EXPOSURE_GPU_MAX = 1.9


def settings(path):
    """[(section, key, value), ...] in the order of the file."""
    section, found = None, []
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and line[0] not in "#;":
            found.append((section, *line.split("=", 1)))
    return found


def value(path, key):
    return [text for _, name, text in settings(path) if name == key][-1]


@pytest.fixture(params=["plain", "gpu"])
def installed(request, tmp_path):
    """The units as they would be installed, with this build's server."""
    text = (UNITS / "kld.service").read_text().replace("/usr/local/bin/kld-server", str(BIN / "kld-server"))
    (tmp_path / "kld.service").write_text(text)
    shutil.copy(UNITS / "kld.socket", tmp_path)
    if request.param == "gpu":
        (tmp_path / "kld.service.d").mkdir()
        shutil.copy(UNITS / "gpu.conf", tmp_path / "kld.service.d")
    return tmp_path / "kld.service", request.param


def test_the_commands_that_install_it(tmp_path):
    """Those at the head of kld.service, as a user of Debian 12 runs them: /etc/systemd/system is there, and nothing else."""
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    commands = re.findall(r"^#   (install .*)$", (UNITS / "kld.service").read_text(), re.M)
    for command in commands:
        command = command.replace(" /etc/", f" {tmp_path}/etc/").replace("systemd-sysusers", "true")
        result = subprocess.run(["sh", "-ec", command], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    installed = {str(path.relative_to(tmp_path / "etc")): path for path in tmp_path.rglob("*") if path.is_file()}
    assert {name: path.read_text() for name, path in installed.items()} == {
        "systemd/system/kld.service": (UNITS / "kld.service").read_text(),
        "systemd/system/kld.socket": (UNITS / "kld.socket").read_text(),
        "systemd/system/kld.service.d/gpu.conf": (UNITS / "gpu.conf").read_text(),
        "sysusers.d/kld.conf": (UNITS / "kld.sysusers").read_text()}
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in installed.values())


def test_verify(installed):
    unit, _ = installed
    result = subprocess.run(["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit,
                             unit.with_name("kld.socket")], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_security(installed, capsys):
    unit, kind = installed
    if kind == "gpu":  # systemd 252 looks at no drop-in where it looks offline
        drop_in = [line for line in (UNITS / "gpu.conf").read_text().split("[Service]")[1].splitlines()]
        unit.write_text(unit.read_text().replace("[Install]", "\n".join(drop_in) + "\n[Install]"))
    limit = EXPOSURE_GPU_MAX if kind == "gpu" else EXPOSURE_MAX
    result = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager",
                             f"--threshold={round(limit * 10)}", unit], capture_output=True, text=True, timeout=60)
    level = re.search(r"Overall exposure level for kld.service: ([\d.]+)", result.stdout)
    assert level, result.stdout + result.stderr
    with capsys.disabled():
        print(f"\n  systemd-analyze security, {kind}: {level.group(1)}")
    assert float(level.group(1)) <= limit and result.returncode == 0, result.stdout


def test_names_and_times_fit():
    """The socket's path is the client's default, and systemd is more patient than the server."""
    service, listen = UNITS / "kld.service", UNITS / "kld.socket"
    assert value(listen, "ListenSequentialPacket") == "/run/kld/kld.sock"
    assert value(service, "RuntimeDirectory") == "kld" and value(service, "RuntimeDirectoryPreserve") == "yes"
    assert value(service, "User") == value(listen, "SocketUser") == value(listen, "SocketGroup") == "kld"
    assert "u kld " in (UNITS / "kld.sysusers").read_text()
    help_text = subprocess.run([BIN / "kld-server", "--help"], capture_output=True, text=True, check=True).stdout
    drain_ms, stuck_ms, start_ms = (int(re.search(rf"--{name} .*\[(\d+)\]", help_text).group(1))
                                    for name in ("drain-ms", "stuck-ms", "start-ms"))
    assert int(value(service, "TimeoutStopSec").rstrip("s")) * 1000 >= drain_ms + 5000
    # The server speaks at half of it: what hangs, or starts, from just before that on is the server's own to replace.
    half_ms, half_gpu_ms = (int(value(unit, "WatchdogSec").rstrip("s")) * 500 for unit in (service, UNITS / "gpu.conf"))
    assert half_ms >= max(stuck_ms, start_ms) + 5000 and half_gpu_ms >= stuck_ms + start_ms + 5000


def test_what_neighbours_share_with_it():
    """Clients that run as the same user keep what they have in /dev/shm when the service stops; with a GPU their MPS
    daemon, which belongs to no unit, is where CUDA looks for it; and the sockets are as closed as the service, because
    systemd applies the service's list of addresses to none that was passed to it."""
    service, listen, gpu = UNITS / "kld.service", UNITS / "kld.socket", UNITS / "gpu.conf"
    assert value(service, "RemoveIPC") == "no" and "RemoveIPC" not in {name for _, name, _ in settings(gpu)}
    assert value(gpu, "PrivateTmp") == "no" and value(gpu, "ReadWritePaths") == "/tmp"  # which "strict" takes away
    for name in ("IPAddressDeny", "IPAddressAllow"):
        assert value(service, name) == value(listen, name)


def filter_of(path):
    """The system calls that SystemCallFilter= leaves, as systemd reads it: the first line says what is allowed,
    those behind it add and, with ~, remove."""
    def expand(word):
        if not word.startswith("@"):
            return {word}
        shown = subprocess.run(["systemd-analyze", "syscall-filter", "--no-pager", word], capture_output=True,
                               text=True, check=True).stdout
        words = [line.strip() for line in shown.splitlines()[1:] if line.startswith("    ")]
        return set().union(*(expand(one) for one in words if one[0] != "#"))

    allowed = expand("@default")
    for text in [text for _, name, text in settings(path) if name == "SystemCallFilter"]:
        words = set().union(*(expand(word) for word in text.lstrip("~").split()))
        allowed = allowed - words if text.startswith("~") else allowed | words
    return allowed


# Sets what the unit sets, then becomes the server.
LIMITED = textwrap.dedent("""\
    import json, os, resource, seccomp, sys
    unit = json.loads(sys.argv[1])
    os.umask(int(unit["umask"], 8))
    files = min(unit["files"], resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    bound = seccomp.SyscallFilter(seccomp.ERRNO(1))
    for name in unit["calls"]:
        try:
            number = seccomp.resolve_syscall(seccomp.Arch(), name)
        except (RuntimeError, ValueError):
            continue
        if number >= 0:
            bound.add_rule(seccomp.ALLOW, number)
    bound.load()
    os.execv(sys.argv[2], sys.argv[2:])
    """)


class Limited(Server):
    """A server under the unit's limits."""

    def start(self, wait=True):
        unit = UNITS / "kld.service"
        limits = {"umask": value(unit, "UMask"), "files": int(value(unit, "LimitNOFILE")),
                  "calls": sorted(filter_of(unit))}
        self.arguments = ["/usr/bin/python3", "-c", LIMITED, json.dumps(limits), *self.arguments]
        super().start(wait)


def test_the_server_under_the_units_limits():
    library("seccomp")
    request = {"inputs": [{"name": name, "datatype": "FP32", "shape": [1, 2], "data": [0.5, 0.5]}
                          for name in ("predictions", "targets")]}
    server = Limited(backend="cpu", threads=2)
    try:
        for role in (None, "worker", "gateway"):
            if role:
                before = server.kill_child(role)
                wait_until(lambda: children_of(server.pid).get(role) not in (None, before), 30)
            wait_until(lambda: server.request("/v2/health/ready")[0] == 200, 30, "ready")
            status, reply = server.json("/v2/models/kl_div/infer", request)
            assert status == 200 and reply["outputs"][0]["data"] == [0], reply
        result = subprocess.run([BIN / "kld", "ping", "--count", "1", "--server", server.url_unix], timeout=60,
                                capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        status = pathlib.Path(f"/proc/{server.child('worker')}/status").read_text()
        assert "Seccomp:\t2" in status  # the filter is there
        assert server.stop() == 0
        assert " error " not in server.log() and "not bounded" not in server.log(), server.log()
    finally:
        server.remove()
