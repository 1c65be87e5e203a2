"""libkld over a real server that is killed, restarted and late; what the library exports; its
examples."""
import http.server
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import threading
import time

import numpy as np
import pytest

from conftest import BIN, ROOT, START_SECONDS, clean_environment, sanitizer, suspend, wait_until
from httplib import Late, unless_late

KLD = str(BIN / "kld")


def start(*arguments):
    return subprocess.Popen([KLD, *map(str, arguments)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=clean_environment())


def finish(process, code=0):
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, (process.returncode, out, err)
    return out


@pytest.mark.parametrize("way", ["unix", "http"])
def test_every_request_is_answered_rightly_while_workers_are_killed(make_server, way):
    server = make_server()
    url = server.url_unix if way == "unix" else server.http
    quiet = json.loads(finish(start("bench", "--shape", "64x2048", "--grad", "--check", "--seconds",
                                    0.3, "--json", "--server", url)))
    reports, killed = [], []

    def begin():
        return start("bench", "--shape", "64x2048", "--grad", "--check", "--in-flight", 50, "--seconds", 5, "--json",
                     "--server", url)

    benches = [begin() for _ in range(4)]

    def has_work():
        """Four all the time: how long a GPU's worker takes to end, and the next one to start, is the driver's to say."""
        for i, bench in enumerate(benches):
            if bench.poll() is not None:
                reports.append(json.loads(finish(bench)))
                benches[i] = begin()
        return server.metrics()[gauge] >= least

    # Over HTTP the worker may be through whenever the gateway has the time to say so.
    gauge = {"unix": 'kld_worker_requests_in_flight{worker="0"}', "http": "kld_http_requests_in_flight"}[way]
    least = {"unix": 1, "http": 2}[way]  # /metrics itself is one
    while len(killed) < 3:
        time.sleep(0.4)
        wait_until(has_work, START_SECONDS, "work in flight")
        killed.append(server.kill_child("worker"))
    reports += [json.loads(finish(bench)) for bench in benches]
    assert len(set(killed)) == 3
    for report in reports:
        assert report["losses"] >= 50  # each of those in flight, at the least
        assert report["failed"] == 0 and report["different"] == 0
        assert report["loss"] == quiet["loss"]
    if way == "unix":  # over HTTP it is the gateway that sends again
        assert any(report["repeated"] > 0 for report in reports)


@unless_late
def test_a_restarted_server_is_found_again(make_server):
    server = make_server()
    bench = start("bench", "--shape", "64x512", "--grad", "--check", "--in-flight", 8, "--seconds", 3,
                  "--json", "--server", server.url_unix)
    answered = 'kld_requests_total{front="unix",worker="0",status="ok"}'
    wait_until(lambda: server.metrics()[answered] > 200 or bench.poll() is not None, what="its work")
    if bench.poll() is not None:
        raise Late(finish(bench))
    server.process.kill()  # all of it
    server.process.wait()
    server.process.stdout.close()
    time.sleep(0.3)
    server.start()
    report = json.loads(finish(bench))
    assert report["failed"] == 0 and report["different"] == 0 and report["losses"] > 100


def test_waits_for_a_server_that_is_late(make_server):
    server = make_server(wait=False)
    suspend(server.pid)
    pings = [start("ping", "--server", "unix:" + server.flags["unix"])]
    time.sleep(0.5)
    os.kill(server.pid, signal.SIGCONT)
    server.wait_ready()
    pings.append(start("ping", "--server", server.http))
    for ping in pings:
        assert len(finish(ping).splitlines()) == 3


def test_nothing_stays_behind_in_the_worker(make_server):
    server = make_server().wait_linked()  # the gateway is a client as well

    def status():
        return json.loads(finish(start("status", "--json", "--server", server.url_unix)))

    before = status()
    for _ in range(3):
        finish(start("bench", "--shape", "32x100", "--grad", "--in-flight", 16, "--seconds", 0.1,
                     "--server", server.url_unix))
    killed = start("bench", "--shape", "32x100", "--grad", "--in-flight", 16, "--seconds", 30,
                   "--server", server.url_unix)
    wait_until(lambda: status()["clients"] > before["clients"], what="the client")
    killed.kill()
    killed.communicate()
    for key in ("clients", "regions", "region_bytes", "in_flight"):
        wait_until(lambda: status()[key] == before[key], what=f"{key} as before")


def test_busy_is_told_and_deadlines_are_kept(make_server, tmp_path):
    server = make_server(client_requests_max=4)
    done = start("bench", "--shape", "256x20000", "--in-flight", 5, "--seconds", 0.2, "--json",
                 "--server", server.url_unix)
    report = json.loads(finish(done, code=1))
    assert report["failed"] == 1 and report["losses"] > 0
    rows = np.full((2000, 5000), 1 / 5000, np.float32)
    np.save(tmp_path / "q.npy", rows)
    for url in (server.url_unix, server.http, "local:cpu"):
        late = start("div", tmp_path / "q.npy", tmp_path / "q.npy", "--timeout", 0.0005 if
                     url == "local:cpu" else 0.002, "--server", url)
        out, err = late.communicate(timeout=60)
        assert late.returncode == 3 and out == "", (url, late.returncode, out, err)
        finish(start("div", tmp_path / "q.npy", tmp_path / "q.npy", "--server", url))


def test_library_exports_its_headers_and_nothing_else():
    library = BIN / "libkld.so" if (BIN / "libkld.so").exists() else BIN.parent / "lib/libkld.so"
    names = subprocess.run(["nm", "-D", "--defined-only", library], check=True,
                           capture_output=True, text=True).stdout.split("\n")
    exported = {line.split()[-1] for line in names if line}
    exported = {name for name in exported if not name.startswith(("__asan", "__ubsan", "__tsan"))}
    include = ROOT / "include/kld"  # the unpacked tarball
    paths = (include.rglob("*.h") if include.exists() else
             (ROOT / name for name in ("client/kld.h", "proto/op.h", "proto/status.h")))
    headers = "".join(path.read_text() for path in paths)
    exported -= {"kld_backends", "kld_backends_release", "kld_backend_find"}  # for the server alone
    unknown = {name for name in exported if f"{name}(" not in headers}
    assert not unknown
    for name in ("kld_connect", "kld_run", "kld_submit", "kld_op_init", "kld_op_check",
                 "kld_status_text", "kld_version"):
        assert name in exported
    assert "kld_op_init(" in headers


UNLOADS = r"""
#include <dirent.h>
#include <dlfcn.h>
#include <kld/kld.h>
#include <netdb.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

static atomic_int asked, may_return;

/* A name server that answers once the library is no longer used. */
int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **ret) {
    atomic_store(&asked, 1);
    while (!atomic_load(&may_return))
        usleep(1000);
    return EAI_AGAIN;
}

static int threads(void) {
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *entry; (entry = readdir(tasks));)
        count += entry->d_name[0] != '.';
    closedir(tasks);
    return count;
}

int main(int argc, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    __typeof__(&kld_connect) connect_to = (__typeof__(&kld_connect))dlsym(library, "kld_connect");
    struct kld_connect_options options = {.connect_timeout_ns = 200000000};
    struct kld_connection *connection;
    int status = connect_to("http://slow.invalid:1", &options, &connection, NULL);
    dlclose(library);
    atomic_store(&may_return, 1);
    for (int i = 0; i < 30000 && threads() > 1; i++)
        usleep(1000);
    printf("status %d, asked %d, threads %d\n", status, atomic_load(&asked), threads());
}
"""


@pytest.mark.skipif(sanitizer() is not None, reason="a sanitizer wants to be loaded first")
def test_whoever_unloads_the_library_goes_on(tmp_path):
    """A thread of libcurl's that asks for a name's address may be on its way when its connection has gone."""
    library = BIN / "libkld.so" if (BIN / "libkld.so").exists() else BIN.parent / "lib/libkld.so"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("needs a compiler")
    headers = [f"-I{path}" for path in (ROOT, ROOT / "client/include", BIN.parent / "include") if path.exists()]
    # What the program exports comes before libc's.
    subprocess.run([compiler, *headers, "-rdynamic", "-pthread", "-x", "c", "-", "-o", tmp_path / "unloads", "-ldl"],
                   check=True, text=True, input=UNLOADS)
    done = subprocess.run([tmp_path / "unloads", library], capture_output=True, text=True, timeout=120,
                          env=clean_environment())
    assert done.returncode == 0, done
    status = re.fullmatch(r"status (\d+), asked 1, threads 1\n", done.stdout)
    assert status and status[1] != "0", done


@pytest.mark.parametrize("example", ["sync", "async"])
def test_examples(make_server, example):
    program = BIN / "examples" / example
    if not program.exists():
        program = BIN.parent / "libexec" / example  # the unpacked tarball
    if not program.exists():
        pytest.skip("examples are not built: make examples")
    server = make_server()
    losses = set()
    for url in (server.url_unix, server.http, "local:" + server.backend):
        done = subprocess.run([program, url], capture_output=True, text=True, timeout=60,
                              env=clean_environment())
        assert done.returncode == 0, done.stderr
        lines = sorted(done.stdout.splitlines())
        assert len(lines) == (1 if example == "sync" else 8)
        losses.add(tuple(line.split("loss ")[1].split()[0] for line in lines))
    assert len(losses) == 1
    assert subprocess.run([program, "ftp://x"], capture_output=True).returncode == 1


def example_program(name):
    program = BIN / "examples" / name
    if not program.exists():
        program = BIN.parent / "libexec" / name  # the unpacked tarball
    if not program.exists():
        pytest.skip("examples are not built: make examples")
    return program


def shared_logits(seed):
    """What fill() of client/examples/share.c makes."""
    values = np.empty(64 * 1000)
    for i in range(values.size):
        seed = (seed * 1664525 + 1013904223) & 0xFFFFFFFF
        values[i] = (seed >> 8) * 2.0 ** -22
    return values.reshape(64, 1000)


def shared_losses(temperature):
    def log_softmax(z):
        z = z - z.max(axis=1, keepdims=True)
        return z - np.log(np.exp(z).sum(axis=1, keepdims=True))

    def loss(t):
        q, p = log_softmax(shared_logits(2) / t), log_softmax(shared_logits(1) / t)
        return (np.exp(p) * (p - q)).sum() / 64
    return {f"{temperature * i:g}": loss(temperature * i) for i in (1, 2, 3)}


def check_students(said, *temperatures):
    expected = {}
    for temperature in temperatures:
        expected.update(shared_losses(temperature))
    found = dict(re.findall(r"student: temperature (\S+): loss (\S+)", said))
    assert found.keys() == expected.keys(), said
    for temperature, loss in found.items():
        assert float(loss) == pytest.approx(expected[temperature], rel=1e-6)


def test_teacher_and_students_share_one_tensor(make_server):
    program, server = example_program("share"), make_server(http="")
    said = subprocess.run([program, server.url_unix], capture_output=True, text=True, timeout=120,
                          env=clean_environment(), check=True).stdout
    assert said.count("teacher: published example/logits") == 1
    check_students(said, 1, 2.5)


def test_a_teacher_publishes_again_when_the_worker_was_replaced(make_server):
    program, server = example_program("share"), make_server(http="")

    def student():
        done = subprocess.run([program, "student", server.url_unix, "1"], capture_output=True,
                              text=True, timeout=60, env=clean_environment())
        assert done.returncode == 0, done.stderr
        check_students(done.stdout, 1)

    with subprocess.Popen([program, "teacher", server.url_unix], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, env=clean_environment()) as teacher:
        assert b"published" in teacher.stdout.readline()
        for _ in range(3):
            student()
            server.kill_child("worker")
        student()
        second = subprocess.run([program, "teacher", server.url_unix], capture_output=True,
                                text=True, stdin=subprocess.DEVNULL, env=clean_environment())
        assert second.returncode == 1 and "publishes a tensor of that name already" in second.stderr
        teacher.stdin.close()
        assert teacher.wait(30) == 0
    late = subprocess.Popen([program, "student", server.url_unix, "1"], stdout=subprocess.PIPE,
                            env=clean_environment(), text=True)  # waits for the next teacher
    time.sleep(0.3)
    with subprocess.Popen([program, "teacher", server.url_unix], stdin=subprocess.PIPE,
                          stdout=subprocess.DEVNULL, env=clean_environment()) as teacher:
        check_students(late.communicate(timeout=60)[0], 1)
        teacher.stdin.close()


class Gate(http.server.BaseHTTPRequestHandler):
    """Says yes to whoever has the token."""

    def do_GET(self):
        good = self.headers["Authorization"] == "Bearer opensesame"
        body = b"{}" if good else b'{"error":"a token is needed"}'
        self.send_response(200 if good else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_tls_and_tokens(tmp_path):
    key, certificate, token = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "token"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                    "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out",
                    certificate], check=True, capture_output=True)
    token.write_text("opensesame\n")
    gate = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    gate.socket = context.wrap_socket(gate.socket, server_side=True)
    thread = threading.Thread(target=gate.serve_forever)
    thread.start()
    try:
        common = ("ping", "--server", f"https://127.0.0.1:{gate.server_address[1]}")
        assert len(finish(start(*common, "--ca-file", certificate, "--token-file",
                                token)).splitlines()) == 3
        for arguments, said in ((["--ca-file", certificate], "a token is needed"),
                                (["--token-file", token], "certificate"),
                                (["--token-file", tmp_path / "none"], "none: No such file")):
            refused = start(*common, *arguments)
            _, err = refused.communicate(timeout=60)
            assert refused.returncode in (2, 3) and said in err
    finally:
        gate.shutdown()
        thread.join()
        gate.server_close()
