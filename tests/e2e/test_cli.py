"""The kld tool, over every kind of server: files in, loss and gradients out, and what it says when
something is wrong."""
import hashlib
import json
import os
import pathlib
import pty
import signal
import struct
import subprocess

import numpy as np
import pytest

import oip
from conftest import BIN, clean_environment, suspend, wait_until

KLD = str(BIN / "kld")


def kld(*arguments, code=0, **environment):
    """Runs the tool; fails the test unless it exits with `code`."""
    done = subprocess.run([KLD, *map(str, arguments)], capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL, env=clean_environment(**environment))
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def save_safetensors(path, **tensors):
    """tensors: name=(dtype name, array of its bits)."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path, name):
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    tensor = json.loads(raw[8:8 + length])[name]
    begin, end = tensor["data_offsets"]
    return tensor["dtype"], tensor["shape"], raw[8 + length + begin:8 + length + end]


@pytest.fixture
def pair(tmp_path):
    """q.npy and p.npy: rows of probabilities; the arrays in float64 too."""
    random = np.random.default_rng(7)
    q, p = (softmax(random.standard_normal((33, 257))).astype(np.float32) for _ in range(2))
    np.save(tmp_path / "q.npy", q)
    np.save(tmp_path / "p.npy", p)
    return tmp_path, q.astype(np.float64), p.astype(np.float64)


def urls(server):
    return [server.url_unix, server.http, "local:" + server.backend]


def test_same_bits_over_every_connection(make_server, pair):
    folder, q, p = pair
    server = make_server()
    answers = []
    for i, url in enumerate(urls(server)):
        out = [folder / f"{name}{i}.npy" for name in ("gq", "gp", "rows", "loss")]
        done = kld("div", folder / "q.npy", folder / "p.npy", "--grad-predictions", out[0],
                   "--grad-targets", out[1], "--row-loss", out[2], "--loss", out[3], "--json",
                   "--server", url)
        reply = json.loads(done.stdout)
        assert reply["shape"] == [33, 257] and reply["attempts"] == 1
        answers.append((reply["loss"], [path.read_bytes() for path in out]))
        assert np.load(out[3]) == np.float32(reply["loss"])
    assert answers[0] == answers[1] == answers[2]
    truth = (p * (np.log(p) - np.log(q))).sum(1)
    assert answers[0][0] == pytest.approx(truth.sum() / 33, rel=1e-6)
    np.testing.assert_allclose(np.load(folder / "rows0.npy"), truth, rtol=2e-5)
    np.testing.assert_allclose(np.load(folder / "gq0.npy"), -p / q / 33, rtol=1e-6)
    assert np.load(folder / "gp0.npy").shape == (33, 257)


def test_parameters_masks_and_reductions(make_server, pair):
    folder, q, p = pair
    mask = np.arange(33) % 3 > 0
    weights = np.linspace(0.5, 2, 33).astype(np.float32)
    np.save(folder / "mask.npy", mask)
    np.save(folder / "weights.npy", weights)
    server = make_server()
    rows = (q * (np.log(q) - np.log(p))).sum(1)
    truth = 3 * (weights * rows)[mask].sum() / weights[mask].sum()
    seen = set()
    for url in urls(server):
        done = kld("div", folder / "q.npy", folder / "p.npy", "--divergence", "reverse_kl",
                   "--reduction=rowmean", "--row-mask", folder / "mask.npy", "--row-weights",
                   folder / "weights.npy", "--scale", "3", "--quiet", "--server", url)
        assert done.stderr == ""
        assert float(done.stdout) == pytest.approx(truth, rel=1e-6)
        seen.add(done.stdout)
        kld("div", folder / "q.npy", folder / "p.npy", "--reduction", "none", "--loss",
            folder / "all.npy", KLD_SERVER=url)
        all_values = np.load(folder / "all.npy")
        assert all_values.shape == (33, 257)
        np.testing.assert_allclose(all_values, p * (np.log(p) - np.log(q)), rtol=1e-4, atol=1e-8)
    assert len(seen) == 1


@pytest.mark.parametrize("divergence", oip.DIVERGENCES)
def test_every_divergence(make_server, pair, divergence):
    """Over the Unix socket, over HTTP and in the tool's own process, against FP64."""
    folder, q, p = pair
    parameters = oip.DIVERGENCES[divergence]
    truth = oip.expected(q, p, divergence, **parameters)
    options = [text for name, value in parameters.items() for text in ("--" + name, value)]
    answers = []
    for i, url in enumerate(urls(make_server())):
        files = [folder / f"{name}{i}.npy" for name in ("rows", "gq", "gp")]
        done = kld("div", folder / "q.npy", folder / "p.npy", "--divergence", divergence, *options,
                   "--row-loss", files[0], "--grad-predictions", files[1], "--grad-targets", files[2],
                   "--quiet", "--server", url)
        answers.append([done.stdout] + [file.read_bytes() for file in files])
    assert answers[0] == answers[1] == answers[2]
    assert float(done.stdout) == pytest.approx(truth["loss"][0], rel=1e-5)
    for file, name in zip(files, ("row_loss", "grad_predictions", "grad_targets")):
        np.testing.assert_allclose(np.load(file), truth[name], rtol=1e-5, atol=1e-7)


def test_logits_in_every_dtype(make_server, tmp_path):
    random = np.random.default_rng(3)
    x, y = random.standard_normal((2, 4, 8, 130))
    bits = lambda a: (a.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    exact = lambda a: (bits(a).astype(np.uint32) << 16).view(np.float32)
    for name in ("float64", "float32", "float16"):
        np.save(tmp_path / f"{name}.npy", x.astype(name))
    save_safetensors(tmp_path / "all.safetensors", x=("BF16", bits(x)), y=("BF16", bits(y)),
                     y64=("F64", y))
    server = make_server()
    common = ("--predictions-form", "logits", "--targets-form", "logits", "--temperature", 2,
              "--json")
    for url in urls(server):
        for name, tolerance in (("float64", 1e-12), ("float32", 1e-5), ("float16", 1e-2)):
            p, q = softmax(y / 2), softmax(np.load(tmp_path / f"{name}.npy").astype(float) / 2)
            truth = (p * np.log(p / q)).sum() / 4
            reply = json.loads(kld("div", tmp_path / f"{name}.npy",
                                   f"{tmp_path}/all.safetensors:y64", *common, "--server",
                                   url).stdout)
            assert reply["loss"] == pytest.approx(truth, rel=1e-9)  # a float64 input: in float64
        out = tmp_path / "grad.safetensors"
        reply = json.loads(kld("div", f"{tmp_path}/all.safetensors:x",
                               f"{tmp_path}/all.safetensors:y", *common, "--grad-predictions", out,
                               "--server", url).stdout)
        p, q = softmax(exact(y) / 2), softmax(exact(x) / 2)
        assert reply["loss"] == pytest.approx((p * np.log(p / q)).sum() / 4, rel=1e-5)
        dtype, shape, raw = read_safetensors(out, "grad_predictions")
        assert (dtype, shape) == ("BF16", [4, 8, 130])
        got = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(got.reshape(4, 8, 130), (q - p) / 2 / 4, rtol=1e-2, atol=1e-6)
        done = kld("div", f"{tmp_path}/all.safetensors:x", f"{tmp_path}/all.safetensors:y",
                   "--grad-predictions", tmp_path / "grad.npy", "--server", url, code=2)
        assert "safetensors" in done.stderr


def test_non_finite_loss(make_server, tmp_path):
    np.save(tmp_path / "q.npy", np.array([[1, 0]], np.float32))
    np.save(tmp_path / "p.npy", np.array([[0.5, 0.5]], np.float32))
    for url in urls(make_server()):
        reply = json.loads(kld("div", tmp_path / "q.npy", tmp_path / "p.npy", "--json", "--server",
                               url).stdout)
        assert reply["loss"] is None and reply["non_finite"] == "inf"
        assert kld("div", tmp_path / "q.npy", tmp_path / "p.npy", "--server", url).stdout == "inf\n"


def write_bad_files(folder):
    array = np.ones((4, 6), np.float32)
    np.save(folder / "fortran.npy", np.asfortranarray(array))
    np.save(folder / "big.npy", array.astype(">f4"))
    np.save(folder / "object.npy", np.array([[1, None]], object))
    np.save(folder / "int.npy", np.ones((4, 6), np.int64))
    np.save(folder / "empty.npy", np.ones((4, 0), np.float32))
    np.save(folder / "other.npy", np.ones((6, 4), np.float32))
    np.save(folder / "good.npy", array)
    (folder / "cut.npy").write_bytes((folder / "good.npy").read_bytes()[:-1])
    (folder / "text.npy").write_text("not an array")
    (folder / "nothing.npy").write_bytes(b"")


@pytest.mark.parametrize("name, said", [
    ("fortran.npy", "ascontiguousarray"), ("big.npy", "big-endian"), ("object.npy", "objects"),
    ("int.npy", "float32"), ("empty.npy", "empty"), ("other.npy", "shape"), ("cut.npy", "cut short"),
    ("text.npy", "not a .npy file"), ("nothing.npy", "anything"), ("missing.npy", "No such file"),
    ("x.safetensors:y", "No such file"), (".", "not a file"),
])
def test_bad_files(tmp_path, name, said):
    write_bad_files(tmp_path)
    done = kld("div", tmp_path / "good.npy", tmp_path / name, code=2)
    assert said in done.stderr and "kld div -h" in done.stderr and done.stdout == ""


@pytest.mark.parametrize("arguments, said", [
    (["--divergence", "x"], "known: forward_kl, reverse_kl, jeffreys"),
    (["--divergence", "js", "--beta", "2"], "beta must be in [0, 1]"),
    (["--divergence", "mixed_kl"], "needs the parameter weight"),
    (["--divergence", "skew_kl", "--skew", "1"], "skew must be in [0, 1)"),
    (["--temperature", "2"], "logits"), (["--temperature", "x"], "number"),
    (["--reduction", "row"], "--loss"), (["--beta", "0.5"], "does not fit"),
    (["--frobnicate"], "unknown option"), (["--scale"], "needs a value"), (["--json=1"], "no value"),
    (["third.npy"], "unexpected"), (["--grad-predictions", "out.txt"], ".npy"),
    (["--grad-output", "2"], "no gradient"), (["--server", "ftp://x"], "expected unix:"),
    (["--server", "unix:"], "path"), (["--server", "local:tpu"], "cpu"),
    (["--server", "local:cpu:x"], "number"),
])
def test_bad_arguments(tmp_path, arguments, said):
    write_bad_files(tmp_path)
    done = subprocess.run([KLD, "div", "good.npy", "good.npy", *arguments], capture_output=True,
                          text=True, cwd=tmp_path, env=clean_environment(), timeout=60)
    assert done.returncode == 2 and said in done.stderr, (done.returncode, done.stderr)
    assert done.stdout == ""


def test_nothing_is_left_of_a_result_that_cannot_be_written(tmp_path):
    write_bad_files(tmp_path)
    done = kld("div", tmp_path / "good.npy", tmp_path / "good.npy", "--grad-predictions",
               tmp_path / "no" / "out.npy", code=2)
    assert "cannot be written" in done.stderr
    before = sorted(tmp_path.iterdir())
    (tmp_path / "out.npy").mkdir()
    kld("div", tmp_path / "good.npy", tmp_path / "good.npy", "--grad-predictions",
        tmp_path / "out.npy", code=2)
    assert sorted(tmp_path.iterdir()) == sorted(before + [tmp_path / "out.npy"])


def test_output_that_is_not_written_is_a_failure(make_server, tmp_path):
    """A full disk, a descriptor that is closed: one line says so, and nothing is printed into another file's place."""
    server = make_server()
    write_bad_files(tmp_path)
    div = ["div", str(tmp_path / "good.npy"), str(tmp_path / "good.npy"), "--server", server.http]
    for command in (div, [*div, "--json"], [*div, "--grad-predictions", str(tmp_path / "out.npy")],
                    ["status", "--server", server.http], ["status", "--json", "--server", server.url_unix],
                    ["top", "--once", "-d", "0.1", "--server", server.http], ["top", "--batch", "-d", "0.1", "--server", server.http],
                    ["ping", "--server", server.http], ["ping", "--server", server.url_unix], ["--version"], ["div", "-h"]):
        for where in (">/dev/full", ">&-"):
            done = subprocess.run(["sh", "-c", f'exec "$@" {where}', "sh", KLD, *command], capture_output=True, text=True,
                                  env=clean_environment(), timeout=60)
            assert done.returncode == 1, (command, where, done)
            reason = "No space left on device" if "full" in where else "Bad file descriptor"
            assert done.stderr.splitlines()[-1] == f"kld: standard output cannot be written: {reason}", done.stderr
    warnings = [line for line in server.log().splitlines() if " warn " in line and "a build with a sanitizer" not in line]
    assert server.stop() == 0 and not warnings, server.log()


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    """Somebody saves over a checkpoint that is being read: said in a line, and no signal's death."""
    for name in ("a.npy", "b.npy"):  # of holes, so large that it is not read before it is cut
        np.lib.format.open_memmap(tmp_path / name, "w+", np.float32, (1000, 1 << 17))
    process = subprocess.Popen([KLD, "div", tmp_path / "a.npy", tmp_path / "b.npy"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, env=clean_environment())
    mapped = pathlib.Path(f"/proc/{process.pid}/maps")
    wait_until(lambda: "b.npy" in mapped.read_text(), 20, "both files being mapped")
    os.truncate(tmp_path / "b.npy", 4096)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out, said) == (2, "", "kld: a file was cut short while it was read, or its disk failed\n")


def test_no_server(tmp_path):
    np.save(tmp_path / "q.npy", np.full((2, 2), 0.5, np.float32))
    pair = [tmp_path / "q.npy"] * 2
    for url in (f"unix:{tmp_path}/none.sock", "http://127.0.0.1:1"):
        for command in [["ping"], ["div", *pair], ["bench"], ["status"], *[["top", "--once"]] * url.startswith("http")]:
            done = kld(*command, "--server", url, "--timeout", "0.3", code=3)
            asked = "GET /metrics at " if command[0] in ("status", "top") and "http" in url else ""
            assert "kld-server" in done.stderr and done.stderr.endswith(f"     tried: {asked}{url}\n"), done.stderr
            done = kld(*command, "--timeout", "0.3", KLD_SERVER=url, code=3)
            assert done.stderr.endswith(f"     tried: {asked}{url} ($KLD_SERVER)\n"), done.stderr
    done = kld("div", *pair, KLD_SERVER="127.0.0.1:8080", code=2)
    assert "unknown kind of server" in done.stderr and "tried: 127.0.0.1:8080 ($KLD_SERVER)" in done.stderr
    for urls, said in (("http://127.0.0.1:9", "no server is left; http"), ("unix:/x,http://127.0.0.1:9", "none of 2 servers is left; ")):
        line = kld("div", *pair, "--split", urls, "--timeout", "0.3", code=3).stderr.splitlines()[0]
        assert said in line and ("..." in line) == ("," in urls) and " ..." not in line, line
    assert ", on " in kld("div", *pair, "--split", "local:").stderr and "1 server: " in kld("div", *pair, "--split", "local:").stderr
    assert "--part-timeout" in kld("div", *pair, "--split", "local:,local:", "--part-timeout", "1e-9", code=3).stderr


def test_help():
    top = kld("-h").stdout
    for command in ("div", "status", "ping", "bench"):
        assert command in top
        text = kld(command, "-h").stdout
        assert text.startswith(f"Usage: kld {command} ") and "--server URL" in text
        assert "Exit status" in text and text == kld("help", command).stdout
    assert kld("--version").stdout.startswith("kld ")
    assert "no command 'dib'" in kld("dib", code=2).stderr and "no command 'dib'" in kld("help", "dib", code=2).stderr
    assert top == kld("help").stdout == kld("help", "help").stdout
    kld(code=2)


@pytest.mark.parametrize("words, some, not_these", [
    (["kld", ""], {"div", "status", "top", "ping", "bench", "help"}, {"--server"}), (["kld", "b"], {"bench"}, {"div"}),
    (["kld", "help", "di"], {"div"}, {"bench"}), (["kld", "div", "q.npy", "--gr"], {"--grad-output", "--grad-targets"}, {"--server"}),
    (["kld", "top", "-"], {"-n", "-d", "--server", "--token-file"}, {"--divergence"}),
    (["kld", "div", "q"], set(), {"div"}), (["kld", "dib", "--"], set(), {"--server"})])
def test_completion(words, some, not_these):
    script = pathlib.Path(__file__).parents[2] / "client" / "cli" / "kld.bash"
    code = f'. {script} && COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) && _kld && printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code, "bash", KLD, *words[1:]], capture_output=True, text=True, timeout=60,
                          env=clean_environment())
    found = set(done.stdout.split())
    assert done.returncode == 0 and done.stderr == "" and some <= found and not not_these & found, done


def test_status_without_a_server():
    assert kld("status").stdout.splitlines()[0] == "server         none: this process (local:)"
    assert kld("status", "--server", "local:cpu").stdout.splitlines()[0] == "server         none: this process (local:cpu)"


def test_status_ping_and_bench(make_server):
    server = make_server().wait_linked()
    for url in urls(server):
        status = json.loads(kld("status", "--json", "--server", url).stdout)
        assert status["backend"] in (server.backend, "remote") and status["device"]
        assert status["ready"] is True and status["requests_total"] >= status["errors_total"] == 0
        assert ("uptime_ns" in status) == (not url.startswith("http"))
        text = kld("status", "--server", url).stdout
        assert server.backend in text and ("none: this process" in text) == url.startswith("local")
        assert len(kld("ping", "--count", 4, "--server", url).stdout.splitlines()) == 4
        bench = json.loads(kld("bench", "--shape", "64x1000", "--dtype", "BF16", "--form", "logits",
                               "--grad", "--check", "--seconds", "0.3", "--in-flight", 3, "--json",
                               "--server", url).stdout)
        assert bench["losses"] > 0 and bench["different"] == bench["failed"] == 0
        assert ("of_ceiling" in bench) == url.startswith("local:")
    assert "losses/s" in kld("bench", "--shape", "8x100", "--seconds", "0.1").stdout
    assert "--shape" in kld("bench", "--shape", "8xx", code=2).stderr


def test_the_longest_token(make_server, tmp_path):
    """The server's longest is libkld's and the tool's; nothing is cut off, and an empty line is none."""
    word, file, tokens = "w" * 1024, tmp_path / "word", tmp_path / "tokens"
    tokens.write_text(f"long {hashlib.sha256(word.encode()).hexdigest()} infer\n")
    ask = ("status", "--json", "--server", make_server(tokens=tokens).wait_linked().http, "--token-file", file)
    for end in ("", "\n", "\r\nmore\n"):
        file.write_text(word + end, newline="")
        kld(*ask)
    for text, said in ((word + "w\n", "more than the 1024 bytes of a token"), ("\n" + word, "no token can be read"),
                       ("", "no token can be read")):
        file.write_text(text)
        assert said in kld(*ask, code=2).stderr


def test_status_over_http_tells_what_metrics_do(make_server, pair, tmp_path):
    folder, _, _ = pair
    tokens = tmp_path / "tokens"
    words = {name: tmp_path / name for name in ("all", "some")}
    for name, path in words.items():
        path.write_text(f"word-of-{name}")
    tokens.write_text("".join(
        f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()} {rights}\n" for (name, path), rights
        in zip(words.items(), ("infer,metrics", "infer"))))
    server = make_server(tokens=tokens)
    ask = ("--server", server.http, "--token-file", words["all"])
    for _ in range(3):
        kld("div", folder / "q.npy", folder / "p.npy", *ask)
    bearer = {"Authorization": "Bearer word-of-all"}
    # Its loop counts the time of a request when its reply has gone, which another loop may be asked about before.
    wait_until(lambda: server.metrics(bearer)["kld_http_request_seconds_count"] == 3, what="the times of all three")
    text = server.request("/metrics", headers=bearer)[2].decode()
    status = json.loads(kld("status", "--json", *ask).stdout)
    assert status["version"] == kld("--version").stdout.split()[1]
    assert status["ready"] is True and status["draining"] is False and status["server"] == server.http
    assert status["requests"]["http"] == {"ok": 3} and status["requests_total"] >= 3
    assert status["latency"]["http_request"]["count"] == 3
    assert 0 < status["latency"]["http_request"]["mean_us"] < 60e6
    assert status["latency"]["queue"]["p50_below_us"] <= (
        status["latency"]["queue"]["p99_below_us"] or float("inf"))
    worker, = status["workers"]
    assert worker["backend"] == status["backend"] == server.backend and worker["ready"] is True
    for name in ("pool_bytes_max", "worker_restarts_total"):
        assert f'kld_{name}{{worker="0"}} {status[name]}\n' in text and status[name] == worker[name]
    for name in ("in_flight", "regions", "staging_bytes", "http_regions", "gateway_restarts_total"):
        assert status[name] >= 0
    people = kld("status", *ask).stdout
    assert "ready" in people and "requests, http 3 (0 errors)" in people

    # Who may not read /metrics is told so, and what it may know.
    done = kld("status", "--json", "--server", server.http, "--token-file", words["some"])
    assert "/metrics" in done.stderr and "right" in done.stderr
    assert "requests" not in json.loads(done.stdout)
    done = kld("status", "--json", "--server", server.http, code=3)
    assert f"tried: GET /metrics at {server.http}" in done.stderr and "--token-file" in done.stderr

    # A server that answers and has no worker to serve: the object, and another exit status.
    suspend(server.pid)  # nobody replaces the worker
    try:
        os.kill(server.child("worker"), signal.SIGTERM)
        wait_until(lambda: "kld_worker_ready{worker=\"0\"} 0\n" in server.request(
            "/metrics", headers=bearer)[2].decode())
        status = json.loads(kld("status", "--json", *ask, code=3).stdout)
        assert status["ready"] is status["workers"][0]["ready"] is False
        assert "waiting for a worker" in kld("status", *ask, code=3).stdout
    finally:
        server.process.send_signal(signal.SIGCONT)
    wait_until(lambda: server.request("/v2/health/ready", headers=bearer)[0] == 200)


def test_status_names_what_it_tried(tmp_path):
    for url, shown in ((f"unix:{tmp_path}/none.sock",) * 2,
                       ("http://me:secret@127.0.0.1:1/", "GET /metrics at http://127.0.0.1:1/")):
        done = kld("status", "--server", url, "--timeout", "0.3", code=3)
        assert f"tried: {shown}" in done.stderr and "secret" not in done.stderr and not done.stdout


@pytest.mark.parametrize("url, shown", [
    ("http://me:secret@127.0.0.1:1/a@b", "http://127.0.0.1:1/a@b"), ("http://me:se,cret@127.0.0.1:1", "http://127.0.0.1:1"),
    ("split:http://me:secret@127.0.0.1:1/x,http://you:secret@127.0.0.1:2,unix:/a@b", "split:http://127.0.0.1:1/x,http://127.0.0.1:2,unix:/a@b"),
    ("split:me:secret@h1,http://127.0.0.1:2", "split:h1,http://127.0.0.1:2"),
    ("me:secret@127.0.0.1:1", "127.0.0.1:1"), ("unix:/a@b", "unix:/a@b"), ("ftp://me:secret@x", "ftp://x")])
def test_no_password_is_shown(url, shown):
    done = subprocess.run([KLD, "ping", "--server", url, "--timeout", "0.3"], capture_output=True, text=True, timeout=60,
                          env=clean_environment())
    assert done.stderr.endswith(f"     tried: {shown}\n") and "secret" not in done.stderr.replace("se,cret", "secret"), done.stderr


def test_progress_bar_on_a_terminal(make_server, tmp_path):
    rows = np.full((2000, 1500), 1 / 1500, np.float32)  # 12 MB each
    np.save(tmp_path / "q.npy", rows)
    server = make_server()
    master, slave = pty.openpty()
    process = subprocess.Popen([KLD, "div", tmp_path / "q.npy", tmp_path / "q.npy", "--server",
                                server.http], stdout=subprocess.PIPE, stderr=slave,
                               env=clean_environment())
    os.close(slave)
    seen = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(master)
    assert abs(float(process.communicate(timeout=60)[0])) < 1e-6 and process.returncode == 0
    assert b"100%" in seen and b"24.0 MB" in seen
