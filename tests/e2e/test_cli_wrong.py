"""What the kld tool makes of wrong use, odd files, and servers that are hostile, hidden behind others, or not ready."""
import http.server
import hashlib
import json
import os
import resource
import shutil
import subprocess
import threading

import numpy as np
import pytest

from conftest import BIN, clean_environment
from httplib import certificates, is_sanitized, probabilities, tls_flags
from test_cli import kld, save_safetensors


@pytest.fixture
def pair(tmp_path):
    """Two files of probabilities."""
    for number, name in enumerate(("q.npy", "p.npy")):
        np.save(tmp_path / name, probabilities((33, 257), number))
    return tmp_path / "q.npy", tmp_path / "p.npy"


@pytest.mark.parametrize("more", [(), ("--row-loss", "r.npy"), ("--reduction", "row", "--loss", "r.npy")])
@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_a_single_number_is_no_tensor(tmp_path, more, kind):
    name = tmp_path / f"s.{kind}"
    if kind == "npy":
        np.save(name, np.float32(0.5))
    else:
        save_safetensors(name, x=("F32", np.float32(0.5).reshape(())))
        name = f"{name}:x"
    done = kld("div", name, name, *(tmp_path / text if text == "r.npy" else text for text in more), code=2)
    assert "a single number; expected a tensor of rank 1 to 8" in done.stderr
    assert not (tmp_path / "r.npy").exists()


@pytest.mark.parametrize("first, second", [("loss", "grad-predictions"), ("grad-predictions", "grad-targets")])
def test_two_results_in_one_file(tmp_path, pair, first, second):
    done = kld("div", *pair, f"--{first}", tmp_path / "r.npy", f"--{second}", tmp_path / "r.npy", code=2)
    assert "is to hold two results" in done.stderr and not (tmp_path / "r.npy").exists()


@pytest.mark.parametrize("arguments", [("ping", "--timeout", "0"), ("ping", "--timeout", "-1"), ("ping", "--timeout", "1e10"),
                                       ("ping", "--timeout", "9e-10"), ("ping", "--timeout", "1e-400"), ("ping", "--timeout", "nan"),
                                       ("bench", "--seconds", "0"), ("bench", "--seconds", "1e12"),
                                       ("div", "a.npy", "b.npy", "--timeout", "1e-10"),
                                       ("div", "a.npy", "b.npy", "--part-timeout", "0"),
                                       ("div", "a.npy", "b.npy", "--split", "local:,local:", "--part-timeout", "5e-10")])
def test_times_are_a_nanosecond_at_least(arguments):
    """Of less the whole nanoseconds are 0, which stands for the default, or for no limit."""
    said = kld(*arguments, code=2).stderr
    assert ("expected a number" if "nan" in arguments else "expected seconds, from 1e-09 to 1e+09") in said, said


@pytest.mark.skipif(is_sanitized(), reason="a sanitizer wants more addresses")
def test_no_memory_is_no_wrong_use(tmp_path, pair):
    np.save(tmp_path / "large.npy", np.full((1 << 14, 1 << 12), 0.5, np.float32))  # 256 MiB
    large = tmp_path / "large.npy"

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
    done = subprocess.run([BIN / "kld", "div", large, large, "--grad-predictions", tmp_path / "g.npy"], preexec_fn=limit,
                          capture_output=True, text=True, env=clean_environment(), timeout=60)
    assert done.returncode == 1 and "cannot allocate memory" in done.stderr.lower(), done.stderr


class Hostile(http.server.BaseHTTPRequestHandler):
    """answers: path -> a list of (status, body); the last one stays."""
    answers = {}

    def do_GET(self):
        listed = self.answers.get(self.path.split("?")[0], [(404, b"{}")])
        status, body = listed.pop(0) if len(listed) > 1 else listed[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hostile():
    handler = type("Handler", (Hostile,), {"answers": {}})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield handler.answers, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


TITLE = "\x1b]0;pwned\x07"
EVIL = json.dumps({"error": f"no {TITLE}"}).encode()
METADATA = (200, json.dumps({"name": "kld", "version": "1", "extensions": []}).encode())


def shows_no_control_characters(done):
    assert not [c for c in done.stdout + done.stderr if ord(c) < 32 and c != "\n" or ord(c) == 127], done
    assert "pwned" in done.stdout + done.stderr


def test_what_a_server_says_is_shown_without_control_characters(hostile):
    answers, url = hostile
    answers.update({"/metrics": [(403, EVIL)], "/v2": [METADATA], "/v2/health/ready": [(200, b"")]})
    shows_no_control_characters(kld("status", "--server", url))


def test_names_in_files_are_shown_without_control_characters(tmp_path):
    save_safetensors(tmp_path / "evil.safetensors", **{TITLE: ("F32", np.ones((2, 2), np.float32)),
                                                        "other": ("F32", np.ones((2, 2), np.float32))})
    np.save(tmp_path / "x.npy", np.ones((2, 2), np.float32))
    shows_no_control_characters(kld("div", tmp_path / "evil.safetensors", tmp_path / "x.npy", code=2))


@pytest.mark.parametrize("ready, code", [(503, 3), (200, 0)])
def test_status_of_who_may_not_read_metrics(hostile, ready, code):
    answers, url = hostile
    answers.update({"/metrics": [(403, b'{"error":"the right metrics is missing"}')], "/v2": [METADATA],
                    "/v2/health/ready": [(ready, b"")]})
    assert "the right metrics is missing" in kld("status", "--server", url, code=code).stderr


def test_a_text_is_cut_between_two_characters(hostile):
    answers, url = hostile
    answers.update({"/metrics": [(403, b"{}")], "/v2/health/ready": [(200, b"")],
                    "/v2": [(200, json.dumps({"name": "kld", "version": "1", "device": "é" * 60, "backend": "cpu"},
                                             ensure_ascii=False).encode())]})
    told = json.loads(kld("status", "--json", "--server", url).stdout)
    assert told["device"] == "é" * 31


def test_ca_file_is_trusted_alone(make_server, certificates, tmp_path):
    """Not beside the folder of the system's certificates."""
    mount = 'mount --bind "$0" /etc/ssl/certs && exec "$@"'
    folder = tmp_path / "certs"
    folder.mkdir()
    hashed = subprocess.run(["openssl", "x509", "-hash", "-noout", "-in", certificates / "ca.crt"], capture_output=True,
                            text=True, check=True).stdout.strip()
    shutil.copy(certificates / "ca.crt", folder / f"{hashed}.0")
    shutil.copy(certificates / "other.crt", folder / "ca-certificates.crt")
    inside = ["unshare", "--mount", "sh", "-c", mount, str(folder)]
    if not shutil.which("unshare") or not os.path.isdir("/etc/ssl/certs") or \
            subprocess.run([*inside, "true"], capture_output=True).returncode:
        assert os.environ.get("CI") != "true", "no mount namespaces here (unshare)"
        pytest.skip("no mount namespaces here")
    server = make_server(**tls_flags(certificates))
    url = server.http.replace("http:", "https:")

    def ping(*more):
        return subprocess.run([*inside, BIN / "kld", "ping", "--timeout", "5", "--server", url, *more], capture_output=True,
                              text=True, env=clean_environment(), timeout=60)
    assert ping().returncode == 0  # the folder is the system's
    assert ping("--ca-file", certificates / "ca.crt").returncode == 0
    refused = ping("--ca-file", certificates / "other.crt")
    assert refused.returncode == 3 and "not trusted" in refused.stderr


@pytest.mark.parametrize("name", ["pipe.npy", "pipe.safetensors:x"])
def test_a_pipe_without_a_writer_is_no_file(tmp_path, pair, name):
    os.mkfifo(tmp_path / name.split(":")[0])
    done = subprocess.run([BIN / "kld", "div", tmp_path / name, pair[0]], capture_output=True, text=True, timeout=20,
                          env=clean_environment())
    assert done.returncode == 2 and f"{name}: not a file" in done.stderr and "no pipe" in done.stderr, done


@pytest.mark.parametrize("command", [("ping",), ("status",), ("top", "-n", "1"), ("div", "q.npy", "p.npy")])
@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "https://127.0.0.1:x", "http://a b"])
def test_a_url_that_can_never_work(tmp_path, pair, command, url):
    files = [tmp_path / text if text.endswith(".npy") else text for text in command]
    done = kld(*files, "--server", url, code=2)
    assert "the URL is wrong" in done.stderr and f"expected {url.split(':')[0]}://HOST:PORT" in done.stderr


def test_ca_file_that_is_none(make_server, certificates, tmp_path):
    server = make_server(**tls_flags(certificates))
    url = server.http.replace("http:", "https:")
    for asked in (url, server.http):
        done = kld("ping", "--server", asked, "--ca-file", tmp_path / "none", code=2)
        assert f"--ca-file {tmp_path}/none: No such file or directory" in done.stderr
    (tmp_path / "text").write_text("no certificate")
    for command in ("ping", "status"):
        done = kld(command, "--server", url, "--ca-file", tmp_path / "text", code=2)
        assert f"ca_file {tmp_path}/text: not a file of certificates" in done.stderr
    done = kld("status", "--server", url, "--ca-file", certificates / "other.crt", code=3)
    assert done.stderr.count("not trusted") == 1, done.stderr


def test_who_may_not_is_told_what_would_help(make_server, certificates, tmp_path):
    """A certificate, a token and a socket: one status, and each its own advice."""
    def advice(done, said):
        lines = done.stderr.splitlines()
        assert done.returncode == 3 and said in lines[0], done
        return lines[1]
    secure = make_server(**tls_flags(certificates))
    done = kld("ping", "--server", secure.http.replace("http:", "https:"), code=3)
    assert "--ca-file FILE" in advice(done, "certificate is not trusted")
    x = tmp_path / "x.npy"
    np.save(x, np.ones((2, 2), np.float32))
    url = secure.http.replace("http:", "https:")
    done = kld("div", x, x, "--split", f"{url},{url}", code=3)  # which shows the beginning of what each says
    assert "--ca-file FILE" in advice(done, "certificate is not trusted")
    (tmp_path / "tokens").write_text(f"me {hashlib.sha256(b'word').hexdigest()} metrics\n")
    (tmp_path / "token").write_text("word\n")
    server = make_server(tokens=tmp_path / "tokens")
    done = kld("div", x, x, "--server", server.http, "--token-file", tmp_path / "token", code=3)
    told = advice(done, "does not have the right 'infer'")
    assert "--token-file FILE" in told and "--ca-file" not in told
    library = next((path for path in (BIN / "libkld.so.0", BIN.parent / "lib/libkld.so.0") if path.exists()), None)
    if os.geteuid() != 0 or not library:
        return  # needs to change its user, who may be kept from these folders
    os.chmod(server.folder, 0o755)
    tool = shutil.copy(BIN / "kld", server.folder)
    shutil.copy(library, server.folder)
    done = subprocess.run([tool, "ping", "--server", server.url_unix], capture_output=True, text=True, user=1234, group=1234,
                          extra_groups=[], env=clean_environment(LD_LIBRARY_PATH=str(server.folder)), timeout=60)
    told = advice(done, "its mode or group excludes you")
    assert "--unix-mode" in told and "--ca-file" not in told


@pytest.mark.skipif(is_sanitized(), reason="a sanitizer makes files of its own")
def test_a_small_limit_of_files(make_server, tmp_path):
    """Shared memory is one. More servers would not help."""
    x = tmp_path / "x.npy"
    np.save(x, np.ones((2, 2), np.float32))
    done = subprocess.run(["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", BIN / "kld", "div", x, x, "--server",
                           make_server().url_unix], capture_output=True, text=True, env=clean_environment(), timeout=60)
    assert done.returncode == 1, done
    assert "(RLIMIT_FSIZE)" in done.stderr and "ulimit -f" in done.stderr and "URL" not in done.stderr


@pytest.mark.skipif(is_sanitized(), reason="a sanitizer may have files of its own open")
def test_no_file_descriptors_left(make_server):
    """Neither is the server away then, nor would more of them help."""
    server = make_server()
    for url in server.url_unix, server.http:  # a connection has three before that to its server
        done = subprocess.run(["sh", "-c", 'ulimit -n 6; exec "$@"', "sh", BIN / "kld", "ping", "--server", url, "--timeout", "0.3"],
                              capture_output=True, text=True, env=clean_environment(), timeout=60)
        told = done.stderr.splitlines()
        assert done.returncode == 1 and told[0] == "kld: no file descriptors left (RLIMIT_NOFILE)", done
        assert "ulimit -n" in told[1] and "start kld-server" not in done.stderr and "--split" not in done.stderr


def test_the_other_kind_of_http(make_server, certificates):
    secure, plain = make_server(**tls_flags(certificates)), make_server()
    done = kld("ping", "--server", secure.http, "--timeout", "0.3", code=3)
    assert "without TLS (https:// is with it)" in done.stderr
    done = kld("ping", "--server", plain.http.replace("http:", "https:"), "--timeout", "0.3", code=3)
    assert "with TLS (http:// is without it)" in done.stderr


@pytest.mark.parametrize("arguments, said", [
    (("div", "--part-bytes", "1M"), "--part-bytes is for several servers; expected --split"),
    (("div", "--part-timeout", "1"), "--part-timeout is for several servers; expected --split"),
    (("bench", "--check"), "--check compares gradients; expected --grad"),
    (("div", "--split", "local:", "--part-bytes", "0"), "--part-bytes is '0'; expected a whole number above 0"),
    *((("div", "--split", "local:", "--part-bytes", text), "(K, M, G, T allowed)")
      for text in ("-1", "1Ki", "M", "", "16777217T", "18446744073709551616", "1 M", "0x10"))])
def test_options_without_use(pair, arguments, said):
    files = pair if arguments[0] == "div" else ()
    assert said in kld(arguments[0], *files, *arguments[1:], code=2).stderr


@pytest.mark.parametrize("size", ["20000", "20k", "64M", "16777215T"])
def test_bytes_with_a_unit(pair, size):
    kld("div", *pair, "--split", "local:,local:", "--part-bytes", size)


@pytest.mark.parametrize("option, shape, reduction, said", [
    ("row-mask", (2, 2), "mean", "[2,2]; expected [4], one a row"), ("row-weights", (1, 4), "mean", "[1,4]; expected [4]"),
    ("row-mask", (3,), "mean", "[3]; expected [4]"), ("grad-output-file", (4, 1), "row", "[4,1]; expected [4], one a row"),
    ("grad-output-file", (4,), "mean", "[4]; expected one number"), ("grad-output-file", (1, 1), "sum", "[1,1]; expected one number"),
    ("grad-output-file", (4,), "none", "[4]; expected [4,5], as of predictions")])
def test_a_shape_that_does_not_fit_is_named_and_what_would(tmp_path, option, shape, reduction, said):
    np.save(tmp_path / "q.npy", probabilities((4, 5), 1))
    np.save(tmp_path / "x.npy", np.ones(shape, bool if option == "row-mask" else np.float32))
    more = ("--loss", tmp_path / "l.npy") if reduction in ("none", "row") else ()
    done = kld("div", tmp_path / "q.npy", tmp_path / "q.npy", "--reduction", reduction, f"--{option}", tmp_path / "x.npy",
               "--grad-targets", tmp_path / "g.npy", *more, code=2)
    assert f"{tmp_path}/x.npy: its shape is {said}" in done.stderr, done.stderr
    np.save(tmp_path / "p.npy", probabilities((5, 4), 1))
    done = kld("div", tmp_path / "q.npy", tmp_path / "p.npy", code=2)
    assert f"{tmp_path}/p.npy: its shape is [5,4]; expected [4,5]" in done.stderr


def test_shapes_of_rows(tmp_path):
    """N, or the leading dimensions, as HTTP has it; where that is one value, a single number."""
    np.save(tmp_path / "q.npy", probabilities((6, 5), 1).reshape(2, 3, 5))
    np.save(tmp_path / "one.npy", probabilities((1, 5), 1)[0])
    for shape in ((6,), (2, 3)):
        np.save(tmp_path / "w.npy", np.ones(shape, np.float32))
        kld("div", tmp_path / "q.npy", tmp_path / "q.npy", "--row-weights", tmp_path / "w.npy")
    np.save(tmp_path / "w.npy", np.ones((3, 2), np.float32))
    done = kld("div", tmp_path / "q.npy", tmp_path / "q.npy", "--row-weights", tmp_path / "w.npy", code=2)
    assert "its shape is [3,2]; expected [6] or [2,3], one a row" in done.stderr
    for shape in ((), (1,)):
        np.save(tmp_path / "w.npy", np.ones(shape, np.float32))
        kld("div", tmp_path / "one.npy", tmp_path / "one.npy", "--row-weights", tmp_path / "w.npy", "--grad-output-file",
            tmp_path / "w.npy", "--grad-targets", tmp_path / "g.npy")


@pytest.mark.parametrize("option, dtype, said", [("row-mask", np.float32, "row_mask has dtype FP32; expected BOOL or UINT8"),
                                                 ("row-weights", np.float64, "row_weights has dtype FP64; expected FP32")])
def test_a_dtype_that_does_not_fit_names_its_file(tmp_path, pair, option, dtype, said):
    np.save(tmp_path / "x.npy", np.ones(33, dtype))
    assert f"{tmp_path}/x.npy: {said}" in kld("div", *pair, f"--{option}", tmp_path / "x.npy", code=2).stderr


def test_a_token_file_that_cannot_be_read_says_why(tmp_path):
    for name, said in (("none", "No such file or directory"), (".", "Is a directory")):
        done = kld("ping", "--server", "http://127.0.0.1:1", "--token-file", tmp_path / name, code=2)
        assert f"--token-file {tmp_path / name}: {said}" in done.stderr


def test_json_is_utf8_whatever_a_server_is_called(make_server, tmp_path):
    server = make_server()
    for name, shown in ((b"\xff.sock", "\ufffd.sock"), ("\u00e9\U0001f600\x01\"\\".encode(), "\u00e9\U0001f600\x01\"\\"),
                        (b"\xc3", "\ufffd"), (b"\xed\xa0\x80", "\ufffd" * 3)):
        path = os.fsencode(tmp_path) + b"/" + name
        os.symlink(server.unix, path)
        done = subprocess.run([BIN / "kld", "status", "--json", "--server", b"unix:" + path], capture_output=True, timeout=60,
                              env=clean_environment())
        assert json.loads(done.stdout.decode("utf-8"))["server"] == f"unix:{tmp_path}/{shown}"


def test_a_tensor_that_is_there_twice(tmp_path):
    text = b'{"t":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"t":{"dtype":"F32","shape":[1,2],"data_offsets":[8,16]}}'
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 16)
    assert "two tensors of that name" in kld("div", f"{file}:t", f"{file}:t", code=2).stderr
    assert "which tensor? name one of its 2" in kld("div", file, file, code=2).stderr
