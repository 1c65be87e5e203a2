"""deploy/systemd for real: the image's programs in a Debian that systemd boots (systemd-nspawn, with a network of its
own). The unit starts with all its bounds, its sockets outlive it, a hanging gateway is noticed and replaced."""
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest

from conftest import ROOT, needs, wait_until
from imagelib import run

pytestmark = [needs("buildah", "debootstrap", "systemd-nspawn", "nsenter", root=True), pytest.mark.timeout(1500)]
UNITS = ROOT / "deploy" / "systemd"
# On a host with cgroups of version 1 nobody tells systemd, in a container, that the last process has gone.
STOP = "[Service]\nTimeoutStopSec=3s\n"
WATCHDOG = "[Service]\nWatchdogSec=2s\n"


class Booted:
    """systemd and what it started, in a root file system."""

    def __init__(self, root):
        # The cgroups of the host, of whichever version it mounts.
        legacy = not pathlib.Path("/sys/fs/cgroup/cgroup.controllers").exists()
        self.process = subprocess.Popen(
            ["systemd-nspawn", "-q", "-D", root, "--register=no", "--keep-unit", "--private-network",
             "--system-call-filter=landlock_create_ruleset landlock_add_rule landlock_restrict_self", "--boot"],
            env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": str(int(not legacy))}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            self.init = int(wait_until(self.find_init, 30, "systemd in there"))
            wait_until(lambda: self.ask("systemctl", "is-system-running", check=False) in ("running", "degraded"), 60,
                       "the end of the boot")
        except BaseException:
            self.stop()
            raise

    def find_init(self):
        """The pid of systemd in there; before it comes a helper of nspawn's."""
        assert self.process.poll() is None, self.process.stdout.read()
        for pid in open(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read().split():
            try:
                if open(f"/proc/{pid}/comm").read() == "systemd\n":
                    return pid
            except OSError:
                continue
        return None

    def ask(self, *command, check=True):
        result = subprocess.run(["nsenter", "--target", str(self.init), "--mount", "--uts", "--ipc", "--net", "--pid",
                                 "--root", "--wd", *command], capture_output=True, text=True, timeout=60,
                                env={"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
        assert not check or result.returncode == 0, \
            f"{command}: {result.stdout}{result.stderr}{self.journal() if check else ''}"
        return result.stdout.strip()

    def journal(self):
        return self.ask("journalctl", "-b", "--no-pager", "-u", "kld.service", "-u", "kld.socket", "-o", "cat", check=False)

    def show(self, name, unit="kld.service"):
        return self.ask("systemctl", "show", "--value", "-p", name, unit)

    def processes(self):
        """{command line: pid on the host} of the service."""
        found = {}
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if "/kld.service" in (entry / "cgroup").read_text() and \
                        os.readlink(entry / "ns/pid") == os.readlink(f"/proc/{self.init}/ns/pid"):
                    found[(entry / "cmdline").read_text().replace("\0", " ")] = int(entry.name)
            except OSError:
                continue
        return found

    def stop(self):
        self.process.terminate()  # an orderly shutdown
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


def prepare(root):
    """Installs systemd and the units as kld.service says, the programs being those of the image."""
    root = pathlib.Path(root)
    (root / "etc/resolv.conf").write_text(open("/etc/resolv.conf").read())
    run("chroot", root, "sh", "-c", "apt-get update -qq && apt-get install -y -qq --no-install-recommends systemd "
        "systemd-sysv >/dev/null 2>&1", env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
    for name in ("kld-server", "kld"):
        link = root / "usr/local/bin" / name
        if not link.exists():
            link.symlink_to(f"/opt/kld/bin/{name}")
    commands = re.findall(r"^#   (install .*)$", (UNITS / "kld.service").read_text(), re.M)
    assert len(commands) == 3
    for command in commands[:2]:  # without that for a GPU
        run("sh", "-ec", command.replace(" /etc/", f" {root}/etc/").replace("systemd-sysusers", f"chroot {root} systemd-sysusers"),
            cwd=ROOT)
    (root / "etc/systemd/system/kld.service.d").mkdir(exist_ok=True)
    (root / "etc/systemd/system/kld.service.d/stop.conf").write_text(STOP)
    run("chroot", root, "systemctl", "enable", "kld.socket", "kld.service")


@pytest.fixture(scope="module")
def booted(buildah, image):
    root = buildah("mount", buildah("from", image))
    prepare(root)
    one = Booted(root)
    yield one
    one.stop()


def ping(booted, server):
    return booted.ask("kld", "ping", "--count", "1", "--server", server)


SERVERS = ["unix:/run/kld/kld.sock", "http://127.0.0.1:8080"]


def test_it_runs_with_all_its_bounds(booted):
    assert booted.show("ActiveState") == "active" and booted.show("Type") == "notify"
    assert booted.show("StatusText").startswith("serves on 127.0.0.1:8080 /run/kld/kld.sock")
    for server in SERVERS:
        ping(booted, server)
    processes = booted.processes()
    assert len(processes) == 3, processes
    for pid in processes.values():
        status = open(f"/proc/{pid}/status").read()
        assert re.search(r"^CapBnd:\t0+$", status, re.M) and re.search(r"^NoNewPrivs:\t1$", status, re.M)
        assert re.search(r"^Seccomp:\t2$", status, re.M) and not re.search(r"^Uid:\t0\t", status, re.M)
    journal = booted.journal()
    assert '"mappings_max":49148' in journal, journal  # though vm.max_map_count is not to be read there
    assert '"level":"error"' not in journal and '"level":"warn"' not in journal, journal


def test_the_sockets_outlive_it(booted):
    """Stopped, the next client has it started; and a restart refuses nobody."""
    booted.ask("systemctl", "stop", "kld.service")
    assert booted.show("ActiveState") == "inactive" and booted.show("Result") == "success"
    for server in SERVERS:
        ping(booted, server)
        booted.ask("systemctl", "stop", "kld.service")
    ping(booted, SERVERS[0])
    wait_until(lambda: booted.show("ActiveState") == "active", what="systemd's view of that")
    restart = subprocess.Popen(["nsenter", "--target", str(booted.init), "--mount", "--pid", "--root", "--wd",
                                "systemctl", "restart", "kld.service"])
    asked = 0
    while restart.poll() is None or asked < 20:
        ping(booted, SERVERS[asked % 2])
        asked += 1
    assert restart.returncode == 0


def test_what_its_user_has_in_shared_memory_outlives_it(booted):
    """A client of the same uid, as under MPS, keeps its tensors over a restart; and the socket is closed to others."""
    booted.ask("sh", "-c", "echo tensor > /dev/shm/trainer && chown kld:kld /dev/shm/trainer")
    booted.ask("systemctl", "restart", "kld.service")
    assert booted.ask("cat", "/dev/shm/trainer") == "tensor"
    for unit in ("kld.service", "kld.socket"):
        assert set(booted.show("IPAddressDeny", unit).split()) == {"::/0", "0.0.0.0/0"}


def test_a_reload_ends_nothing(booted):
    before = booted.show("MainPID"), booted.processes()
    booted.ask("systemctl", "reload", "kld.service")
    wait_until(lambda: '"event":"reloaded","log_level":"info"' in booted.journal(), what="the reload")
    wait_until(lambda: booted.show("ActiveState") == "active", what="the end of it")
    assert (booted.show("MainPID"), booted.processes()) == before
    ping(booted, SERVERS[1])


def set_drop_in(booted, text, check=True):
    folder = "/run/systemd/system/kld.service.d"
    text = text.replace("\n", "\\n")
    booted.ask("sh", "-c", f"mkdir -p {folder} && printf '{text}' >{folder}/test.conf")
    booted.ask("systemctl", "daemon-reload")
    booted.ask("systemctl", "restart", "kld.service", check=check)


@pytest.fixture
def wrong_settings(booted):
    set_drop_in(booted, "[Service]\nEnvironment=KLD_TLS_CERT=/none\n", check=False)
    yield
    set_drop_in(booted, "")
    ping(booted, SERVERS[0])


def test_wrong_settings_are_tried_with_pauses(booted, wrong_settings):
    """Also where a client waits at the socket, for whom systemd would start it again at once."""
    pause_s = int(re.search(r"^RestartSec=(\d+)s$", (UNITS / "kld.service").read_text(), re.M).group(1))
    waiting = subprocess.Popen(["nsenter", "--target", str(booted.init), "--mount", "--net", "--pid", "--root", "--wd",
                                "/usr/local/bin/kld", "ping", "--count", "1", "--server", SERVERS[0]])
    try:
        before = booted.journal().count("cannot start")
        time.sleep(4 * pause_s)
        starts = booted.journal().count("cannot start") - before
        assert 1 <= starts <= 5, booted.journal()
        wait_until(lambda: booted.show("ExecMainStatus") == "2", 30, "the next start to end")  # 0 while one runs
        assert booted.show("ActiveState") == "activating"
    finally:
        waiting.kill()
        waiting.wait()


@pytest.fixture
def quick_watchdog(booted):
    """Of two seconds; a busy machine may take as many for other things."""
    set_drop_in(booted, WATCHDOG)
    yield
    set_drop_in(booted, "")


def test_a_hanging_gateway_is_replaced(booted, quick_watchdog):
    before = int(booted.show("NRestarts"))
    hanging = next(pid for line, pid in booted.processes().items() if "--role=gateway" in line)
    os.kill(hanging, signal.SIGSTOP)
    wait_until(lambda: int(booted.show("NRestarts")) > before, 30, "the watchdog")
    assert "Failed with result 'watchdog'" in booted.journal()
    wait_until(lambda: booted.show("ActiveState") == "active", 30, "the next one")
    for server in SERVERS:
        ping(booted, server)
    assert not os.path.exists(f"/proc/{hanging}")
