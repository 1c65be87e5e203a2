"""`kld top`: on a pseudo-terminal as a person has it, and in a pipe."""
import fcntl
import hashlib
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time

import pytest

from conftest import BIN, SANITIZER, clean_environment, wait_until
from httplib import probabilities
import oip

ENTER, LEAVE = b"\x1b[?1049h\x1b[?25l", b"\x1b[?25h\x1b[?1049l"
BODY = oip.body({"predictions": probabilities((8, 64), 1), "targets": probabilities((8, 64), 2)}, None,
                {"divergence": "js"})


class Terminal:
    """kld top on a terminal of its own, of 24 lines."""

    def __init__(self, server, *arguments, columns=200, shell=None):
        self.main, self.side = pty.openpty()
        self.resize(columns)
        self.were = termios.tcgetattr(self.side)
        self.output = b""
        command = [str(BIN / "kld"), "top", "-d", "0.2", "--server", server, *arguments]
        self.process = subprocess.Popen(
            ["bash", "-c", shell, *command] if shell else command, stdin=self.side, stdout=self.side,
            stderr=self.side, env=clean_environment(TERM="xterm"), start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))

    def resize(self, columns, lines=24):
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self, seconds=0.0):
        while select.select([self.main], [], [], seconds)[0]:
            self.output += os.read(self.main, 65536)
            seconds = 0
        return self.output

    def picture(self):
        """The lines of the last whole picture."""
        pictures = self.read().split(b"\x1b[H")[1:]
        whole = [p for p in pictures if b"\x1b[J" in p]
        if not whole:
            return []
        text = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", whole[-1].split(b"\x1b[J")[0])
        return text.decode().split("\r\n")

    def until(self, pattern, what, seconds=30):
        """The first picture from now on in which the pattern is found."""
        self.read()
        self.output = b""
        return wait_until(lambda: re.search(pattern, "\n".join(lines := self.picture()), re.M) and lines, seconds, what)

    def end(self, status=0):
        assert self.process.wait(30) == status, self.read()
        self.read(0.1)
        assert self.output.endswith(LEAVE), self.output[-200:]
        assert termios.tcgetattr(self.side) == self.were
        assert not SANITIZER.search(self.output.decode(errors="replace"))

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.main)
        os.close(self.side)


@pytest.fixture
def terminal():
    made = []

    def make(*arguments, **more):
        made.append(Terminal(*arguments, **more))
        return made[-1]
    yield make
    for one in made:
        one.close()


@pytest.fixture
def load():
    """load(server): asks it all the time, until the end of the test or until its end."""
    over, threads = threading.Event(), []

    def run(server):
        while not over.is_set():
            try:
                server.request("/v2/models/kl_div/infer", BODY[1], BODY[0])
            except OSError:
                time.sleep(0.05)

    def start(server):
        threads.append(threading.Thread(target=run, args=(server,)))
        threads[-1].start()
    yield start
    over.set()
    for thread in threads:
        thread.join()


def test_a_person_looks_at_it(server, terminal, load):
    load(server)
    top = terminal(server.http)

    def under_load():
        """A picture of 0.2 s in which all of them had a turn, load and server."""
        lines = top.until(r"worker0 (.*\n)*js +\d", "processes, rates by divergence")
        rates = {line.split()[0]: float(line.split()[1]) for line in lines if re.match(r"(http|unix|js) ", line)}
        return rates["http"] > 1 and (lines, rates)
    lines, rates = wait_until(under_load, what="rates")
    assert top.process.poll() is None and lines[0].startswith("kld ") and server.http in lines[0] and "ready" in lines[0]
    # The page is no snapshot: at each of its two ends one request may be counted in this and not yet in that, 5 a second.
    assert rates["http"] == pytest.approx(rates["unix"], rel=0.3, abs=10)
    assert rates["js"] == pytest.approx(rates["unix"], abs=10.1)
    worker = next(line for line in lines if line.startswith("0  "))
    assert server.backend in worker and "ready" in worker and len(lines) <= 24
    assert all(stage in "\n".join(lines) for stage in ("receive", "gateway", "reply", "supervisor", "worker0"))
    top.resize(40)
    lines = top.until("^kld", "a narrow picture")
    lines = top.until("^kld", "the next one")
    assert max(map(len, lines)) <= 40
    top.resize(200, 5)
    wait_until(lambda: len(top.picture()) == 5, what="a low picture")
    os.write(top.main, b"xq")
    top.end()


@pytest.mark.parametrize("how", ["ctrl-c", "ctrl-d", "term", "hup", "quit"])
def test_it_leaves_the_terminal_as_it_was(server, terminal, how):
    top = terminal(server.http)
    top.until("^kld", "a picture")
    assert not termios.tcgetattr(top.side)[3] & (termios.ICANON | termios.ECHO)
    if how.startswith("ctrl"):
        os.write(top.main, {"ctrl-c": b"\x03", "ctrl-d": b"\x04"}[how])
    else:
        top.process.send_signal(getattr(signal, "SIG" + how.upper()))
    top.end()


def test_it_stops_and_goes_on(server, terminal):
    """In a shell with job control."""
    top = terminal(server.http, shell='set -m; "$0" "$@"; echo "it stopped"; read word; fg >/dev/null')
    top.until("^kld", "a picture")
    os.write(top.main, b"\x1a")
    wait_until(lambda: b"it stopped" in top.read(), what="its stop")
    assert LEAVE in top.output and termios.tcgetattr(top.side) == top.were
    top.output = b""
    os.write(top.main, b"go\n")
    top.until("^kld", "a picture")
    assert not termios.tcgetattr(top.side)[3] & termios.ICANON
    os.write(top.main, b"q")
    top.end()


def test_it_does_not_stop_where_nobody_could_continue_it(server, terminal):
    """As under `ssh -t HOST kld top`: no shell."""
    top = terminal(server.http)
    top.until("^kld", "a picture")
    os.write(top.main, b"\x1a")
    wait_until(lambda: LEAVE + ENTER in top.read(), what="the screen, left and entered")
    top.until("^kld", "a picture")
    assert not termios.tcgetattr(top.side)[3] & termios.ICANON
    os.write(top.main, b"q")
    top.end()


def test_the_server_goes_and_comes_again(make_server, terminal, load):
    server = make_server()
    load(server)
    top = terminal(server.http)
    top.until(r"^js +\d", "rates")
    assert server.stop() == 0
    lines = top.until(r"no answer for \d+ s, trying again: ", "the line that says so")
    assert lines[0].startswith("kld ")  # what was known is still there
    # stop() closed what start() opens again; the port is the same, so that it is the same server to whoever looks.
    server.arguments = [f"--http={server.address}" if a.startswith("--http=") else a for a in server.arguments]
    top.output = b""
    server.start()
    wait_until(lambda: b"started again: rates begin anew" in top.read(), 30, "the line that says so")

    def rate():
        lines = top.until(r"^js +\d", "rates")
        return next(float(line.split()[1]) for line in lines if line.startswith("http "))
    assert wait_until(rate, what="a rate") < 1e5
    os.write(top.main, b"q")
    top.end()


def test_it_waits_for_a_server(terminal):
    top = terminal("http://127.0.0.1:1")
    lines = top.until("no answer for [1-9]", "the line that says so")
    assert lines[0] == "kld top  http://127.0.0.1:1" and "trying again" in lines[1]
    os.write(top.main, b"q")
    top.end()


def test_in_a_pipe(server, cli, load):
    load(server)

    def top(*arguments):
        """-> (what it came to, how long that took). The 2 s that it has for an answer may be too few for a busy machine."""
        def answered():
            started = time.monotonic()
            done = cli("top", *arguments, "--server", server.http)
            return "did not answer in time" not in done.stderr and (done, time.monotonic() - started)
        return wait_until(answered, what="a server that answers")

    def under_load():
        once, _ = top("--once", "-d", "0.3")
        assert once.returncode == 0 and not once.stderr and "\x1b" not in once.stdout
        assert once.stdout.count("kld ") == 1
        rate = float(re.search(r"^http +(\S+)", once.stdout, re.M).group(1))
        return re.search(r"^js +[1-9]", once.stdout, re.M) and rate > 1  # not where all was still for 0.3 s
    wait_until(under_load, what="rates")
    three, took = top("--batch", "-n", 3, "-d", "0.2")
    assert three.stdout.count("kld ") == 3 and 0.6 <= took < 30

    def head():
        done = subprocess.run(f"{BIN}/kld top -d 0.1 --server {server.http} | head -1", shell=True, timeout=60,
                              capture_output=True, text=True)
        return "did not answer in time" not in done.stderr and done
    done = wait_until(head, what="a server that answers")
    assert done.stdout.startswith("kld ") and not done.stderr


def unread(pipe):
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


def test_signals_of_batches_are_the_systems(server):
    """What nohup ignores stays ignored, and SIGTERM ends who sleeps at a full pipe."""
    ours, its = os.pipe()
    fcntl.fcntl(its, fcntl.F_SETPIPE_SZ, 4096)
    command = [BIN / "kld", "top", "--batch", "-d", "0.1", "--server", server.http]
    with subprocess.Popen(command, stdout=its, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as top:
        os.close(its)
        wait_until(lambda: unread(ours) > 0, what="a block")
        top.send_signal(signal.SIGHUP)
        os.read(ours, 4096)
        wait_until(lambda: unread(ours) > 0, what="another block")
        before = -1
        while before != unread(ours):  # it is full
            before = unread(ours)
            time.sleep(1)
        assert top.poll() is None
        top.send_signal(signal.SIGTERM)
        try:
            assert top.wait(10) == -signal.SIGTERM
        finally:
            top.kill()
    os.close(ours)


@pytest.mark.parametrize("arguments, part", [
    (["-d", "0"], "-d is 0; expected seconds"), (["-n", "some"], "-n is 'some'"), (["--n", "3"], "unknown option '--n'"),
    (["-once"], "unknown option '-once'"), (["--server", "unix:/tmp/x"], "reads /metrics"), (["-n"], "-n needs a value")])
def test_bad_command_lines(cli, arguments, part):
    done = cli("top", *arguments, environment={"KLD_SERVER": "http://127.0.0.1:1"})
    assert done.returncode == 2 and part in done.stderr, done.stderr


def test_who_may_not_look(make_server, cli, terminal, tmp_path):
    words = tmp_path / "tokens"
    words.write_text(f"some {hashlib.sha256(b'word').hexdigest()} infer\n")
    (tmp_path / "word").write_text("word\n")
    server = make_server(tokens=str(words))
    done = cli("top", "--once", "--server", server.http, "--token-file", tmp_path / "word")
    assert done.returncode == 3 and "metrics" in done.stderr, done.stderr
    assert cli("top", "--once", "--server", "http://127.0.0.1:1").returncode == 3
    top = terminal(server.http, "--token-file", str(tmp_path / "word"))
    assert top.process.wait(30) == 3
    assert b"metrics" in top.read(0.1).split(LEAVE)[1] and termios.tcgetattr(top.side) == top.were
