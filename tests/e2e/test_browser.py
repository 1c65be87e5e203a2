"""The status page in a browser: what a person sees at `/`, and that it shows nothing of what clients sent."""
import hashlib
import html.parser
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time

import pytest

import oip
from conftest import BIN, children_of, suspend, wait_until
from httplib import PREFIX, Shared, probabilities, register, unregister
from oip import INFER

CHROMIUM = shutil.which("chromium")


class Page(html.parser.HTMLParser):
    """The rows of all tables as lists of texts, and all text."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag == "table":
            self.rows.append([])

    def handle_data(self, data):
        self.text += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    def row(self, name):
        return next([cell.strip() for cell in row] for row in self.rows if row and name in row[0])


def browse(url, folder):
    """What the page is once a browser has read it."""
    if not CHROMIUM:
        assert os.environ.get("CI") != "true", "no chromium (Debian: chromium)"
        pytest.skip("no chromium")
    result = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                             f"--user-data-dir={folder}", "--virtual-time-budget=2000", "--enable-logging=stderr",
                             "--dump-dom", url], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "CONSOLE" not in result.stderr, result.stderr  # nothing that the page asks for is refused
    return result.stdout


def test_what_a_person_sees(make_server, tmp_path):
    server = make_server(http_threads=2)
    q = probabilities((2, 8), 1)
    asked = time.monotonic()
    for _ in range(30):
        oip.infer(server, {"predictions": q, "targets": q})
    secret = "s3cret-of-a-client"
    headers, data = oip.body({"predictions": q, "targets": q}, parameters={secret: 1})
    assert server.request(INFER, data, headers)[0] == 400
    assert server.request(INFER, b'{"inputs":[{"name":"' + b"a'<script>alert(1)</script>" + secret.encode() +
                          b'"}]}')[0] == 400
    assert server.request("/v2/models/" + secret)[0] == 404
    assert server.request("/v2/tensors/" + secret)[0] == 404
    time.sleep(1.1)  # the rate is of whole seconds
    page = Page(browse(server.http + "/", tmp_path))
    took = time.monotonic() - asked
    assert "ready" in page.text and "cpu" in page.text and "kld" in page.text
    rates = [float(page.row(f"requests a second, last {span}")[1]) for span in ("10 s", "minute")]
    if took < 9:  # the browser was quick enough to see all 32 of the last ten seconds
        assert rates[0] >= 3
    if took < 59:
        assert 0.5 <= rates[1] <= 0.6
    assert int(page.row("requests answered")[1]) == 30
    assert page.row("99 % of requests")[1].endswith("ms")
    assert int(page.row("shared-memory regions")[1]) == 0
    errors = page.rows[next(i for i, row in enumerate(page.rows) if row and row[0].strip() == "s ago") + 1:][:4]
    assert [row[1].strip() for row in errors] == ["404", "404", "400", "400"], errors
    assert "no tensor of this name" in errors[0][2] and "unknown input '...'" in errors[2][2], errors
    assert "unknown parameter '...'" in errors[3][2], errors
    assert secret not in page.text and "script" not in page.text and "alert" not in page.text


def test_regions_and_tensors_are_counted(make_server, tmp_path):
    server = make_server(shm_prefix=PREFIX)
    q = probabilities((2, 8), 1)
    with Shared(4096) as shared:
        assert [register(server, name, shared, 1024)[0] for name in "abc"] == [200] * 3
        assert server.heard("/v2/tensors/t?datatype=FP32&shape=2,8", q.tobytes(), method="PUT")[0] == 200
        page = Page(browse(server.http + "/", tmp_path))
        assert page.row("shared-memory regions")[1] == "3" and page.row("stored tensors")[1] == "1"
        assert unregister(server, "b") == 200
        page = seen(server)
        assert page.row("shared-memory regions")[1] == "2"
        assert shared.key not in page.text


def test_it_says_how_to_ask_it(make_server, tmp_path):
    """By the name that the browser has for it, if that is one: nothing else comes back. The command works
    as it stands there."""
    server = make_server(http_hosts="*")
    commands = re.findall(r"curl -s .*?'\{.*?\}'", Page(browse(server.http + "/", tmp_path)).text, re.S)
    assert len(commands) == 1 and f"curl -s {server.http}/v2/" in commands[0]
    reply = subprocess.run(["sh", "-c", commands[0]], capture_output=True, text=True, timeout=60).stdout
    assert json.loads(reply)["outputs"][0]["data"][0] > 0
    for host, shown in (("kld.example:8080", "http://kld.example:8080/v2"), ("[::1]:80", "http://[::1]:80/v2"),
                        *((odd, "http://THIS-SERVER/v2") for odd in ("a<b>", "a'b", 'a"b', "a;b", "a$(b)", "a&amp;b"))):
        status, _, body = server.request("/", headers={"Host": host})
        assert status == 200 and shown in Page(body.decode()).text, (host, body)


def test_rates_are_rounded(make_server):
    for rate in (seen(make_server()).row(f"requests a second, last {span}")[1] for span in ("10 s", "minute")):
        assert rate == "0.00"


def seen(server):
    """The page as it is sent."""
    status, _, body = server.request("/")
    assert status == 200
    return Page(body.decode())


def health(server):
    """What is said of it: to orchestrators (live, ready), to a person, to clients."""
    state = re.search(r"It is\s+(.+?)\s*\.", seen(server).text)[1]
    return (server.request("/v2/health/live")[0], server.request("/v2/health/ready")[0], state,
            server.json("/v2/repository/index", {})[1][0]["state"])


def test_what_it_says_of_health(make_server):
    """The page says what orchestrators are told; a lost worker or a server that is to end is no reason to restart it."""
    server = make_server(http_threads=1).wait_linked()  # each is a client of the worker
    assert health(server) == (200, 200, "ready", "READY")

    def is_lost():  # for longer and longer, the more workers have died
        worker = children_of(server.pid).get("worker")
        if worker:
            os.kill(worker, signal.SIGKILL)
        said = health(server)
        assert said[0] == 200
        return said == (200, 503, "waiting for a worker", "UNAVAILABLE") and seen(server).row(f"0: {server.backend}")[1] == "starting"
    wait_until(is_lost, 60, "the loss")
    wait_until(lambda: server.request("/v2/health/ready")[0] == 200, 60, "the next worker")
    assert health(server) == (200, 200, "ready", "READY")
    row = seen(server).row(f"0: {server.backend}")
    assert row[1:4] == ["ready", "1", "0"] and int(row[4]) >= 1, row
    worker, gateway = server.child("worker"), server.child("gateway")
    suspend(worker)
    headers, data = oip.body({name: probabilities((2, 8), 1) for name in ("predictions", "targets")})
    asker = threading.Thread(target=server.request, args=(INFER, data, headers))
    asker.start()
    try:
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1, what="the request")
        os.kill(gateway, signal.SIGTERM)
        wait_until(lambda: server.request("/v2/health/ready")[0] == 503, what="the end to begin")
        assert health(server) == (200, 503, "shutting down", "UNAVAILABLE")
    finally:
        os.kill(worker, signal.SIGCONT)
        asker.join()


def test_what_it_says_of_a_worker_that_hears_nobody(make_server):
    """It is ready by its own word, and the gateway, which is new, has none."""
    server = make_server(http_threads=1).wait_linked()
    worker, gateway = server.child("worker"), server.child("gateway")
    suspend(worker)
    try:
        os.kill(gateway, signal.SIGKILL)
        wait_until(lambda: children_of(server.pid).get("gateway", gateway) != gateway, 20, "the next gateway")
        wait_until(lambda: health(server) == (200, 503, "waiting for a worker", "UNAVAILABLE"), what="one voice")
        said = subprocess.run([BIN / "kld", "status", "--server", server.http], capture_output=True, text=True)
        assert said.returncode == 3 and "waiting for a worker" in said.stdout, said
    finally:
        os.kill(worker, signal.SIGCONT)


def test_the_page_needs_the_right_to_metrics(make_server, tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"one {hashlib.sha256(b'word').hexdigest()} infer\n"
                    f"two {hashlib.sha256(b'other').hexdigest()} metrics\n")
    server = make_server(tokens=str(path))
    for token, status in (("word", 403), ("other", 200), ("none", 401)):
        assert server.request("/", headers={"Authorization": f"Bearer {token}"})[0] == status
    body = server.request("/", headers={"Authorization": "Bearer other"})[2].decode()
    assert "word" not in body and "one" not in [cell for row in Page(body).rows for cell in row]
