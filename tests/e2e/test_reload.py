"""SIGHUP: tokens, certificates and the log level are taken over while requests are on their way, all or none; and what
else a SIGHUP can be: early, late, many, a terminal's end."""
import hashlib
import http.client
import json
import os
import pathlib
import pty
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time

import pytest

import oip
from conftest import BIN, children_of, clean_environment, suspend, wait_until
from httplib import PREFIX, Late, Shared, certificates, fds_of, is_sanitized, probabilities, tls_flags, unless_late
from oip import INFER
from test_service_manager import Manager

Q, P = probabilities((2, 3), 1), probabilities((2, 3), 2)
HEADERS, DATA = oip.body({"predictions": Q, "targets": P})


def bearer(name):
    return {"Authorization": f"Bearer word-of-{name}"}


def outcomes(server):
    return re.findall(r"supervisor: (reloaded|reload failed)(.*)", server.log())


def reload(server):
    """SIGHUP; what came of it: (event, the rest of its line)."""
    before = len(outcomes(server))
    os.kill(server.pid, signal.SIGHUP)
    wait_until(lambda: len(outcomes(server)) > before, 30, "a reload")
    return outcomes(server)[before]


class Settings:
    """A file of configuration and one of tokens, which the server is to read again."""

    def __init__(self, folder, **settings):
        self.file, self.tokens = folder / "kld.json", folder / "tokens"
        self.write(**settings)

    def write(self, **settings):
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(settings))
        os.replace(new, self.file)

    def allow(self, **rights):
        """Replaced by a rename, as a Secret of Kubernetes is."""
        new = self.tokens.with_suffix(".new")
        new.write_text("".join(f"{name} {hashlib.sha256(f'word-of-{name}'.encode()).hexdigest()} {right}\n"
                               for name, right in rights.items()))
        os.replace(new, self.tokens)


@pytest.fixture
def settings(tmp_path):
    return Settings(tmp_path)


def infer(server, name):
    return server.request(INFER, DATA, {**HEADERS, **bearer(name)})[0]


# ---- tokens ---------------------------------------------------------------------------------------

def ask_all_the_time(server, stop, statuses):
    connection = http.client.HTTPConnection(server.address, timeout=60)
    while not stop.is_set():
        connection.request("POST", INFER, DATA, {**HEADERS, **bearer("steady")})
        reply = connection.getresponse()
        reply.read()
        statuses.append(reply.status)
    connection.close()


def test_tokens_come_and_go_under_load(make_server, settings):
    """Nobody else's request fails, no connection ends."""
    settings.allow(steady="infer", metrics="metrics")
    server = make_server(tokens=settings.tokens, http_threads=2)
    stop, statuses = threading.Event(), []
    askers = [threading.Thread(target=ask_all_the_time, args=(server, stop, statuses)) for _ in range(4)]
    for asker in askers:
        asker.start()
    wait_until(lambda: len(statuses) > 20)
    try:
        for turn in range(8):
            settings.allow(steady="infer", metrics="metrics", guest="infer" if turn % 2 else "shm",
                           **{f"only{turn}": "infer"})
            event, text = reload(server)
            removed = 0 if turn == 0 else 1
            assert event == "reloaded" and "tokens=4" in text and f"tokens_removed={removed}" in text, text
            assert infer(server, "guest") == (200 if turn % 2 else 403)
            assert infer(server, f"only{turn}") == 200 and infer(server, f"only{turn - 1}") == 401
    finally:
        stop.set()
        for asker in askers:
            asker.join()
    assert set(statuses) == {200}
    text = server.request("/metrics", None, bearer("metrics"))[2].decode()
    assert "\nkld_config_reloads_total 8\n" in text and "\nkld_config_reloads_failed_total 0\n" in text
    assert "\nkld_http_connections_total " in text
    when = int(re.search(r"^kld_config_reload_success_timestamp_seconds (\d+)$", text, re.M).group(1))
    assert abs(when - time.time()) < 600
    # 4 kept theirs; each other request of this test had one of its own.
    assert int(re.search(r"^kld_http_connections_total (\d+)$", text, re.M).group(1)) == 4 + 8 * 3 + 1


def test_a_token_that_is_taken_away(make_server, settings):
    """What it has on its way is answered; then what it keeps goes, and does not come back with it."""
    settings.allow(guest="infer,shm", other="infer,metrics")
    server = make_server(tokens=settings.tokens, shm_prefix=PREFIX)

    def metric(name):
        text = server.request("/metrics", None, bearer("other"))[2].decode()
        return int(re.search(rf"^{name} (\d+)$", text, re.M).group(1))
    replies = []
    with Shared(4096) as shared:
        assert server.heard("/v2/tensors/t?datatype=FP32&shape=2,3", P.tobytes(), bearer("guest"), "PUT")[0] == 200
        assert server.request("/v2/systemsharedmemory/region/r/register",
                              json.dumps({"key": shared.key, "byte_size": 64}).encode(), bearer("guest"))[0] == 200
        worker = server.child("worker")
        suspend(worker)
        try:
            asker = threading.Thread(target=lambda: replies.append(infer(server, "guest")))
            asker.start()
            wait_until(lambda: metric("kld_http_requests_in_flight") == 1, what="a request")
            settings.allow(other="infer,metrics")
            assert reload(server)[0] == "reloaded"
            assert infer(server, "guest") == 401
            time.sleep(0.6)  # longer than one look at who has left
            assert metric("kld_http_tensors") == metric("kld_http_regions") == 1
        finally:
            os.kill(worker, signal.SIGCONT)
        asker.join()
        assert replies == [200]
        wait_until(lambda: metric("kld_http_tensors") == metric("kld_http_regions") == 0, what="room")
    settings.allow(guest="infer,shm", other="infer,metrics")
    assert reload(server)[0] == "reloaded"
    assert infer(server, "guest") == 200
    assert server.request("/v2/tensors/t", headers=bearer("guest"))[0] == 404
    assert server.request("/v2/systemsharedmemory/region/r/status", headers=bearer("guest"))[0] == 404


def test_a_token_that_is_taken_away_before_a_body_comes(make_server, settings):
    """Nobody could unregister the region."""
    settings.allow(guest="infer,shm", other="infer,metrics")
    server = make_server(tokens=settings.tokens, shm_prefix=PREFIX)
    with Shared(4096) as shared:
        body = json.dumps({"key": shared.key, "byte_size": 64}).encode()
        connection = http.client.HTTPConnection(server.address, timeout=30)
        connection.putrequest("POST", "/v2/systemsharedmemory/region/r/register")
        connection.putheader("Authorization", bearer("guest")["Authorization"])
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        time.sleep(1)  # until it has been let in: nothing tells
        settings.allow(other="infer,metrics")
        assert reload(server)[0] == "reloaded"
        connection.send(body)
        reply = connection.getresponse()
        assert reply.status == 401 and b"no longer accepted" in reply.read()
        connection.close()
    text = server.request("/metrics", None, bearer("other"))[2].decode()
    assert re.search(r"^kld_http_regions 0$", text, re.M), text


def test_another_word_for_the_same_name(make_server, settings):
    """A token is changed, its name keeps what it stored."""
    settings.allow(guest="infer")
    server = make_server(tokens=settings.tokens)
    assert server.heard("/v2/tensors/t?datatype=FP32&shape=2,3", P.tobytes(), bearer("guest"), "PUT")[0] == 200
    settings.tokens.write_text(f"guest {hashlib.sha256(b'word-of-new').hexdigest()} infer\n")
    event, text = reload(server)
    assert event == "reloaded" and "tokens_added=0 tokens_removed=0" in text
    assert infer(server, "guest") == 401
    time.sleep(0.7)
    assert server.request("/v2/tensors/t", headers=bearer("new"))[0] == 200


# ---- what is wrong changes nothing ----------------------------------------------------------------

WRONG = [("tokens", "guest x infer\n", "tokens: line 1 is not NAME"),
         ("tokens", "", "tokens: the file has no tokens"),
         ("tokens", None, "tokens: the file cannot be opened: No such file"),
         ("config", '{"log_level": "loud"}', "log_level: 'loud' is not one of debug,info,warn,error"),
         ("config", '{"log_levle": "info"}', "did you mean log_level"),
         ("config", "{", "the JSON is not valid"),
         ("config", None, "cannot read the configuration"),
         ("config", os.mkfifo, "not a regular file"),
         ("tokens", os.mkfifo, "tokens: not a regular file")]


def put_wrong(path, text):
    path.unlink()
    if callable(text):
        text(path)
    elif text is not None:
        path.write_text(text)


def test_what_is_wrong_changes_nothing(make_server, settings, tmp_path):
    """Even where the other files are good; and whoever serves next has what was in use, too."""
    settings.allow(one="infer,metrics")
    settings.write(log_level="info")
    server = make_server(tokens=settings.tokens, config=settings.file)
    for number, (which, text, part) in enumerate(WRONG):
        settings.allow(two="infer")
        settings.write(log_level="debug")
        put_wrong({"tokens": settings.tokens, "config": settings.file}[which], text)
        event, line = reload(server)
        assert event == "reload failed" and part in line, line
        assert infer(server, "one") == 200 and infer(server, "two") == 401
        if number == 0:
            server.kill_child("gateway")  # connections wait for the next one
            assert infer(server, "one") == 200 and infer(server, "two") == 401
    assert server.log().count(" error supervisor: reload failed ") == len(WRONG)
    assert " debug " not in server.log() and "word-of" not in server.log()
    text = server.request("/metrics", None, bearer("one"))[2].decode()
    assert f"\nkld_config_reloads_failed_total {len(WRONG)}\n" in text and "\nkld_config_reloads_total 0\n" in text
    assert "\nkld_config_last_reload_failed 1\n" in text
    settings.allow(two="infer,metrics")
    settings.write(log_level="debug")
    assert reload(server)[0] == "reloaded"
    assert infer(server, "two") == 200 and infer(server, "one") == 401
    server.kill_child("gateway")
    assert infer(server, "two") == 200 and infer(server, "one") == 401
    assert b"\nkld_config_last_reload_failed 0\n" in server.request("/metrics", None, bearer("two"))[2]


NO_START = [({"tls_cert": "/nowhere"}, "tls_cert and tls_key go together"), ({"http": "0.0.0.0:1", "tokens": ""}, "--insecure-bind"),
            ({"http": "8080"}, "expected ADDR:PORT"), ({"http": "", "metrics_http": "127.0.0.1:1"}, "there is no --http beside it"),
            ({"metrics_http": "x:1"}, "--metrics-http: 'x' is not an address"), ({"unix": "/tmp/" + "x" * 110}, "path is longer"),
            ({"unix": "/tmp/" + "x" * 102, "device": "0,0"}, "path is longer"), ({"backend": "cuda"}, "this build has no 'cuda'")]


@pytest.mark.parametrize("wrong, said", NO_START)
def test_what_no_start_could_use_is_no_reload(make_server, settings, tmp_path, wrong, said):
    """It is the next start's alone, which would be an outage; and a start says the same."""
    if "backend" in wrong and subprocess.run([BIN / "kld-server", "--backend=cuda", "--http=8080", f"--unix={tmp_path}/s"],
                                             capture_output=True, text=True).stderr.count("ADDR:PORT"):
        pytest.skip("a build with CUDA")
    settings.allow(one="infer,metrics")
    good = {"http": "127.0.0.1:0", "backend": "cpu", "tokens": str(settings.tokens), "unix": str(tmp_path / "sock")}
    settings.write(**good)
    start = [BIN / "kld-server", "--config", settings.file, "--threads=1"]
    server = make_server(config=settings.file, http=None, unix=None, backend=None)
    settings.write(**{**good, **wrong})
    event, line = reload(server)
    assert event == "reload failed" and said in line, line
    refused = subprocess.run(start, capture_output=True, text=True, timeout=60, env=clean_environment())
    assert refused.returncode == 2 and said in refused.stderr, refused
    settings.write(**good)
    assert reload(server)[0] == "reloaded" and infer(server, "one") == 200


def test_what_a_reload_cannot_change(make_server, settings):
    settings.allow(one="infer,metrics")
    settings.write(log_level="info", clients_max=7)
    server = make_server(tokens=settings.tokens, config=settings.file, spin_us=3)
    settings.write(log_level="warn", clients_max=8, spin_us=9, insecure_bind=True, tls_cert="/nowhere",
                   tls_key="/nowhere")
    assert reload(server)[0] == "reloaded"
    log = server.log()
    assert "supervisor: needs a restart settings=insecure_bind,clients_max,tls_cert,tls_key " in log
    assert infer(server, "one") == 200
    settings.write(log_level="info", clients_max=7)  # as it was
    assert reload(server)[0] == "reloaded"
    assert "needs a restart" not in server.log()[len(log):]


# ---- certificates ---------------------------------------------------------------------------------

def issue(folder, name, serial, authority="ca", purpose="serverAuth"):
    """name.crt and name.key, new."""
    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key",
            "-out", f"{name}.csr", "-subj", f"/CN={name}")
    (folder / "more").write_text(f"subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage={purpose}\n")
    openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.crt", "-CAkey", f"{authority}.key",
            "-set_serial", str(serial), "-days", "2", "-out", f"{name}.crt", "-extfile", "more")


@pytest.fixture
def own(certificates, tmp_path):
    """The certificates in a folder of this test, which may change them."""
    folder = tmp_path / "certificates"
    subprocess.run(["cp", "-r", certificates, folder], check=True)
    return folder


class Client:
    """A connection that is kept."""

    def __init__(self, server, folder, certificate=None):
        self.context = ssl.create_default_context(cafile=folder / "ca.crt")
        if certificate:
            self.context.load_cert_chain(folder / f"{certificate}.crt", folder / f"{certificate}.key")
        self.connection = http.client.HTTPSConnection(server.address, timeout=60, context=self.context)
        self.connection.connect()
        self.serial = self.connection.sock.getpeercert()["serialNumber"]
        self.port = self.connection.sock.getsockname()[1]

    def ask(self):
        self.connection.request("GET", "/v2")
        reply = self.connection.getresponse()
        reply.read()
        assert self.connection.sock is None or self.connection.sock.getsockname()[1] == self.port
        return reply.status


def test_a_certificate_is_replaced(make_server, own):
    """For who comes from then on; who is there stays."""
    server = make_server(http_threads=2, **tls_flags(own))
    old = [Client(server, own) for _ in range(3)]
    assert [client.ask() for client in old] == [200] * 3
    issue(own, "server", 0xABCD)
    event, text = reload(server)
    assert event == "reloaded" and re.search(r"certificate_until=\d{4}-\d\d-\d\dT", text), text
    new = [Client(server, own) for _ in range(3)]
    assert {client.serial for client in new} == {"ABCD"} and "ABCD" not in {client.serial for client in old}
    for _ in range(2):
        assert [client.ask() for client in old + new] == [200] * 6
    (own / "server.key").write_bytes((own / "other.key").read_bytes())  # not this certificate's
    event, text = reload(server)
    assert event == "reload failed" and "tls_cert, tls_key: not a PEM certificate and its key" in text
    (own / "server.key").unlink()
    assert "tls_key: the file cannot be opened" in reload(server)[1]
    assert Client(server, own).serial == "ABCD"
    assert [client.ask() for client in old + new] == [200] * 6
    assert "PRIVATE" not in server.log()
    for client in old + new:
        client.connection.close()


def test_the_client_ca_is_replaced(make_server, own):
    """It counts from the next request on, on every connection."""
    issue(own, "theirs", 7, authority="other", purpose="clientAuth")
    server = make_server(**tls_flags(own, tls_client_ca=own / "ca.crt"))
    ours, theirs = Client(server, own, "client"), Client(server, own, "theirs")
    assert ours.ask() == 200 and theirs.ask() == 401
    authority = (own / "ca.crt").read_bytes()
    both = server.flags["tls_client_ca"] = own / "ca.crt"
    both.write_bytes(authority + (own / "other.crt").read_bytes())
    assert reload(server)[0] == "reloaded"
    trusts = own / "trusts"
    trusts.mkdir()
    for name in ("client", "theirs"):
        for end in ("crt", "key"):
            (trusts / f"{name}.{end}").write_bytes((own / f"{name}.{end}").read_bytes())
    (trusts / "ca.crt").write_bytes(authority)
    assert ours.ask() == 200 and Client(server, trusts, "theirs").ask() == 200
    both.write_bytes((own / "other.crt").read_bytes())
    assert reload(server)[0] == "reloaded"
    assert ours.ask() == 401 and Client(server, trusts, "client").ask() == 401
    kept = Client(server, trusts, "theirs")
    assert kept.ask() == kept.ask() == 200
    both.write_text("nothing\n")
    assert "tls_client_ca: not a PEM certificate" in reload(server)[1]
    assert kept.ask() == 200
    for client in (ours, theirs, kept):
        client.connection.close()


# ---- the log level --------------------------------------------------------------------------------

def test_the_log_level_of_all_roles(make_server, settings):
    settings.write(log_level="warn")
    server = make_server(config=settings.file, log_format="json", device="0,0", backend="cpu")

    def roles(begin):
        return {line["role"] for line in server.log_lines(begin) if line["level"] == "debug"}

    def lines():
        begin = len(server.log())
        for _ in range(4):
            assert server.request(INFER, DATA, HEADERS)[0] == 200
        return begin
    assert not roles(lines())
    for level, expected in (("debug", True), ("error", False), ("debug", True)):
        settings.write(log_level=level)
        begin = len(server.log())
        os.kill(server.pid, signal.SIGHUP)
        # Its line is at info, and written while that is still, or already, to be seen; never under error.
        wait_until(lambda: server.metrics()["kld_config_reloads_total"] > 0)
        if expected:
            wait_until(lambda: '"event":"reloaded","log_level":"debug"' in server.log()[begin:])
            begin = len(server.log())  # each loop of the gateway has its own turn of the workers
            wait_until(lambda: lines() and {"gateway", "worker0"} <= roles(begin), what="lines of both")
        else:
            wait_until(lambda: '"event":"reloaded","log_level":"error"' in server.log()[begin:])
            assert not roles(lines())
    server.kill_child("worker")
    server.child("worker")
    begin = len(server.log())
    wait_until(lambda: lines() and "worker0" in roles(begin), 20, "the level in another worker")


def test_without_http(make_server, settings):
    settings.write(log_level="info", tokens="/nowhere")
    server = make_server(config=settings.file, http="")
    settings.write(log_level="debug", tokens="/nowhere")
    event, text = reload(server)
    assert event == "reloaded" and "log_level=debug" in text
    assert subprocess.run([BIN / "kld", "ping", "--count=1", "--server", server.url_unix], capture_output=True,
                          timeout=60).returncode == 0
    wait_until(lambda: " debug worker0: client left" in server.log(), what="the worker's lines")


# ---- the service manager --------------------------------------------------------------------------

def test_the_service_manager_is_told(make_server, settings, tmp_path):
    manager = Manager(str(tmp_path / "notify"))
    settings.allow(one="infer")
    server = make_server(tokens=settings.tokens, environment={"NOTIFY_SOCKET": manager.name})
    first = manager.next()
    assert first[0] == "READY=1"
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert reload(server)[0] == "reloaded"
    told = manager.next()
    assert told[0] == "RELOADING=1" and told[1].startswith("MONOTONIC_USEC=")
    assert before <= int(told[1].split("=")[1]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert manager.next() == first
    settings.tokens.write_text("")
    assert reload(server)[0] == "reload failed"
    assert manager.next()[0] == "RELOADING=1"
    told = manager.next()
    assert told[0] == "READY=1" and "reload failed" in told[1]
    assert server.stop() == 0
    assert manager.next() == ["STOPPING=1"]
    manager.socket.close()


# ---- early, late, many ----------------------------------------------------------------------------

def test_a_storm_is_a_few(make_server, settings):
    settings.allow(one="infer,metrics")
    server = make_server(tokens=settings.tokens)
    processes = [server.pid, server.child("gateway"), server.child("worker")]
    assert reload(server)[0] == "reloaded"  # by whose first one a pool of threads is there
    for _ in range(100):  # and of each loop of the gateway the stream, for which a driver opens files
        assert infer(server, "one") == 200

    def count():
        found = [fds_of(pid) for pid in processes]
        time.sleep(0.3)  # the last connection may just be closing
        return found == [fds_of(pid) for pid in processes] and found
    held = wait_until(count, what="rest")
    for _ in range(2000):
        os.kill(server.pid, signal.SIGHUP)
    settings.allow(two="infer,metrics")
    os.kill(server.pid, signal.SIGHUP)
    wait_until(lambda: infer(server, "two") == 200, what="the last one")
    assert infer(server, "one") == 401
    wait_until(lambda: len(outcomes(server)) >= 2, what="a line about the last one")  # which was in force before that
    assert len(outcomes(server)) < 1000
    wait_until(lambda: count() == held, what="no more descriptors than before")


def test_at_any_time_of_a_start(make_server, settings):
    """Also while the first thing that it does is not done."""
    settings.allow(one="infer")
    for wait_ms in (0, 1, 3, 10, 30):
        server = make_server(tokens=settings.tokens, wait=False)
        # From here on the program is kld-server: before its first line the default still holds.
        wait_until(lambda: b"kld-server" in open(f"/proc/{server.pid}/cmdline", "rb").read())
        wait_until(lambda: int(re.search(r"SigBlk:\t(\w+)", open(f"/proc/{server.pid}/status").read()).group(1), 16) & 1)
        time.sleep(wait_ms / 1000)
        os.kill(server.pid, signal.SIGHUP)
        server.wait_ready()
        wait_until(lambda: outcomes(server), what="the reload")
        assert outcomes(server)[0][0] == "reloaded" and infer(server, "one") == 200
        assert server.stop() == 0


def test_while_it_ends(make_server, settings):
    settings.allow(one="infer,metrics")
    server = make_server(tokens=settings.tokens)
    worker, replies = server.child("worker"), []
    suspend(worker)
    try:
        asker = threading.Thread(target=lambda: replies.append(infer(server, "one")))
        asker.start()
        wait_until(lambda: b"kld_http_requests_in_flight 1\n" in server.request("/metrics", None, bearer("one"))[2])
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "gateway: draining" in server.log())
        for _ in range(20):
            os.kill(server.pid, signal.SIGHUP)
            time.sleep(0.005)
    finally:
        os.kill(worker, signal.SIGCONT)
    asker.join()
    assert replies == [200] and server.process.wait(30) == 0
    assert not outcomes(server)


def test_while_the_gateway_is_replaced(make_server, settings):
    settings.allow(one="infer")
    server = make_server(tokens=settings.tokens)
    for turn in range(3):
        settings.allow(**{f"next{turn}": "infer"})
        os.kill(server.child("gateway"), signal.SIGKILL)
        os.kill(server.pid, signal.SIGHUP)
        wait_until(lambda: len(outcomes(server)) > turn, 20, "an outcome")
        assert outcomes(server)[turn][0] == "reloaded"
        assert infer(server, f"next{turn}") == 200


def ask_one_that_stands_still(server):
    """A gateway that has an order to reload and does not come to it -> its pid."""
    gateway = server.child("gateway")
    suspend(gateway)
    os.kill(server.pid, signal.SIGHUP)
    wait_until(lambda: "supervisor: reloading" in server.log(), what="the signal")
    time.sleep(0.3)  # for the order to be sent; without it the test says less
    return gateway


def test_a_gateway_that_ends_while_it_is_asked(make_server, settings):
    """Its successor takes over what it was asked to."""
    settings.allow(one="infer,metrics")
    server = make_server(tokens=settings.tokens, reload_ms=60000)
    settings.allow(two="infer,metrics")
    os.kill(ask_one_that_stands_still(server), signal.SIGKILL)
    wait_until(lambda: outcomes(server), 20, "an outcome")
    assert [event for event, _ in outcomes(server)] == ["reloaded"]
    assert infer(server, "two") == 200 and infer(server, "one") == 401
    assert b"\nkld_config_reloads_failed_total 0\n" in server.request("/metrics", None, bearer("two"))[2]


def test_a_gateway_that_does_not_answer(make_server, settings):
    """It is replaced, and its successor takes over what it was asked to: no reload after it waits for ever."""
    settings.allow(one="infer")
    server = make_server(tokens=settings.tokens, reload_ms=2000)
    settings.allow(two="infer")
    gateway = ask_one_that_stands_still(server)
    wait_until(lambda: outcomes(server), 20, "an outcome")
    assert [event for event, _ in outcomes(server)] == ["reloaded"] and server.child("gateway") != gateway
    assert infer(server, "two") == 200 and infer(server, "one") == 401
    assert "reload not answered" in server.log() and reload(server)[0] == "reloaded"


def test_a_reload_that_the_end_of_the_server_overtakes(make_server, settings):
    """It is no failure that anybody should be told of."""
    settings.allow(one="infer")
    server = make_server(tokens=settings.tokens, reload_ms=60000)
    gateway = ask_one_that_stands_still(server)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "supervisor: draining" in server.log())
    os.kill(gateway, signal.SIGKILL)
    assert server.process.wait(30) == 0
    assert not outcomes(server) and "reload given up" in server.log()


@unless_late
def test_a_gateway_that_drains_has_its_own_time(make_server, settings):
    """Not the reload's: what it serves yet is served."""
    settings.allow(one="infer")
    server = make_server(tokens=settings.tokens, reload_ms=4000, drain_ms=60000)
    begin = time.monotonic()
    gateway = ask_one_that_stands_still(server)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "supervisor: draining" in server.log())
    if time.monotonic() - begin > 3.5:
        server.stop(signal.SIGKILL)
        raise Late
    wait_until(lambda: "reload given up" in server.log() or "reload not answered" in server.log(), 60)
    os.kill(gateway, signal.SIGCONT)
    assert server.process.wait(30) == 0
    assert "reload not answered" not in server.log() and "signal=9" not in server.log()


DEAD_DISK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
int open(const char *path, int flags, ...) {
    while (strstr(path, "/dead/") && access("/dev/shm/NAME", F_OK) == 0)
        sleep(1);
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0);
}
"""


@pytest.fixture
def disk(tmp_path):
    """A folder whose files nobody can open any more once disk.switch is there, and a library that makes it so."""
    if is_sanitized():
        pytest.skip("a sanitizer wants to be loaded first")
    if not shutil.which("cc") and os.environ.get("CI") != "true":
        pytest.skip("no cc")

    class Disk:
        folder, library = tmp_path / "dead", tmp_path / "dead.so"
        switch = pathlib.Path(f"/dev/shm/kld-test-dead-{os.getpid()}")
    Disk.folder.mkdir()
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", Disk.library], check=True, text=True,
                   input=DEAD_DISK.replace("NAME", Disk.switch.name))
    yield Disk
    Disk.switch.unlink(missing_ok=True)


def test_files_on_a_disk_that_does_not_answer(make_server, disk):
    """Reloads fail in time, and the one after the disk is back does not wait for them."""
    settings = Settings(disk.folder, log_level="info")
    server = make_server(config=settings.file, reload_ms=300, environment={"LD_PRELOAD": disk.library})
    disk.switch.touch()
    for _ in range(3):
        assert "not read within 300 ms" in reload(server)[1]
    assert "earlier ones still wait" in reload(server)[1]
    disk.switch.unlink()
    wait_until(lambda: reload(server)[0] == "reloaded", what="a reload")
    disk.switch.touch()
    assert "not read within 300 ms" in reload(server)[1]
    assert server.stop(seconds=20) == 0


def test_the_end_does_not_wait_for_a_dead_disk(make_server, disk):
    settings = Settings(disk.folder, log_level="info")
    server = make_server(config=settings.file, environment={"LD_PRELOAD": disk.library})
    disk.switch.touch()
    os.kill(server.pid, signal.SIGHUP)
    wait_until(lambda: "supervisor: reloading" in server.log())
    assert server.stop(seconds=20) == 0
    assert not outcomes(server) and not os.path.exists(server.unix)


def test_children_leave_it_to_the_supervisor(make_server):
    server = make_server()
    before = children_of(server.pid)
    for pid in before.values():
        os.kill(pid, signal.SIGHUP)
    assert server.json("/v2")[0] == 200
    time.sleep(0.1)
    assert children_of(server.pid) == before and not outcomes(server)


# ---- terminals ------------------------------------------------------------------------------------

def in_terminal(folder, *before):
    """A server that leads the session of a terminal -> (pid, the terminal's other end)."""
    arguments = [*before, str(BIN / "kld-server"), "--backend=cpu", "--http=", f"--unix={folder}/kld.sock"]
    with open(folder / "log", "wb") as log:
        pid, terminal = pty.fork()
        if pid == 0:
            os.dup2(log.fileno(), 2)
            os.chdir(folder)  # where nohup leaves its file
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under it
            os.execvpe(arguments[0], arguments, clean_environment())
    wait_until(lambda: "child ready" in (folder / "log").read_text(), 60, "the server")
    return pid, terminal


def ended(pid):
    done, status = os.waitpid(pid, os.WNOHANG)
    return [os.waitstatus_to_exitcode(status)] if done else None


def test_the_end_of_its_terminal_ends_it_in_order(tmp_path):
    pid, terminal = in_terminal(tmp_path)
    os.kill(pid, signal.SIGHUP)  # somebody's, while the terminal is there
    wait_until(lambda: "supervisor: reloaded" in (tmp_path / "log").read_text())
    os.close(terminal)
    assert wait_until(lambda: ended(pid), 30, "its end") == [0]
    assert "supervisor: draining signal=1" in (tmp_path / "log").read_text()
    assert not (tmp_path / "kld.sock").exists()


def test_under_nohup_it_stays_and_reloads(tmp_path):
    pid, terminal = in_terminal(tmp_path, "nohup")
    try:
        os.close(terminal)
        wait_until(lambda: "supervisor: reloaded" in (tmp_path / "log").read_text())
        os.kill(pid, signal.SIGHUP)
        wait_until(lambda: (tmp_path / "log").read_text().count("supervisor: reloaded") == 2)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(tmp_path / "kld.sock"))
        assert "draining" not in (tmp_path / "log").read_text()
    finally:
        os.kill(pid, signal.SIGTERM)
        assert wait_until(lambda: ended(pid), 30, "its end") == [0]
