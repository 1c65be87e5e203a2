"""Who may ask over HTTP, and over what: tokens and their rights and limits, TLS, client certificates."""
import contextlib
import gzip
import hashlib
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import ssl
import subprocess
import threading
import time

import pytest

import faillib
import oip
from conftest import BIN, Server, children_of, clean_environment, suspend, wait_until
from httplib import PREFIX, Flat, Late, Shared, certificates, close, is_sanitized, probabilities, register, tls_flags
from httplib import unless_late
from oip import INFER

Q, P = probabilities((2, 3), 1), probabilities((2, 3), 2)
HEADERS, DATA = oip.body({"predictions": Q, "targets": P})
WORDS = {"all": "infer,shm,metrics", "infer": "infer", "shm": "infer,shm", "metrics": "metrics"}


def bearer(name):
    return {"Authorization": f"Bearer word-of-{name}"}


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("# for the tests\n" + "".join(
        f"{name} {hashlib.sha256(f'word-of-{name}'.encode()).hexdigest()} {rights}\n"
        for name, rights in WORDS.items()))
    return str(path)


@unless_late
def test_metrics_at_the_limit_of_connections(make_server):
    """Whoever holds all connections does not blind who watches."""
    server = make_server(metrics_http="127.0.0.1:0", http_connections_max=4, http_threads=2)
    address = re.search(r"metrics have an address.* http=(\S+)", server.log()).group(1)
    host, port = server.address.rsplit(":", 1)
    idle = [socket.create_connection((host, int(port)), 60) for _ in range(8)]

    def counted():
        connection = http.client.HTTPConnection(address, timeout=20)
        connection.request("GET", "/metrics")
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        assert reply.status == 200
        return int(re.search(r"^kld_http_connections (\d+)", text, re.M).group(1))
    for _ in range(20):
        counted()
    wait_until(lambda: counted() >= 5, what="all that are taken being counted")
    metrics_host, metrics_port = address.rsplit(":", 1)
    idle += [socket.create_connection((metrics_host, int(metrics_port)), 60) for _ in range(8)]
    for _ in range(2):  # nor does who says nothing at that address: the time is that of a liveness probe
        connection = http.client.HTTPConnection(address, timeout=5)
        idle.append(connection)
        try:
            connection.request("GET", "/v2/health/live")
            assert connection.getresponse().status == 200
        except TimeoutError as late:  # each time, where it is not the machine
            raise Late from late
    for one in idle:
        one.close()


def test_blanks_behind_a_value_are_no_part_of_it(make_server, tokens):
    """But where a value says where the body ends nothing is taken that somebody might read in another way."""
    server = make_server(tokens=tokens)
    packed = gzip.compress(DATA)
    host, port = server.address.rsplit(":", 1)

    def answer(body, *lines):
        with socket.create_connection((host, int(port)), 60) as connection:
            connection.sendall("\r\n".join([f"POST {INFER} HTTP/1.1", "Connection: close", *lines, "", ""]).encode() + body)
            return int(b"".join(iter(lambda: connection.recv(65536), b"")).split()[1])

    who, known = bearer("infer")["Authorization"], f"{oip.LENGTH}: {HEADERS[oip.LENGTH]}"
    all_of_it = f"Content-Length: {len(DATA)}"
    for blanks in ("", " ", "\t", " \t  "):
        more = [f"Host: localhost{blanks}", f"Authorization: {who}{blanks}", known + blanks, f"Expect:{blanks}"]
        assert answer(DATA, *more, all_of_it) == 200, blanks
        assert answer(packed, *more, f"Content-Encoding: gzip{blanks}", f"Content-Length: {len(packed)}") == 200, blanks
        assert answer(DATA, *more, all_of_it + blanks) == (400 if blanks else 200), blanks
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(DATA), DATA)
        assert answer(chunks, *more, f"Transfer-Encoding: chunked{blanks}") == (501 if blanks else 200), blanks
    for value in (f"{who} x", f"{who}\vx", f"{who} ,", who[:-1] + " "):
        assert answer(DATA, "Host: localhost", f"Authorization: {value}", known, all_of_it) == 401, value


def test_metrics_have_an_address_of_their_own(make_server, tokens):
    """What monitoring can reach need not be where requests are sent; its rights are asked for all the same."""
    server = make_server(metrics_http="127.0.0.1:0", tokens=tokens, http_threads=2).wait_linked()
    address = re.search(r"metrics have an address.* http=(\S+)", server.log()).group(1)
    assert address != server.address

    def ask(path, token=None, method="GET", data=None, at=address):
        connection = http.client.HTTPConnection(at, timeout=60)
        connection.request(method, path, data, bearer(token) if token else {})
        reply = connection.getresponse()
        return reply.status, reply.read()
    for at in (address, server.address):
        assert ask("/metrics", at=at)[0] == 401 and ask("/metrics", "infer", at=at)[0] == 403
        status, body = ask("/metrics", "metrics", at=at)
        assert status == 200 and b"kld_requests_total" in body
        assert ask("/v2/health/live", at=at)[0] == ask("/v2/health/ready", at=at)[0] == 200
    for method, path in (("GET", "/"), ("GET", "/v2"), ("POST", INFER), ("PUT", "/v2/tensors/a"),
                         ("GET", "/v2/systemsharedmemory/status"), ("GET", "/v2/models/kl_div/ready")):
        status, body = ask(path, "all", method, DATA if method != "GET" else None)
        assert status == 404 and b"at this address" in body, (path, status, body)
    assert server.request(INFER, DATA, {**HEADERS, **bearer("all")})[0] == 200
    gateway = server.kill_child("gateway")
    wait_until(lambda: server.child("gateway") != gateway, what="another gateway")
    assert ask("/metrics", "metrics")[0] == 200


@pytest.mark.parametrize("flags, part", [
    ({"metrics_http": "0.0.0.0:0"}, "--metrics-http: 0.0.0.0:0 can be reached"),
    ({"metrics_http": "127.0.0.1"}, "--metrics-http: expected ADDR:PORT"),
    ({"metrics_http": "127.0.0.1:0", "http": ""}, "--metrics-http: there is no --http")])
def test_addresses_for_metrics_that_are_refused(flags, part):
    server = Server(wait=False, **flags)
    try:
        assert server.process.wait(30) != 0
        assert part in server.log()
    finally:
        server.remove()


# ---- Tokens ---------------------------------------------------------------------------------------

ROUTES = [("GET", "/", "metrics"), ("GET", "/metrics", "metrics"), ("GET", "/v2", ""),
          ("GET", "/v2/models/kl_div", ""), ("GET", "/v2/models/kl_div/versions/1/config", ""),
          ("GET", "/v2/models/stats", ""), ("POST", "/v2/repository/index", ""), ("POST", INFER, "infer"),
          ("POST", INFER.replace("/infer", "/versions/1/infer"), "infer"),
          ("GET", "/v2/systemsharedmemory/status", "shm"),
          ("POST", "/v2/systemsharedmemory/unregister", "shm"),
          ("GET", "/v2/cudasharedmemory/status", "shm")]


def test_each_route_wants_its_right(make_server, tokens):
    server = make_server(tokens=tokens, shm_prefix=PREFIX).wait_linked()
    for method, path, right in ROUTES:
        headers = HEADERS if method == "POST" and path.endswith("infer") else {}
        data = DATA if headers else (b"" if method == "POST" else None)
        status, reply_headers, body = server.request(path, data, headers, method)
        assert status == 401 and reply_headers["WWW-Authenticate"] == "Bearer", path
        assert "token" in json.loads(body)["error"]
        for name, rights in WORDS.items():
            expected = 200 if not right or right in rights.split(",") else 403
            status, _, body = server.request(path, data, {**headers, **bearer(name)}, method)
            assert status == expected, (path, name, body)
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert server.request(path)[0] == 200


SPELLINGS = ["//metrics", "/./metrics", "/metrics/", "/metrics?x=1", "/Metrics", "/%6detrics", "/metrics%00",
             "/metrics;x", "/v2/../metrics", "/v2/health/live/../../../metrics", "/v2/health/live/", "/v2/health//live",
             "/v2/health/live%2f..%2f..%2f..%2fmetrics", "http://x/metrics", "https://x:1/v2/models/kl_div/infer",
             "/nothing/here", "*", "//v2/models/kl_div/infer"]
METHODS = ["GET", "HEAD", "POST", "OPTIONS", "BREW"]


@pytest.mark.parametrize("path", SPELLINGS)
@pytest.mark.parametrize("method", METHODS)
def test_no_other_spelling_of_a_path_gets_past(secured, method, path):
    connection = http.client.HTTPConnection(secured.address, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", "x")
    connection.putheader("Content-Length", "0")
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


def test_what_other_spellings_leave(make_server, tokens):
    """Nothing, of 9,000 requests over 180 connections, half of which do not wait for their answers."""
    page = faillib.counting()
    server = make_server(tokens=tokens, http_threads=1, environment=page and page.environment())
    host, port = server.address.rsplit(":", 1)
    head = "Host: x\r\nContent-Length: 0\r\n"

    def ask_all(waits):
        for method in METHODS:
            for path in SPELLINGS:
                text = f"{method} {path} HTTP/1.1\r\n{head}\r\n" * 49
                with socket.create_connection((host, int(port)), 60) as connection:
                    connection.sendall(f"{text}{method} {path} HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode())
                    if waits:
                        with connection.makefile("rb") as reply:
                            assert len(re.findall(rb"HTTP/1.1 401", reply.read())) == 50, (method, path)
    for waits in (True, False):
        ask_all(waits)
    with Flat(server, 8 << 20, bearer("metrics"), page):
        for waits in (True, False):
            ask_all(waits)
    assert server.request(INFER, DATA, {**HEADERS, **bearer("all")})[0] == 200


@pytest.fixture(scope="module")
def secured(backend, tmp_path_factory):
    from conftest import SANITIZER, Server
    path = tmp_path_factory.mktemp("secured") / "tokens"
    path.write_text(f"one {hashlib.sha256(b'word').hexdigest()} infer\n")
    one = Server(backend=backend, tokens=str(path))
    yield one
    status, log = one.stop(), one.log()
    one.remove()
    assert status == 0 and not SANITIZER.search(log), log


def answer_to(address, line, *hosts):
    """(status, KLD-Status) of a request with these headers Host."""
    host, port = address.rsplit(":", 1)
    lines = "".join(f"Host:{name}\r\n" for name in hosts)
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.sendall(f"{line}\r\n{lines}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
        reply = b""
        while got := connection.recv(65536):
            reply += got
    name = re.search(rb"KLD-Status: (\w+)", reply)
    return int(reply.split()[1]), name and name.group(1).decode()


OURS = [" 127.0.0.1:8080", "127.0.0.1", " localhost", " LocalHost:1 ", " [::1]:80", " [::1]", " 10.1.2.3:8080"]
FOREIGN = [" evil.example:8080", " x", " localhost.evil.example", " 127.0.0.1.evil.example", "", " [::1", " [127.0.0.1]",
           " localhost:80:80", " localhost:a", " localhost evil", " [::1]evil", " 127.1", f" {'a' * 5000}", " *", " ,"]


def test_a_name_that_leads_here_is_not_ours(make_server):
    """A page of a browser that has its own name lead to loopback reads no answer."""
    server = make_server(shm_prefix=PREFIX, metrics_http="127.0.0.1:0").wait_linked()
    for line in ("GET /v2 HTTP/1.1", "GET /v2 HTTP/1.0", "GET /metrics HTTP/1.1"):
        assert [name for name in OURS if answer_to(server.address, line, name)[0] != 200] == [], line
        assert [name for name in FOREIGN if answer_to(server.address, line, name) != (403, "forbidden")] == [], line
    for line in (f"POST {INFER}", "PUT /v2/tensors/a?datatype=FP32&shape=1", "GET /", "GET /none", "BREW /v2",
                 "POST /v2/systemsharedmemory/region/r/register"):
        assert answer_to(server.address, f"{line} HTTP/1.1", " evil.example") == (403, "forbidden"), line
    at = re.search(r"metrics have an address.* http=(\S+)", server.log()).group(1)
    assert answer_to(at, "GET /metrics HTTP/1.1", " localhost")[0] == 200
    assert answer_to(at, "GET /metrics HTTP/1.1", " evil.example")[0] == 403
    assert answer_to(server.address, "GET /v2/health/ready HTTP/1.1", " evil.example")[0] == 200


def test_one_header_host(make_server):
    server = make_server()
    assert answer_to(server.address, "GET /v2 HTTP/1.1") == (400, "invalid")
    assert answer_to(server.address, "GET /v2 HTTP/1.1", " localhost", " localhost") == (400, "invalid")
    assert answer_to(server.address, "GET /v2 HTTP/1.0")[0] == 200


def test_at_most_one_header_authorization(make_server, tokens):
    """Whoever stands before us may go by the other one."""
    address = make_server(tokens=str(tokens)).address
    right, wrong = "Authorization: Bearer word-of-all", "AUTHORIZATION: Bearer x"
    assert answer_to(address, f"GET /v2 HTTP/1.1\r\n{right}", " localhost")[0] == 200
    for lines in ((right, wrong), (wrong, right), (right, right)):
        for path in ("/v2", "/v2/health/live"):
            assert answer_to(address, "\r\n".join((f"GET {path} HTTP/1.1", *lines)), " localhost") == (400, "invalid")


def test_names_that_the_operator_gives(make_server, tokens):
    server = make_server(http_hosts="kld.example, Proxy ,a")
    assert {answer_to(server.address, "GET /v2 HTTP/1.1", name)[0]
            for name in (" KLD.example:80", " proxy", " a", " localhost")} == {200}
    assert {answer_to(server.address, "GET /v2 HTTP/1.1", name)[0]
            for name in (" evil.example", " kld", " kld.example.", " b", "", " ,")} == {403}
    address = make_server(http_hosts="*").address
    assert answer_to(address, "GET /v2 HTTP/1.1", " evil.example")[0] == 200
    address = make_server(http="0.0.0.0:0", insecure_bind="true").address
    assert answer_to(address, "GET /v2 HTTP/1.1", " kld.default.svc")[0] == 200
    address = make_server(http="0.0.0.0:0", insecure_bind="true", http_hosts="kld.default.svc").address
    assert answer_to(address, "GET /v2 HTTP/1.1", " kld.default.svc")[0] == 200
    assert answer_to(address, "GET /v2 HTTP/1.1", " evil.example")[0] == 403
    address = make_server(tokens=str(tokens)).address
    line = "GET /v2 HTTP/1.1\r\nAuthorization: Bearer word-of-all"
    assert answer_to(address, line, " evil.example")[0] == 200


@pytest.mark.parametrize("line, headers", [
    (f"GET /{'a' * 600}", ""), (f"PUT /v2/tensors/{'a' * 600}?shape=1", "Content-Length: 4\r\n"),
    (f"POST {INFER}", f"Content-Length: {1 << 40}\r\n"), (f"POST {INFER}", "Content-Length: 4\r\nContent-Encoding: br\r\n"),
    ("BREW /v2", "")])
def test_strangers_learn_nothing_of_paths_and_limits(secured, line, headers):
    """What is wrong with a request beside is told to who has a token."""
    host, port = secured.address.rsplit(":", 1)
    statuses = []
    for token in ("", "Authorization: Bearer word\r\n"):
        with socket.create_connection((host, int(port)), 60) as connection:
            connection.sendall(f"{line} HTTP/1.1\r\nHost: localhost\r\n{headers}{token}\r\nbody".encode())
            statuses.append(connection.recv(65536).split()[1])
    assert statuses[0] == b"401" and statuses[1] in (b"404", b"405", b"413", b"415"), statuses


def test_strangers_learn_no_limit_from_health(secured):
    host, port = secured.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.sendall(f"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 40}\r\n\r\n".encode())
        reply = connection.recv(65536)
    assert b" 413 " in reply and b"body_bytes_max" not in reply


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Bearer wor", "Bearer word2", "Basic word", "word",
                                   "Bearer " + "a" * 5000, "Bearer word, Bearer x",
                                   "Bearer " + hashlib.sha256(b"word").hexdigest()])
def test_what_is_no_token(secured, value):
    assert secured.request("/v2", headers={"Authorization": value})[0] == 401
    assert secured.request("/v2", headers={"Authorization": "Bearer word"})[0] == 200


def test_regions_belong_to_who_registered_them(make_server, tokens):
    server = make_server(tokens=tokens, shm_prefix=PREFIX)
    path = "/v2/systemsharedmemory"

    def ask(name, tail, body=None):
        data = None if body is None else json.dumps(body).encode()
        return server.request(path + tail, data, bearer(name))
    with Shared(4096) as shared:
        for name, size in (("shm", 1024), ("all", 2048)):
            assert ask(name, "/region/r/register", {"key": shared.key, "byte_size": size})[0] == 200
        assert json.loads(ask("shm", "/status")[2])[0]["byte_size"] == 1024
        assert json.loads(ask("all", "/region/r/status")[2])[0]["byte_size"] == 2048
        assert ask("all", "/unregister", {})[0] == 200
        assert ask("all", "/region/r/status")[0] == 404
        assert len(json.loads(ask("shm", "/status")[2])) == 1


def asked(server, name, replies, data=DATA, headers=HEADERS):
    replies.append(server.request(INFER, data, {**headers, **bearer(name)}))


def test_limits_of_a_token(make_server, tokens):
    """429 for the one who has too much in flight; others are served."""
    server = make_server(tokens=tokens, token_requests_max=2, token_bytes_max="64K", http_threads=1)
    worker, replies, late = server.child("worker"), [], []
    asked(server, "infer", late)
    assert late.pop()[0] == 200
    suspend(worker)
    try:
        askers = [threading.Thread(target=asked, args=(server, "infer", replies)) for _ in range(2)]
        for asker in askers:
            asker.start()

        def in_flight():
            body = server.request("/metrics", None, bearer("all"))[2].decode()
            return "\nkld_http_requests_in_flight 2\n" in body
        wait_until(in_flight, what="two requests")
        asked(server, "infer", late)
        status, headers, body = late.pop()
        assert status == 429 and headers["Retry-After"] and b"token_requests_max" in body
        other = threading.Thread(target=asked, args=(server, "shm", replies))
        other.start()
    finally:
        os.kill(worker, signal.SIGCONT)
    for asker in [*askers, other]:
        asker.join()
    assert [reply[0] for reply in replies] == [200] * 3
    big = probabilities((100, 100), 3)
    headers, data = oip.body({"predictions": big, "targets": big})
    asked(server, "infer", late, data, headers)
    assert late[0][0] == 413 and b"token_bytes_max" in late[0][2]
    for _ in range(5):  # nothing of all this is still counted
        asked(server, "infer", replies)
        assert replies[-1][0] == 200


def test_tokens_open_other_addresses(make_server, tokens):
    server = make_server(http="0.0.0.0:0", tokens=tokens)
    address = "127.0.0.1:" + server.address.rsplit(":", 1)[1]
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", "/v2", headers=bearer("infer"))
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize("text, part", [
    ("", "no tokens"), ("a word-of-a infer\n", "line 1"), (None, "cannot be opened")])
def test_a_bad_file_of_tokens_is_told_without_its_text(make_server, tmp_path, text, part):
    path = tmp_path / "private-tokens"
    if text is not None:
        path.write_text(text)
    server = make_server(tokens=str(path), wait=False)
    assert server.process.wait(60) == 1
    assert part in server.log() and "word-of" not in server.log()


def test_secrets_are_never_logged(make_server, tokens, certificates):
    server = make_server(tokens=tokens, log_level="debug", **tls_flags(certificates))
    context = ssl.create_default_context(cafile=certificates / "ca.crt")
    for headers in (bearer("all"), {"Authorization": "Bearer word-of-nobody"}, {"Authorization": "Basic x"}):
        assert ask_tls(server, context, headers)[0] in (200, 401)
    log = server.log()
    assert "word-of" not in log and "PRIVATE" not in log
    assert hashlib.sha256(b"word-of-all").hexdigest() not in log


# ---- TLS ------------------------------------------------------------------------------------------

def ask_tls(server, context, headers=HEADERS, data=None, path="/v2"):
    connection = http.client.HTTPSConnection(server.address, timeout=60, context=context)
    try:
        connection.request("POST" if data else "GET", path, data, headers)
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()
    finally:
        connection.close()


def test_tls(make_server, certificates):
    """Small and large, kept alive, and a client that speaks no TLS."""
    server = make_server(**tls_flags(certificates))
    context = ssl.create_default_context(cafile=certificates / "ca.crt")
    q, p = probabilities((300, 5000), 5), probabilities((300, 5000), 6)
    headers, data = oip.body({"predictions": q, "targets": p},
                             {"loss": None, "grad_predictions": {"binary_data": True}})
    connection = http.client.HTTPSConnection(server.address, timeout=60, context=context)
    for _ in range(3):
        connection.request("POST", INFER, data, headers)
        reply = connection.getresponse()
        body = reply.read()
        assert reply.status == 200, body
        got, truth = oip.parse(reply.headers, body)[1], oip.expected(q, p)
        close(got["loss"], truth["loss"], "FP32")
        close(got["grad_predictions"], truth["grad_predictions"], "FP32")
    assert connection.sock.version() in ("TLSv1.2", "TLSv1.3")
    connection.close()
    plain = http.client.HTTPConnection(server.address, timeout=60)
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.request("GET", "/v2")
        plain.getresponse()
    plain.close()
    assert ask_tls(server, context)[0] == 200
    assert f"curl -s https://{server.address}/v2".encode() in ask_tls(server, context, path="/")[2]
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(certificates / "ca.crt")
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError):
        ask_tls(server, old)


def test_memory_of_a_session_that_has_ended_is_left_alone(make_server, certificates):
    """By the time its connection is reported closed: here what is freed is overwritten at once."""
    server = make_server(environment={"MALLOC_PERTURB_": "165"}, **tls_flags(certificates))
    context = ssl.create_default_context(cafile=certificates / "ca.crt")
    gateway = server.child("gateway")
    for _ in range(20):
        assert ask_tls(server, context)[0] == 200
    assert server.child("gateway") == gateway, "it is still the first"


def test_handshakes_that_stall(make_server, certificates):
    """Each costs the others a moment of each turn, and not for longer than a message may take."""
    server = make_server(http_slow_ms=2000, http_threads=1, **tls_flags(certificates))
    context = ssl.create_default_context(cafile=certificates / "ca.crt")
    host, port = server.address.rsplit(":", 1)
    gateway, stalled = server.child("gateway"), []

    def spent():
        return sum(map(int, pathlib.Path(f"/proc/{gateway}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
    for part in [b"\x16", bytes.fromhex("160301020001000001")] * 40:
        stalled.append(socket.create_connection((host, int(port)), 20))
        stalled[-1].sendall(part)
    begin = spent()
    headers, data = oip.body({"predictions": Q, "targets": Q})
    for _ in range(10):
        assert ask_tls(server, context, headers, data, INFER)[0] == 200
        time.sleep(0.1)
    if not is_sanitized():
        assert spent() - begin < 0.5 * os.sysconf("SC_CLK_TCK")  # of more than a second
    for one in stalled:
        while one.recv(1000):  # an alert, if anything, and the end
            pass
        one.close()
    assert ask_tls(server, context, headers, data, INFER)[0] == 200


def test_tls_by_the_kld_tool_and_curl(make_server, certificates, cli, tokens):
    server = make_server(tokens=tokens, **tls_flags(certificates))
    url = f"https://localhost:{server.address.rsplit(':', 1)[1]}"
    secret = certificates / "token"
    secret.write_text("word-of-all\n")
    done = cli("ping", "--server", url, "--ca-file", certificates / "ca.crt", "--token-file", secret)
    assert done.returncode == 0, done.stderr
    assert cli("ping", "--server", url).returncode != 0  # not a CA of the system
    reply = subprocess.run(["curl", "-sS", "--cacert", certificates / "ca.crt", "-H",
                            "Authorization: Bearer word-of-all", url + "/v2"], capture_output=True, check=True)
    assert json.loads(reply.stdout)["name"] == "kld"
    assert subprocess.run(["curl", "-sS", url + "/v2"], capture_output=True).returncode == 60


def test_client_certificates(make_server, certificates):
    server = make_server(**tls_flags(certificates, tls_client_ca=certificates / "ca.crt"))
    context = ssl.create_default_context(cafile=certificates / "ca.crt")
    status, _, body = ask_tls(server, context)
    assert status == 401 and "certificate" in json.loads(body)["error"]
    assert ask_tls(server, context, path="/v2/health/live")[0] == 401
    assert ask_tls(server, context, HEADERS, DATA, INFER)[0] == 401
    for name, expected in (("other", 401), ("server", 401), ("client", 200)):  # server.crt: not for clients
        context = ssl.create_default_context(cafile=certificates / "ca.crt")
        context.load_cert_chain(certificates / f"{name}.crt", certificates / f"{name}.key")
        assert ask_tls(server, context)[0] == expected, name


def test_client_certificates_by_the_kld_tool(make_server, certificates, cli, tmp_path):
    server = make_server(**tls_flags(certificates, tls_client_ca=certificates / "ca.crt"))
    url = f"https://localhost:{server.address.rsplit(':', 1)[1]}"
    (tmp_path / "both").write_text("".join((certificates / f"client.{kind}").read_text() for kind in ("crt", "key")))
    subprocess.run(["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", certificates / "client.key", "-out",
                    tmp_path / "locked"], check=True, capture_output=True)

    def ping(cert=None, key=None, command="ping"):
        files = [("--cert-file", cert), ("--key-file", key)]
        return cli(command, "--server", url, "--ca-file", certificates / "ca.crt",
                   *(part for option, file in files if file for part in (option, file)))
    for good in ((certificates / "client.crt", certificates / "client.key"), (tmp_path / "both",)):
        assert ping(*good).returncode == 0
        assert ping(*good, command="status").returncode == 0
    for bad, said, advice in (
            ((), "none was shown", "--cert-file FILE --key-file FILE"),
            ((certificates / "other.crt", certificates / "other.key"), "not accepted by this server", "--cert-file FILE"),
            ((tmp_path / "none", certificates / "client.key"), f"--cert-file {tmp_path}/none: No such file", ""),
            ((certificates / "client.crt", tmp_path / "none"), f"--key-file {tmp_path}/none: No such file", ""),
            ((None, certificates / "client.key"), "--key-file without --cert-file", ""),
            ((certificates / "client.crt", certificates / "other.key"), "not a PEM certificate and its key", ""),
            ((certificates / "client.key",), f"cert_file {certificates}/client.key: not a PEM"[:60], ""),
            ((certificates / "client.crt", tmp_path / "locked"), "without a passphrase", "")):
        done = ping(*bad)
        assert done.returncode == (3 if advice else 2), done
        assert said in done.stderr and advice in done.stderr, done.stderr


@pytest.mark.parametrize("flags, part", [
    ({"tls_cert": "server.crt"}, "go together"), ({"tls_key": "server.key"}, "go together"),
    ({"tls_client_ca": "ca.crt"}, "go together"),
    ({"tls_cert": "server.crt", "tls_key": "other.key"}, "tls_cert, tls_key"),
    ({"tls_cert": "none.crt", "tls_key": "server.key"}, "cannot be opened"),
    ({"tls_cert": "server.key", "tls_key": "server.key"}, "tls_cert, tls_key"),
    ({"tls_cert": "server.crt", "tls_key": "server.key", "tls_client_ca": "ca.key"}, "tls_client_ca")])
def test_certificates_that_do_not_fit(make_server, certificates, flags, part):
    server = make_server(wait=False, **{name: certificates / file for name, file in flags.items()})
    assert server.process.wait(60) == (2 if part == "go together" else 1)  # a file may be another the next time
    assert part in server.log() and "PRIVATE" not in server.log()


def test_help_names_what_there_is():
    text = subprocess.run([str(BIN / "kld-server"), "--help"], capture_output=True, text=True,
                          env=clean_environment()).stdout
    for flag in ("--tls-cert", "--tls-key", "--tls-client-ca", "--tokens", "--token-requests-max"):
        assert flag in text


def test_register_needs_a_known_caller(make_server, tokens):
    server = make_server(tokens=tokens, shm_prefix=PREFIX)
    with Shared(4096) as shared:
        assert register(server, "r", shared, 64)[0] == 401


# ---- The sandbox ----------------------------------------------------------------------------------

def target_of(descriptor):
    """"" once it is closed: a connection that was just coming to its end."""
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(descriptor)
    return ""


def status_of(pid):
    return dict(line.split(":\t", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
                if ":\t" in line)


@pytest.mark.skipif(is_sanitized(), reason="a sanitizer's run-time needs more than the sandbox allows")
def test_the_gateway_runs_in_a_sandbox(make_server):
    """Every test of this suite does; the threads as well."""
    server = make_server()
    gateway = server.child("gateway")
    for thread in pathlib.Path(f"/proc/{gateway}/task").iterdir():
        status = status_of(f"{gateway}/task/{thread.name}")
        assert status["Seccomp"] == "2" and status["NoNewPrivs"] == "1", thread
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    assert not [name for name in os.listdir(f"/proc/{gateway}/fd")
                if "nvidia" in target_of(f"/proc/{gateway}/fd/{name}")]


def memfds_of(pid, name):
    """[(number, whether it can be written)] of this process."""
    found = []
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        if target_of(entry).startswith(f"/memfd:{name}"):
            flags = re.search(r"^flags:\s*(\d+)", pathlib.Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text(), re.M)
            found.append((entry, int(flags[1], 8) & os.O_ACCMODE == os.O_RDWR))
    return found


@pytest.mark.parametrize("pattern", [b"\xff", bytes(range(1, 252))], ids=["ones", "anything"])
def test_counters_lead_nobody(make_server, cli, pattern):
    """All that the gateway may write of the page is overwritten; those that come after it serve."""
    server = make_server(threads=1, http_threads=1, staging_request_bytes_max="1M")
    gateway, worker = server.child("gateway"), server.child("worker")
    [(state, writes)] = memfds_of(gateway, "kld-state")
    assert not writes and memfds_of(worker, "kld-state")[0][1]
    for line in pathlib.Path(f"/proc/{gateway}/maps").read_text().splitlines():
        assert "kld-state" not in line or line.split()[1] == "r--s", line
    for entry, writes in memfds_of(gateway, "kld-stat"):
        if writes:
            with open(entry, "r+b", buffering=0) as page:
                size = os.fstat(page.fileno()).st_size
                page.write((pattern * (size // len(pattern) + 1))[:size])
    server.kill_child("worker")
    server.kill_child("gateway")
    wait_until(lambda: len(children_of(server.pid)) == 2)
    wait_until(lambda: server.request("/v2/health/ready")[0] == 200)
    oip.infer(server, {"predictions": Q, "targets": P})
    large = probabilities((1024, 1024), 1)
    oip.infer(server, {"predictions": large, "targets": large})  # through a buffer in the device's pool
    assert cli("ping", "--count", "1", "--server", server.url_unix).returncode == 0
    assert server.request("/metrics")[0] == 200 and server.request("/")[0] == 200
    assert server.log().count("child died") == 2


def test_without_the_sandbox_if_told(make_server):
    server = make_server(sandbox="false")
    assert status_of(server.child("gateway"))["Seccomp"] == status_of("self")["Seccomp"]
    assert "no sandbox" in server.log()
    assert server.request("/v2")[0] == 200
