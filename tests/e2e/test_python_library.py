"""The Python package and libkld: what the package repeats of C's headers is what they say, the library is
found where it is said to be, and outcomes are the exceptions that they should be."""
import contextlib
import copy
import ctypes
import hashlib
import importlib.util
import os
import pathlib
import pickle
import shutil
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from conftest import ROOT, wait_until
from pythonlib import INSTALLED, LIBRARY, PACKAGE, environment, import_kld, import_torch, probabilities

kld = import_kld()
from kld import _errors, _library, _opening  # noqa: E402

Q, P = probabilities(1, (4, 8)), probabilities(2, (4, 8))
STRUCTS = {"kld_error": _library.Error, "kld_tensor": _library.Tensor, "kld_op": _library.Op,
           "kld_bytes": _library.Bytes, "kld_request": _library.Request, "kld_result": _library.Result,
           "kld_connect_options": _library.ConnectOptions, "kld_server_info": _library.ServerInfo,
           "kld_server_stats": _library.ServerStats, "kld_tensor_view": _library.TensorView}


def run(code, **more):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                          env=environment(**more))


@pytest.mark.skipif(not (ROOT / "client/kld.h").exists() or not shutil.which("gcc"), reason="needs the sources")
def test_structs_are_laid_out_as_the_headers_say(tmp_path):
    lines = [f'printf("{name} . %zu\\n", sizeof(struct {name}));' for name in STRUCTS]
    lines += [f'printf("{name} {field} %zu\\n", offsetof(struct {name}, {field}));'
              for name, struct in STRUCTS.items() for field, *_ in struct._fields_]
    (tmp_path / "x.c").write_text('#include <stdio.h>\n#include "client/kld.h"\nint main(void) {\n'
                                  + "\n".join(lines) + "\nreturn 0;\n}\n")
    subprocess.run(["gcc", f"-I{ROOT}", tmp_path / "x.c", "-o", tmp_path / "x"], check=True)
    said = subprocess.run([tmp_path / "x"], capture_output=True, text=True, check=True).stdout
    meant = [f"{name} . {ctypes.sizeof(struct)}" for name, struct in STRUCTS.items()]
    meant += [f"{name} {field} {getattr(struct, field).offset}" for name, struct in STRUCTS.items()
              for field, *_ in struct._fields_]
    assert said.splitlines() == meant


def test_tables_are_those_of_the_library():
    lib = _library.library()
    known = {number: lib.kld_status_name(number).decode().upper() for number in range(1000)
             if lib.kld_status_known(number)}
    assert {int(status): status.name for status in kld.Status} == known
    names = {"float32": "FP32", "float64": "FP64", "float16": "FP16", "bfloat16": "BF16", "uint8": "UINT8",
             "bool": "BOOL"}
    for name, number in _library.DTYPE.items():
        assert lib.kld_dtype_name(number).decode() == names[name]
        assert lib.kld_dtype_bytes(number) == _library.ITEM_BYTES[number]
    assert lib.kld_dtype_name(len(names) + 1) == b"unknown"
    for table, function in ((_library.SLOTS, lib.kld_slot_name), (_library.NUMBERS, lib.kld_number_name)):
        assert tuple(function(i).decode() for i in range(len(table) + 1)) == (*table, "unknown")


USER = """
import kld
import numpy as np

with kld.connect("local:") as connection:
    result = connection.kl_div(np.ones((2, 3)), np.ones((2, 3)), temperature=np.float32(2), grad="both")
    seconds: float = result.kernel_s
    made: kld.Result = kld.kl_div([1.0], [1.0])
    shape: tuple[int, ...] = kld.empty((2, 3), dtype=np.float64).shape
    module: type = kld.nn.KLDivLoss
    loss = kld.nn.KLDivLoss(temperature=2.0, reduction="batchmean", input_form="logits")
    kld.kl_div([1.0], [1.0], grad=np.bool_(False))
    with connection.attach("name") as attached, connection.publish("name", np.ones((2, 3))) as published:
        number: int = attached.owner_uid
        form: str = published.form
"""


@pytest.mark.skipif(INSTALLED, reason="of the sources")
def test_types(tmp_path):
    """The package as mypy --strict sees it, and a program that uses it."""
    if importlib.util.find_spec("mypy") is None:
        assert os.environ.get("CI") != "true"
        pytest.skip("no mypy")

    def check(*what, cwd):
        command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path}/cache", *what]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200,
                              env={**os.environ, "MYPYPATH": str(PACKAGE)})
    of_package = check("kld", cwd=PACKAGE)
    assert of_package.returncode == 0, of_package.stdout + of_package.stderr
    config = f"--config-file={PACKAGE / 'pyproject.toml'}"
    (tmp_path / "good.py").write_text(USER)
    (tmp_path / "bad.py").write_text(USER + "    connection.empty('wide')\n"
                                     "    connection.kl_div([1.0], [1.0], wrong=1)\n"
                                     "    kld.kl_div([1.0], [1.0], bad=1)\n    kld.attach(7)\n"
                                     "    kld.empty(2, type='float32')\n    kld.nothing\n"
                                     "    kld.nn.KLDivLoss(temprature=2.0)\n    attached.wide\n    published.wide\n")
    good = check(config, "good.py", cwd=tmp_path)
    assert good.returncode == 0, good.stdout + good.stderr
    bad = check(config, "bad.py", cwd=tmp_path)
    for text in ('incompatible type "str"', 'argument "wrong"', 'argument "bad"', 'incompatible type "int"',
                 'argument "type"', 'no attribute "nothing"', 'argument "temprature"', '"Attached" has no attribute "wide"',
                 '"Published" has no attribute "wide"'):
        assert text in bad.stdout, bad.stdout


@pytest.mark.parametrize("name, is_there", [("functional.kl_div", True), ("nn.KLDivLoss", True), ("nothing", False)])
def test_import_kld_is_enough(name, is_there):
    """torch is imported by the first use of what needs it, not before; missing, it is said which."""
    first = "import sys, kld; assert 'torch' not in sys.modules\n"
    without = run(f"{first}sys.modules['torch'] = None\nkld.{name}")
    missing = "ImportError: kld.functional and kld.nn are for PyTorch" if is_there else "has no attribute 'nothing'"
    assert without.returncode == 1 and missing in without.stderr.splitlines()[-1], without.stderr
    if is_there:
        import_torch()
        used = run(f"{first}kld.{name}\nassert 'torch' in sys.modules")
        assert used.returncode == 0, used.stderr


def test_empty_of_the_default_connection(server):
    """In a process of its own: arrays that a request uses where they lie."""
    code = ("import kld\nq, p = kld.empty((64, 1000)), kld.empty((64, 1000), dtype='float64')\n"
            "q[:], p[:] = 0.5, 0.25\nresult = kld.kl_div(q, p, grad='both')\n"
            "print(q.dtype, p.dtype, round(result.loss, 3), kld.default_connection().copied_bytes)")
    said = run(code, KLD_SERVER=server.url_unix)
    assert said.stdout.split() == ["float32", "float64", "-173.287", "0"], said.stdout + said.stderr
    wrong = run("import kld\nkld.empty((2, 0))")
    assert "KldValueError: shape (2, 0); each dimension is at least 1" in wrong.stderr


def test_version():
    if (ROOT / "proto/VERSION").exists():
        assert kld.__version__ == (ROOT / "proto/VERSION").read_text().strip()
    assert kld.__version__ == _library.library().kld_version().decode()


@pytest.mark.skipif(INSTALLED, reason="the wheel brings its library")
def test_the_library_is_looked_for_where_it_is_said():
    code = "import kld; kld.connect('local:cpu')"
    assert run(code).returncode == 0
    missing = run(code, KLD_LIBRARY="/nowhere/libkld.so")
    assert "ImportError: kld: cannot load libkld" in missing.stderr and "KLD_LIBRARY" in missing.stderr
    wrong = run(code, KLD_LIBRARY="libm.so.6")
    assert "ImportError: kld: cannot load libkld" in wrong.stderr
    of_the_system = run(code, KLD_LIBRARY="", LD_LIBRARY_PATH=str(LIBRARY.parent))
    assert of_the_system.returncode == 0, of_the_system.stderr


@pytest.mark.skipif(INSTALLED, reason="a copy of the package beside the tree's library")
def test_another_version_of_the_library_is_refused(tmp_path):
    shutil.copytree(os.path.dirname(kld.__file__), tmp_path / "kld")
    (tmp_path / "kld/VERSION").write_text("9.9.9\n")
    said = run("import kld; kld.connect('local:cpu')", PYTHONPATH=str(tmp_path))
    assert f"is libkld {kld.__version__}, this package is 9.9.9" in said.stderr


def test_an_outcome_is_an_exception():
    for status in list(kld.Status)[1:]:
        error = _errors.from_status(int(status), "said so")
        assert isinstance(error, kld.KldError) and error.status is status and str(error) == "said so"
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and again.status is status and str(again) == "said so"
    expected = {"INVALID": ValueError, "DEADLINE": TimeoutError, "FORBIDDEN": PermissionError,
                "UNAVAILABLE": ConnectionError, "DEVICE_LOST": ConnectionError, "NO_MEMORY": MemoryError,
                "UNIMPLEMENTED": NotImplementedError, "NOT_FOUND": LookupError, "GONE": LookupError}
    for name, builtin in expected.items():
        assert isinstance(_errors.from_status(int(kld.Status[name]), ""), builtin)
    assert str(_errors.from_status(999, "new")) == "status 999: new"


@pytest.mark.parametrize("url, error, text", [
    ("socket:/nowhere", ValueError, "unknown kind of server"),
    ("local:quantum", kld.KldError, "quantum"),
    ("unix:/nowhere/kld.sock", ConnectionError, "."),
    ("http://127.0.0.1:1", ConnectionError, "."),
    ("local:cpu\0x", ValueError, "has a NUL"),
    (7, TypeError, "url is a text or a list of texts, not int")])
def test_no_connection(url, error, text):
    with pytest.raises(error, match=text) as raised:
        kld.connect(url, connect_timeout=0.2)
    assert isinstance(raised.value, kld.KldError) and str(raised.value)


@pytest.mark.parametrize("more, error, text", [
    ({"token": "a\0b"}, ValueError, "has a NUL"), ({"client_name": "a\0b"}, ValueError, "has a NUL"),
    ({"token": 3}, TypeError, "token is a text, not int"), ({"client_name": None}, TypeError, "client_name is a text"),
    ({"threads": "all"}, TypeError, "threads is a whole number, not str"), ({"threads": True}, TypeError, "not bool"),
    ({"threads": -1}, ValueError, "threads is -1; expected 0 to"),
    ({"staging_bytes_max": 1 << 64}, ValueError, "staging_bytes_max is"),
    ({"cache_bytes_max": 1.5}, TypeError, "cache_bytes_max is a whole number, not float"),
    ({"connect_timeout": "long"}, TypeError, "connect_timeout is a number, not str"),
    ({"threads": np.bool_(True)}, TypeError, "threads is a whole number, not bool"),
    ({"cert_file": 5}, TypeError, "cert_file is a path, not int"), ({"key_file": "\0"}, ValueError, "key_file .* has a NUL"),
    ({"ca_file": 5}, TypeError, "ca_file is a path, not int"), ({"ca_file": "a\0b"}, ValueError, "ca_file .* has a NUL"),
    ({"connect_timeout": float("inf")}, ValueError, "connect_timeout is a number of seconds above 0 and below 1e9, not inf"),
    ({"connect_timeout": 0}, ValueError, "above 0")])
def test_what_connect_refuses(more, error, text):
    with pytest.raises(error, match=text) as raised:
        kld.connect("local:cpu", **more)
    assert isinstance(raised.value, kld.KldError)


def test_a_token_is_asked_for(make_server, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"me {hashlib.sha256(b'right').hexdigest()} infer\n")
    server = make_server(tokens=str(tokens))
    for token in (None, "wrong"):
        with pytest.raises(PermissionError) as raised:
            with kld.connect(server.http, token=token) as connection:
                connection.kl_div(Q, P)
        assert raised.value.status is kld.Status.UNAUTHENTICATED
    with kld.connect(server.http, token="right") as connection:
        assert connection.kl_div(Q, P).loss > 0


@pytest.fixture
def https(make_server, tmp_path):
    """A server with a certificate of its own: (it, its URL, the certificate)."""
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key", "-out", "certificate",
                    "-subj", "/CN=kld", "-addext", "subjectAltName=IP:127.0.0.1"], cwd=tmp_path, check=True,
                   capture_output=True)
    server = make_server(tls_cert=tmp_path / "certificate", tls_key=tmp_path / "key")
    return server, server.http.replace("http:", "https:"), str(tmp_path / "certificate")


def pump(source, sink):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def test_a_tls_handshake_that_is_cut_is_tried_again(https):
    server, url, trusted = https
    host, port = server.http.rpartition("/")[2].split(":")
    door, ends, cut = socket.create_server(("127.0.0.1", 0)), [], []

    def serve():
        with contextlib.suppress(OSError):
            while True:
                client = door.accept()[0]
                if len(cut) == 1:  # in the middle of the greeting
                    cut.append(client.recv(100))
                    client.close()
                    continue
                ends.append((client, socket.create_connection((host, port))))
                for pair in (ends[-1], ends[-1][::-1]):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with kld.connect(url.replace(f":{port}", f":{door.getsockname()[1]}"), ca_file=trusted) as connection:
        right = connection.kl_div(Q, P)
        cut.append(None)
        for pair in ends:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        assert connection.kl_div(Q, P).loss == right.loss
        assert len(cut) == 2 and len(cut[1]) > 0
    door.shutdown(socket.SHUT_RDWR)
    thread.join(60)
    for end in (door, *(end for pair in ends for end in pair)):
        end.close()


def test_https(https, monkeypatch):
    server, url, trusted = https
    with kld.connect(url, ca_file=trusted) as connection:
        right = connection.kl_div(Q, P)
    with kld.connect(server.url_unix) as connection:
        assert connection.kl_div(Q, P).loss == right.loss
    with pytest.raises(kld.KldPermissionError, match="certificate is not trusted"):
        kld.connect(url, connect_timeout=1)
    # Where the system has its certificates elsewhere than Debian, Python knows where.
    monkeypatch.setattr(_opening, "CERTIFICATES", "/nowhere")
    monkeypatch.setenv("SSL_CERT_FILE", trusted)
    with kld.connect(url) as connection:
        assert connection.kl_div(Q, P).loss == right.loss


def test_a_client_certificate(make_server, https, tmp_path):
    """The server's own serves as the CA that clients have to be of."""
    trusted, key = tmp_path / "certificate", tmp_path / "key"
    server = make_server(tls_cert=trusted, tls_key=key, tls_client_ca=trusted)
    url = server.http.replace("http:", "https:")
    with kld.connect(url, ca_file=trusted, cert_file=trusted, key_file=key) as connection:
        assert connection.kl_div(Q, P).loss > 0
    with pytest.raises(PermissionError, match="wants a client certificate and none was shown"):
        kld.connect(url, ca_file=trusted)
    for cert, private, said in ((tmp_path / "none", key, "cert_file .*/none: No such file or directory"),
                                (trusted, tmp_path / "none", "key_file .*/none: No such file or directory"),
                                (trusted, trusted, "not a PEM certificate and its key"),
                                (None, key, "key_file without cert_file; expected both")):
        with pytest.raises(ValueError, match=said):
            kld.connect(url, ca_file=trusted, cert_file=cert, key_file=private)


def test_about_a_server(server):
    with kld.connect(server.url_unix, client_name="about") as connection:
        assert connection.info().backend == server.backend and connection.info().device
        assert 0 < connection.ping() < 60
        before = connection.stats()["requests_total"]
        connection.kl_div(Q, P)
        assert connection.stats()["requests_total"] == before + 1
        assert repr(connection) == f"<kld.Connection {server.url_unix}>"
    assert connection.closed and "(closed)" in repr(connection)
    for use in (connection.info, connection.ping, connection.stats, lambda: connection.kl_div(Q, P),
                lambda: connection.empty(3)):
        with pytest.raises(ConnectionError, match="was closed"):
            use()
    connection.close()
    with kld.connect(server.http) as connection, pytest.raises(NotImplementedError):
        connection.stats()
    assert copy.copy(connection) is copy.deepcopy([connection])[0] is connection
    with pytest.raises(TypeError, match="belongs to its process"):
        pickle.dumps(connection)


@pytest.mark.parametrize("keeper", ["sys.excepthook", "threading.excepthook", "os.kept", "numpy.kept", "builtins.kept"])
def test_nothing_is_said_at_the_end_of_what_a_module_keeps(server, keeper):
    """Until the modules are emptied, ours too: a function of __main__ keeps all of __main__'s."""
    result = run(f"""
import builtins, os, sys, threading, numpy, kld
url = os.environ["KLD_SERVER"]
connection, local = kld.connect(url), kld.connect("local:cpu")
arrays = [connection.empty((100, 1000)), local.empty((100, 1000))]
published = connection.publish("test/kept", arrays[0])
attached = kld.connect(url).attach("test/kept")
{keeper} = lambda *_: None
""", KLD_SERVER=server.url_unix)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("when", ["del connection", "pass"])
def test_errors_are_told_where_a_connection_goes(when):
    result = run(f"""
import kld
connection = kld.connect("local:cpu")
kld._connection._library = None
{when}
""")
    assert result.returncode == 0 and "'NoneType' object has no attribute 'library'" in result.stderr


def test_the_default_connection(server):
    code = ("import kld, numpy; c = kld.default_connection(); print(c.url, c is kld.default_connection(), "
            "kld.kl_div(numpy.float32([[.5, .5]]), numpy.float32([[.25, .75]])).loss); c.close(); "
            "print(kld.default_connection().closed)")
    for url in (server.url_unix, ""):
        result = run(code, KLD_SERVER=url)
        assert result.returncode == 0, result.stderr
        said = result.stdout.split()
        assert said[0] == (url or "local:") and said[1] == "True" and said[3] == "False"
        assert float(said[2]) == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5), rel=1e-6)


def test_after_fork_a_connection_is_the_parents(server):
    with kld.connect(server.url_unix) as connection:
        array = connection.empty((64, 1024))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                connection.kl_div(Q, P)
            except ConnectionError as error:
                code = 0 if "connect again in the child" in str(error) else 2
            del array  # gives nothing back in the name of the parent
            connection.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        array[:] = 1 / 1024
        assert connection.kl_div(array, array).loss == 0


@pytest.mark.parametrize("way", ["unix", "local"])
def test_threads_take_turns(server, way):
    failures = []
    with kld.connect(server.url_unix if way == "unix" else "local:cpu") as connection:
        def work(seed):
            q, p = probabilities(seed, (64, 600)), probabilities(seed + 100, (64, 600))
            truth = (p.astype(float) * np.log(p.astype(float) / q)).sum() / 64
            for _ in range(20):
                result = connection.kl_div(q, p)
                if abs(result.loss - truth) > 1e-5 * truth or not np.allclose(
                        result.grad_predictions, -p / q / 64, rtol=1e-5):
                    failures.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures


def test_a_child_made_while_another_thread_connects():
    """It has its own lock of the default connection: the parent's may be taken for ever."""
    program = """
import os, signal, threading, kld
from kld import _default
taken, over = threading.Event(), threading.Event()
def hold():
    with _default._lock:
        taken.set()
        over.wait(20)
thread = threading.Thread(target=hold)
thread.start()
taken.wait()
child = os.fork()
if child == 0:
    signal.alarm(5)
    os._exit(0 if kld.kl_div([[0.5, 0.5]], [[0.5, 0.5]]).loss == 0 else 1)
print(os.waitpid(child, 0)[1])
over.set()
thread.join()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60,
                          env=environment(KLD_SERVER="local:cpu"))
    assert done.stdout == "0\n", done.stderr


def test_a_host_that_vanishes_is_noticed():
    """A call over HTTP that waits without a limit: its connection asks whether the server's host is still there."""
    program = """
import sys, kld, numpy
kld.connect(sys.argv[1]).kl_div(numpy.ones((1, 4), numpy.float32) / 4, numpy.ones((1, 4), numpy.float32) / 4)
"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = subprocess.Popen([sys.executable, "-c", program, f"http://127.0.0.1:{port}"], env=environment())
        try:
            listener.settimeout(20)
            connection, (_, theirs) = listener.accept()
            with connection:
                connection.recv(65536)  # and says nothing

                def timer():
                    ends = f"0100007F:{theirs:04X} 0100007F:{port:04X}"
                    lines = [line for line in pathlib.Path("/proc/net/tcp").read_text().splitlines() if ends in line]
                    return lines and lines[0].split()[5].split(":")
                wait_until(lambda: timer() and timer()[0] == "02", what="a timer of keepalive")
                assert int(timer()[1], 16) <= 16 * os.sysconf("SC_CLK_TCK"), timer()
        finally:
            client.kill()
            client.wait()
