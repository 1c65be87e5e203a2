"""How a server starts where little is as it should be: standard descriptors that are closed, signals before it
watches for them, children that end before they have read what they were told."""
import fcntl
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest

from conftest import BIN, START_SECONDS, clean_environment, trouble, wait_until
from httplib import is_sanitized

SERVER = str(BIN / "kld-server")
STARTS = 40


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_are_nobodys(tmp_path, closed):
    """What is printed and logged does not go to the memory that would have their numbers."""
    path = tmp_path / "s"
    process = subprocess.Popen(["sh", "-c", f'exec "$@" {closed}', "sh", SERVER, "--http=127.0.0.1:0", f"--unix={path}",
                                "--backend=cpu", "--log-level=debug"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=clean_environment())
    try:
        wait_until(lambda: os.path.exists(path), START_SECONDS, "its socket")

        def status():
            return subprocess.run([BIN / "kld", "status", "--json", "--server", f"unix:{path}"], capture_output=True,
                                  text=True, env=clean_environment())
        wait_until(lambda: status().returncode == 0, START_SECONDS, "an answer")
        for figure in re.findall(r"_(?:total|flight|bytes)\":(\d+)", status().stdout):
            assert int(figure) < 1 << 50, status().stdout
        opened = {fd: os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in (0, 1, 2)}
        assert not [where for where in opened.values() if "memfd" in where or "socket:" in where], opened
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err


def test_a_signal_before_it_is_watched_for_is_not_lost(tmp_path):
    """As PID 1, whose signals have no default action."""
    inside = ["unshare", "--pid", "--fork", "--mount", "--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True).returncode:
        assert os.environ.get("CI") != "true", "no PID namespaces here (unshare)"
        pytest.skip("no PID namespaces here")
    for number in range(10):
        process = subprocess.Popen([*inside, "sh", "-c", 'mount -t proc proc /proc; exec "$@"', "sh", SERVER, "--http=",
                                    f"--unix={tmp_path}/s", "--backend=cpu"], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, env=clean_environment())
        try:
            children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
            first = wait_until(lambda: children.read_text().split(), START_SECONDS, "a first process")[0]

            def has_begun():  # main() blocks it, until it is caught: bit 14 of either
                told = pathlib.Path(f"/proc/{first}/status").read_text()
                masks = re.findall(r"^Sig(?:Blk|Cgt):\s+(\w+)", told, re.M)
                return "\tkld-server\n" in told and any(int(mask, 16) & 1 << 14 for mask in masks)
            began = time.monotonic()
            while not has_begun():  # as soon as possible: without a pause
                assert time.monotonic() < began + START_SECONDS
            os.kill(int(first), signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_crash_does_not_go_unseen(make_server, log_format):
    """Another worker is there at once, and the server ends well: what tests end with looks for it in the log."""
    server = make_server(log_format=log_format)
    server.kill_child("gateway")
    assert not trouble(server)
    server.kill_child("worker", signal.SIGABRT)  # of which no sanitizer makes something of its own
    wait_until(lambda: trouble(server) == ["a child crashed"], what="word of a crash")
    server.may_crash = True
    assert not trouble(server)


def test_a_lock_of_somebody_else_is_waited_for_once(make_server):
    """Anybody who may open the folder can hold it: six seconds, however many sockets there are to be."""
    server = make_server(device="0,0,0,0")
    assert server.stop() == 0
    server.folder.mkdir(exist_ok=True)
    holder = os.open(server.folder, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        began = time.monotonic()
        server.start()
        assert 5 < time.monotonic() - began < 20  # each for itself: 24
    finally:
        os.close(holder)
    assert server.stop() == 0


@pytest.mark.skipif(is_sanitized(), reason="40 starts, of which a sanitizer says nothing new")
def test_last_words_are_heard(tmp_path):
    """A worker that cannot start says why and ends, with an order unread."""
    for number in range(STARTS):
        done = subprocess.run([SERVER, "--http=127.0.0.1:0", f"--unix={tmp_path}/s", "--backend=cpu", "--device=1000"],
                              capture_output=True, text=True, timeout=60, env=clean_environment())
        assert done.returncode == 1 and done.stderr.count("child started child=worker0") == 1, done.stderr
        assert "it keeps dying" not in done.stderr and "cannot start" in done.stderr, done.stderr
