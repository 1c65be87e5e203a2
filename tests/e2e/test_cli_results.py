"""Where the kld tool's results go: they are whole or not there, nothing is beside them, and one that cannot be written is
known before a server is asked."""
import ctypes
import os
import signal
import stat
import struct
import subprocess
import time

import numpy as np
import pytest

from conftest import BIN, clean_environment
from httplib import probabilities
from test_cli import kld

NOBODY = ("--server", "unix:/nonexistent/kld.sock")  # asked, it would be exit status 3


def without_nameless_files():
    """As on NFS: open() with O_TMPFILE is not supported, in this process from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    tmpfile, openat, refuse, allow = os.O_TMPFILE & ~os.O_DIRECTORY, 257, 0x00050000 | 95, 0x7fff0000
    steps = [(0x20, 0, 0, 0), (0x15, 0, 3, openat), (0x20, 0, 0, 32), (0x45, 0, 1, tmpfile), (0x06, 0, 0, refuse),
             (0x06, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = struct.pack("<H6xQ", len(steps), ctypes.addressof(code))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())


WAYS = [pytest.param(None, id="nameless"),
        pytest.param(without_nameless_files, id="named", marks=pytest.mark.skipif(os.uname().machine != "x86_64",
                                                                                  reason="numbers of system calls"))]


@pytest.fixture
def pair(tmp_path):
    for number, name in enumerate(("q.npy", "p.npy")):
        np.save(tmp_path / name, probabilities((400, 100), number))
    return tmp_path / "q.npy", tmp_path / "p.npy"


def div(*arguments, code=0, cwd=None, preexec_fn=None):
    done = subprocess.run([BIN / "kld", "div", *map(str, arguments)], capture_output=True, text=True, timeout=60, cwd=cwd,
                          env=clean_environment(), preexec_fn=preexec_fn)
    assert done.returncode == code, done
    return done


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("way", WAYS)
def test_two_names_of_one_place(tmp_path, pair, way):
    (tmp_path / "folder").symlink_to(tmp_path)
    (tmp_path / "link.npy").symlink_to("r.npy")
    before = names(tmp_path)
    for other in ("./r.npy", tmp_path / "r.npy", "folder/r.npy", "folder/folder/r.npy", "link.npy", "folder/link.npy"):
        done = div(*pair, "--row-loss", "r.npy", "--grad-targets", other, *NOBODY, cwd=tmp_path, code=2, preexec_fn=way)
        assert "is to hold two results: row_loss and grad_targets" in done.stderr
        assert names(tmp_path) == before
    (tmp_path / "other").mkdir()
    div(*pair, "--row-loss", "r.npy", "--grad-targets", "other/r.npy", cwd=tmp_path, preexec_fn=way)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_replaced_keeps_its_permissions_and_links_lead_on(tmp_path, pair, way):
    for mode in (0o600, 0o640, 0o666):
        path = tmp_path / f"{mode:o}.npy"
        path.write_bytes(b"old")
        path.chmod(mode)
        div(*pair, "--row-loss", path, preexec_fn=way)
        assert stat.S_IMODE(path.stat().st_mode) == mode and np.load(path).shape == (400,)
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "old.npy").write_bytes(b"old")
    for target, name in (("inner/old.npy", "a.npy"), ("a.npy", "b.npy"), (inner / "new.npy", "c.npy")):
        (tmp_path / name).symlink_to(target)
    for name, real in (("b.npy", "old.npy"), ("c.npy", "new.npy")):
        div(*pair, "--row-loss", tmp_path / name, preexec_fn=way)
        assert (tmp_path / name).is_symlink() and np.load(inner / real).shape == (400,)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((inner / "new.npy").stat().st_mode) == 0o666 & ~umask
    assert names(inner) == ["new.npy", "old.npy"]


def test_the_owner_of_what_is_replaced_stays(tmp_path, pair):
    if os.geteuid():
        pytest.skip("not root")
    path = tmp_path / "r.npy"
    path.write_bytes(b"old")
    os.chown(path, 4321, 4322)
    path.chmod(0o640)
    div(*pair, "--row-loss", path)
    about = path.stat()
    assert (about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode)) == (4321, 4322, 0o640) and len(np.load(path)) == 400


@pytest.mark.parametrize("way", WAYS)
def test_a_list_of_who_else_may_is_kept(tmp_path, pair, way):
    """Without it the mode would give the group what the list gives somebody else."""
    path, name = tmp_path / "r.npy", "system.posix_acl_access"
    entries = [(1, 6, -1), (2, 6, 4321), (4, 0, -1), (16, 6, -1), (32, 0, -1)]  # user, 4321, group, mask, others
    path.write_bytes(b"old")
    try:
        os.setxattr(path, name, struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries))
    except OSError:
        pytest.skip("a file system without lists")
    kept = os.getxattr(path, name)
    div(*pair, "--row-loss", path, preexec_fn=way)
    assert os.getxattr(path, name) == kept and len(np.load(path)) == 400


@pytest.mark.parametrize("way", WAYS)
def test_a_name_as_long_as_the_file_system_has_it(tmp_path, pair, way):
    name = "r" * 251 + ".npy"
    div(*pair, "--row-loss", tmp_path / name, preexec_fn=way)
    assert np.load(tmp_path / name).shape == (400,)
    assert "File name too long" in div(*pair, "--row-loss", tmp_path / ("r" + name), *NOBODY, code=2).stderr


@pytest.mark.parametrize("way", WAYS)
def test_one_that_cannot_be_written_is_known_before_a_server_is_asked(tmp_path, pair, way):
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "round.npy").symlink_to("round.npy")
    (tmp_path / "device.npy").symlink_to("/dev/null")
    before = names(tmp_path)
    for name, said in (("none/r.npy", "No such file"), ("folder.npy", "Is a directory"), ("pipe.npy", "not a regular file"),
                       ("round.npy", "Too many levels"), ("device.npy", "not a regular file"), ("q.npy/r.npy", "Not a directory")):
        done = div(*pair, "--loss", tmp_path / "loss.npy", "--row-loss", tmp_path / name, *NOBODY, code=2, preexec_fn=way)
        assert f"{name}: cannot be written: " in done.stderr and said in done.stderr, done.stderr
        assert names(tmp_path) == before and os.path.exists("/dev/null")


def test_a_file_that_is_read_only_is_not_replaced(tmp_path, pair):
    path = tmp_path / "r.npy"
    path.write_bytes(b"old")
    path.chmod(0o444)
    ask = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    done = subprocess.run([*ask, BIN / "kld", "div", *pair, "--row-loss", path, *NOBODY], capture_output=True, text=True,
                          env=clean_environment(), timeout=60)
    assert done.returncode == 2, done
    assert "r.npy: cannot be written: Permission denied" in done.stderr and path.read_bytes() == b"old"


@pytest.mark.parametrize("way", WAYS)
def test_no_room(tmp_path, pair, way):
    """A limit of the size of files, and a file system that is full: before anything is computed where it tells."""
    before = names(tmp_path)
    limit = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh", BIN / "kld", "div", *pair, "--quiet"]
    done = subprocess.run([*limit, "--row-loss", tmp_path / "r.npy", "--grad-predictions", tmp_path / "g.npy"], text=True,
                          capture_output=True, env=clean_environment(), timeout=60, preexec_fn=way)
    assert done.returncode == 2 and "g.npy: cannot be written: File too large" in done.stderr, done
    assert names(tmp_path) == before
    full = tmp_path / "full"
    full.mkdir()
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    mount = 'mount -t tmpfs -o size=64k none "$0" && "$@"; code=$?; ls -A "$0"; exit $code'
    done = subprocess.run(["unshare", "--mount", "sh", "-c", mount, full, BIN / "kld", "div", *pair, "--row-loss", full / "r.npy",
                           "--grad-predictions", full / "g.npy", "--quiet", *(NOBODY if way is None else ())],
                          capture_output=True, text=True, env=clean_environment(), timeout=60, preexec_fn=way)
    assert done.returncode == 2 and "No space left" in done.stderr and done.stdout == "", done


def test_nothing_is_beside_a_result_whatever_ends_the_tool(tmp_path):
    rows = np.full((2000, 8000), 1 / 8000, np.float32)  # 64 MB
    np.save(tmp_path / "q.npy", rows)
    out = tmp_path / "out"
    out.mkdir()
    for number in (signal.SIGKILL, signal.SIGINT, None):
        process = subprocess.Popen([BIN / "kld", "div", tmp_path / "q.npy", tmp_path / "q.npy", "--grad-predictions",
                                    out / "g.npy", "--grad-targets", out / "h.npy", "--quiet"], stdout=subprocess.DEVNULL,
                                   env=clean_environment())
        seen, written, begun = set(), 0, time.monotonic()
        while process.poll() is None and time.monotonic() < begun + 60:
            seen |= set(os.listdir(out))
            with open(f"/proc/{process.pid}/io") as io:
                written = int(dict(line.split(": ") for line in io.read().splitlines())["wchar"])
            if number and written > 1 << 20:  # in the middle of it
                process.send_signal(number)
                break
        code = process.wait(timeout=60)
        assert seen | set(names(out)) <= {"g.npy", "h.npy"} and code in (0, -(number or 0)), code
        for path in out.iterdir():  # of a run that came to its end first, or almost
            assert np.load(path).shape == rows.shape
            path.unlink()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls")
def test_a_signal_removes_what_has_a_name_before_it_is_whole(tmp_path, number):
    np.save(tmp_path / "q.npy", np.full((2000, 8000), 1 / 8000, np.float32))
    out = tmp_path / "out"
    out.mkdir()
    for _ in range(20):
        process = subprocess.Popen([BIN / "kld", "div", tmp_path / "q.npy", tmp_path / "q.npy", "--grad-predictions",
                                    out / "g.npy", "--grad-targets", out / "h.npy", "--quiet"], stdout=subprocess.DEVNULL,
                                   env=clean_environment(), preexec_fn=without_nameless_files)
        while process.poll() is None and not any(entry.name.startswith(".kld-") for entry in os.scandir(out)):
            pass
        time.sleep(0.02)  # when there is something in it
        process.send_signal(number)
        code = process.wait(timeout=60)
        assert not list(out.glob(".kld-*"))
        if code == -number:
            return
        for path in out.iterdir():
            path.unlink()
    pytest.skip("each came to its end first")


def test_results_of_a_run_that_fails_are_not_there(tmp_path, pair):
    (tmp_path / "old.npy").write_bytes(b"old")
    kld("div", *pair, "--row-loss", tmp_path / "old.npy", "--loss", tmp_path / "new.npy", *NOBODY, "--timeout", "0.2", code=3)
    assert (tmp_path / "old.npy").read_bytes() == b"old" and names(tmp_path) == ["old.npy", "p.npy", "q.npy"]
