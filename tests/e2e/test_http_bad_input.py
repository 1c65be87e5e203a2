"""Whatever a client sends over HTTP: a clear error, a server that goes on, nothing left behind."""
import gzip
import json
import os
import re
import socket
import subprocess
import time

import pytest

import oip
from conftest import ROOT, wait_until
from httplib import PREFIX, Shared, fds_of, in_region, probabilities, register, unregister
from oip import INFER, LENGTH, Connection, infer

Q, P = probabilities((2, 3), 1), probabilities((2, 3), 2)


@pytest.fixture(scope="module")
def server(backend):
    """Small limits; what a whole file of bad input leaves behind is counted at the end."""
    from conftest import SANITIZER, Server
    one = Server(backend=backend, shm_prefix=PREFIX, body_bytes_max="2M", json_bytes_max="256K",
                 staging_bytes_max="1200K", http_regions_max=3)
    infer(one, {"predictions": Q, "targets": P})
    large = probabilities((400, 500), 3)
    infer(one, {"predictions": large, "targets": large})  # makes the connection to the device's pool
    gateway, worker = one.child("gateway"), one.child("worker")
    base = fds_of(gateway), fds_of(worker)
    yield one
    truth = oip.expected(Q, P)["loss"][0]
    assert abs(infer(one, {"predictions": Q, "targets": P})[1]["loss"][0] - truth) < 1e-6
    assert (one.child("gateway"), one.child("worker")) == (gateway, worker), "a child died"

    def clean():
        metrics = one.metrics()
        return metrics["kld_staging_bytes"] == 0 and metrics["kld_http_requests_in_flight"] == 0 and \
            fds_of(gateway) <= base[0] + 1 and fds_of(worker) <= base[1]
    wait_until(clean, what="a clean server")
    status = one.stop()
    log = one.log()
    one.remove()
    assert status == 0 and not SANITIZER.search(log), log


def talk(server, text):
    """All that comes until the server ends the connection."""
    host, port = server.http.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(text)
        got = b""
        while more := connection.recv(65536):
            got += more
    return got


@pytest.mark.parametrize("length", ["Content-Length: 0\r\n", ""])
@pytest.mark.parametrize("first", ["GET /v2/health/live", "GET /v2", "DELETE /v2/tensors/none"])
def test_expecting_without_a_body_takes_no_answer_away(server, first, length):
    """What is pipelined behind such a request is not its body."""
    last = "GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    got = talk(server, f"{first} HTTP/1.1\r\nHost: localhost\r\n{length}Expect: 100-continue\r\n\r\n{last}".encode())
    assert got.count(b"HTTP/1.1 ") == 2 and b"HTTP/1.1 100 " not in got, got


def tensor(name, shape=(2, 3), datatype="FP32", **rest):
    return {"name": name, "shape": list(shape), "datatype": datatype, **rest}


def request(**changes):
    whole = {"inputs": [tensor("predictions", data=Q.tolist()), tensor("targets", data=P.tolist())]}
    whole.update(changes)
    return whole


def refused(server, body, headers=None, status=400, part=""):
    """One connection: the error, and then a good request over the same connection."""
    data = json.dumps(body).encode() if isinstance(body, dict | list) else body
    with Connection(server) as connection:
        got, reply_headers, reply = connection.ask("POST", INFER, data, headers)
        assert got == status, reply
        assert reply_headers["Content-Type"] == "application/json"
        assert status != 400 or reply_headers["KLD-Status"] == "invalid"
        text = json.loads(reply)["error"]
        assert part in text, text
        assert "/dev/shm" not in text and "kld-test" not in text and "0x" not in text
        good_headers, good = oip.body({"predictions": Q, "targets": P})
        if reply_headers.get("Connection", "").lower() != "close":
            assert connection.ask("POST", INFER, good, good_headers)[0] == 200
    return text


BIG = "9" * 30
JSON_CASES = {
    "empty": (b"", "too early"),
    "not json": (b"hello", "not valid"),
    "array": (b"[]", "object"),
    "trailing": (b"{} {}", "behind"),
    "not utf-8": (b'{"id":"\xff\xfe"}', "UTF-8"),
    "overlong utf-8": (b'{"id":"\xc0\xaf"}', "UTF-8"),
    "nul": (b'{"id":"a\x00"}', "control"),
    "utf-16": ('{"id":"a"}'.encode("utf-16"), "not valid"),
    "deep arrays": (b"[" * 100000, "nesting"),
    "deep objects": (b'{"a":' * 30000, "nesting"),
    "deep data": (b'{"inputs":[{"data":' + b"[" * 100 + b"]" * 100 + b"}]}", "nesting"),
    "duplicated": (b'{"inputs":[],"inputs":[]}', "twice"),
    "duplicated in a tensor": (b'{"inputs":[{"name":"targets","name":"targets"}]}', "twice"),
    "duplicated data": (b'{"inputs":[{"data":[1],"data":[1]}]}', "twice"),
    "nan": (b'{"inputs":[{"data":[NaN]}]}', "not JSON"),
    "huge number": (b'{"id":' + b"1" * 100000 + b"}", "60 characters"),
    "case": (b'{"Inputs":[]}', "unknown key 'Inputs'"),
    "many keys": (json.dumps({str(i): i for i in range(1000)}).encode(), "keys"),
}


@pytest.mark.parametrize("name", JSON_CASES)
def test_json(server, name):
    body, part = JSON_CASES[name]
    refused(server, body, part=part)


REQUESTS = {
    "no inputs": ({}, "inputs"),
    "unknown key": (request(input=[]), "unknown key 'input'"),
    "targets missing": (request(inputs=[tensor("predictions", data=Q.tolist())]), "missing"),
    "predictions missing": (request(inputs=[tensor("targets", data=Q.tolist())]), "missing"),
    "same input twice": (request(inputs=[tensor("targets", data=Q.tolist())] * 2), "twice"),
    "many inputs": (request(inputs=[tensor(f"t{i}", data=[]) for i in range(50)]), "unknown input"),
    "shapes differ": (request(inputs=[tensor("predictions", data=Q.tolist()),
                                      tensor("targets", (3, 2), data=P.tolist())]), "[3,2]"),
    "overflow": (request(inputs=[tensor("predictions", [2 ** 32, 2 ** 32, 2], data=[1])]), "2^40"),
    "more than 2^53": (request(inputs=[tensor("predictions", [2 ** 60], data=[1])]), 
                       "predictions: dimension 0 of the shape must be a whole number from 1 to 2^40"),
    "negative": (request(inputs=[tensor("predictions", [-1, 3], data=[1])]), "whole"),
    "fraction": (request(inputs=[tensor("predictions", [1.5], data=[1])]), "whole"),
    "text": (request(inputs=[tensor("predictions", ["1"], data=[1])]), "whole"),
    "zero": (request(inputs=[tensor("predictions", [0, 3], data=[])]), "is 0"),
    "rank 9": (request(inputs=[tensor("predictions", [1] * 9, data=[1])]), "rank"),
    "rank 0": (request(inputs=[tensor("predictions", [], data=[1])]), "rank"),
    "too few numbers": (request(inputs=[tensor("predictions", data=[1, 2]),
                                        tensor("targets", data=P.tolist())]), "6 elements"),
    "nested otherwise": (request(inputs=[tensor("predictions", data=[[1, 2], [3, 4], [5, 6]]),
                                         tensor("targets", data=P.tolist())]), "nested"),
    "text in data": (request(inputs=[tensor("predictions", data=["1"] * 6),
                                     tensor("targets", data=P.tolist())]), "number"),
    "does not fit FP32": (request(inputs=[tensor("predictions", data=[1e300] * 6),
                                          tensor("targets", data=P.tolist())]), "FP32"),
    "dtype": (request(inputs=[tensor("predictions", datatype="FP8", data=[])]), "FP32, FP64"),
    "integers": (request(inputs=[tensor("predictions", datatype="UINT8", data=[1] * 6),
                                 tensor("targets", data=P.tolist())]), "expected FP32"),
    "half as json": (request(inputs=[tensor("predictions", datatype="FP16", data=[1] * 6)]), "binary"),
    "two sources": (request(inputs=[tensor("predictions", data=[1] * 6, parameters={
        "binary_data_size": 24})]), "exactly one"),
    "no source": (request(inputs=[tensor("predictions")]), "exactly one"),
    "wrong size": (request(inputs=[tensor("predictions", parameters={"binary_data_size": 23})]), "24"),
    "unknown output": (request(outputs=[{"name": "lose"}]), "loss, row_loss"),
    "classification": (request(outputs=[{"name": "loss", "parameters": {"classification": 1}}]),
                       "unknown key"),
    "divergence": (request(parameters={"divergence": "kl"}), "forward_kl, reverse_kl"),
    "form": (request(parameters={"targets_form": "log"}), "probs, logprobs, logits"),
    "reduction": (request(parameters={"reduction": "avg"}), "batchmean"),
    "parameter": (request(parameters={"temprature": 2}), "temperature"),
    "does not fit its form": (request(parameters={"temperature": 2}), "logits"),
    "beta": (request(parameters={"beta": 0.5}), "does not fit divergence"),
    "normalizer": (request(parameters={"reduction": "sum", "normalizer": 2}), "does not fit reduction"),
    "zero normalizer": (request(parameters={"normalizer": 0}), "greater than 0"),
    "grad_output": (request(parameters={"grad_output": 2}), "no gradient"),
    "timeout": (request(parameters={"timeout": "soon"}), "timeout"),
    "mask shape": (request(inputs=[tensor("predictions", data=Q.tolist()),
                                   tensor("targets", data=P.tolist()),
                                   tensor("row_mask", [3], "BOOL", data=[1, 1, 1])]), "row_mask"),
    "mask value": (request(inputs=[tensor("predictions", data=Q.tolist()),
                                   tensor("targets", data=P.tolist()),
                                   tensor("row_mask", [2], "BOOL", data=[1, 2])]), "row_mask"),
    "weights dtype": (request(inputs=[tensor("predictions", data=Q.tolist()),
                                      tensor("targets", data=P.tolist()),
                                      tensor("row_weights", [2], "FP64", data=[1, 2])]), "FP32"),
    "id": (request(id=5), "'id'"),
    "long id": (request(id="a" * 5000), "'id'"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_request(server, name):
    body, part = REQUESTS[name]
    refused(server, body, part=part, status=413 if name == "overflow" else 400)


@pytest.mark.parametrize("parameters, part", [
    ({"divergence": "js", "beta": 1.5}, "beta must be in [0, 1], not 1.5"),
    ({"divergence": "js", "beta": -0.1}, "beta must be in [0, 1]"),
    ({"divergence": "js", "skew": 0.1}, "skew does not fit divergence 'js'"),
    ({"divergence": "tv", "beta": 0.5}, "beta does not fit divergence 'tv'"),
    ({"divergence": "mixed_kl"}, "needs the parameter weight"),
    ({"divergence": "mixed_kl", "weight": 1.01}, "weight must be in [0, 1]"),
    ({"divergence": "skew_kl"}, "needs the parameter skew"),
    ({"divergence": "skew_reverse_kl", "skew": 1}, "skew must be in [0, 1)"),
    ({"weight": 0.5}, "weight does not fit divergence 'forward_kl'"),
    ({"divergence": "JS"}, "unknown divergence 'JS'; known: forward_kl, reverse_kl, jeffreys")])
def test_parameters_of_divergences(server, parameters, part):
    refused(server, request(parameters=parameters), part=part)


@pytest.mark.parametrize("value, part", [("-1", "whole"), ("x", "whole"), ("1e3", "whole"), ("", "whole"),
                                         ("99999999999999999999999", "whole"), ("100000", "whole body"),
                                         (" 12", ""), ("0", "too early"), ("1", "not valid")])
def test_header_length(server, value, part):
    headers, data = oip.body({"predictions": Q, "targets": P})
    refused(server, data, {LENGTH: value}, part=part)


@pytest.mark.parametrize("coding", [None, "gzip", "chunked"])
def test_header_length_beyond_the_body(server, coding):
    """Said by the time the body ends, where its length is not known before."""
    data = json.dumps(request()).encode()
    headers = {LENGTH: str(len(data) + 1)}
    if coding == "gzip":
        refused(server, gzip.compress(data), {**headers, "Content-Encoding": "gzip"}, part="the whole body has")
    elif coding == "chunked":
        refused(server, iter([data[:100], data[100:]]), headers, part="the whole body has")
    else:
        refused(server, data, headers, part="the whole body has")


def test_header_length_twice(server):
    data = json.dumps(request()).encode()
    lengths = f"{LENGTH}: {len(data)}\r\n{LENGTH}: 5\r\n"
    got = talk(server, f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n{lengths}\r\n"
               .encode() + data)
    assert got.startswith(b"HTTP/1.1 400 ") and b"more than once" in got, got


def test_header_length_over_its_limit(server):
    refused(server, b" " * 300000, {LENGTH: "300000"}, 413, "json_bytes_max")
    refused(server, b" " * 300000, None, 413, "json_bytes_max")
    refused(server, gzip.compress(b" " * 300000), {"Content-Encoding": "gzip"}, 413, "json_bytes_max")


def test_short_and_long_tails(server):
    headers, data = oip.body({"predictions": Q, "targets": P})
    refused(server, data[:-1], headers, part="47 came")
    refused(server, data + b"x", headers, part="goes on behind")
    refused(server, data[:int(headers[LENGTH])], headers, part="0 came")
    refused(server, data[:int(headers[LENGTH])], None, part="Inference-Header-Content-Length")


def test_body_that_ends_early(server):
    """The client promises more than it sends, and goes."""
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{{".encode())
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1000)
    wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 0, what="its end")


def test_too_large_bodies(server):
    # Announced: refused at once, and read up to a cap so that the client sees why.
    refused(server, b"x" * 3000000, None, 413, "body_bytes_max")
    # Not announced: refused as soon as it is over.
    q = probabilities((100, 200), 1)
    headers, data = oip.body({"predictions": q, "targets": q})
    with Connection(server) as connection:
        connection.http.request("POST", INFER, body=iter([data] + [b"x" * 65536] * 40), headers=headers,
                                encode_chunked=True)
        reply = connection.http.getresponse()
        assert reply.status in (400, 413)
        assert "error" in json.loads(reply.read())


def test_expect_and_too_large(server):
    """A client that asks first is told before it sends."""
    reply = subprocess.run(["curl", "-sS", "-i", server.http + INFER, "-H", "Expect: 100-continue", "-H",
                            "Content-Type: application/octet-stream", "--data-binary", "@-"],
                           input=b"x" * 50000000, capture_output=True).stdout
    assert b" 413 " in reply and b"100 Continue" not in reply and b"body_bytes_max" in reply


def test_bombs(server):
    headers = {"Content-Encoding": "gzip"}
    bomb = gzip.compress(b" " * 100_000_000, 9)
    begin = time.monotonic()
    refused(server, bomb, headers, 413, "json_bytes_max")
    q = probabilities((100, 200), 1)
    more, data = oip.body({"predictions": q, "targets": q})
    refused(server, gzip.compress(data + b"\0" * 100_000_000, 9), {**headers, **more}, 400, "goes on")
    assert time.monotonic() - begin < 20


def test_members_of_nothing_without_end(server):
    """Each is 20 bytes of gzip and not one of body."""
    refused(server, gzip.compress(b"") * 150000, {"Content-Encoding": "gzip"}, 413, "body_bytes_max")


def test_compression_that_is_none(server):
    headers, data = oip.body({"predictions": Q, "targets": P})
    packed = gzip.compress(data)
    refused(server, data, {**headers, "Content-Encoding": "gzip"}, part="Content-Encoding")
    refused(server, packed[:-9], {**headers, "Content-Encoding": "gzip"}, part="too early")
    refused(server, packed + b"x", {**headers, "Content-Encoding": "gzip"}, part="behind")
    refused(server, data, {**headers, "Content-Encoding": "br"}, 415, "gzip and deflate")


@pytest.mark.parametrize("codings, path", [
    (["gzip"], "/v2/repository/index"), (["br"], "/v2/repository/index"), (["identity", "gzip"], "/v2/repository/index"),
    (["gzip"], "/v2/systemsharedmemory/region/r/register"), (["deflate"], "/v2/cudasharedmemory/region/r/register"),
    (["gzip"], "/v2/systemsharedmemory/unregister"), (["gzip", "gzip"], INFER), (["identity", "gzip"], INFER),
    (["gzip", "identity"], INFER), (["gzip, gzip"], INFER)])
def test_codings_that_are_not_undone(server, codings, path):
    """A body is not read as what it is not."""
    packed = gzip.compress(oip.body({"predictions": Q, "targets": P})[1] if path == INFER else b"{}")
    lines = "".join(f"Content-Encoding: {coding}\r\n" for coding in codings)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(packed)}\r\n{lines}\r\n"
    reply = talk(server, head.encode() + packed)
    assert reply.startswith(b"HTTP/1.1 415 ") and b"KLD-Status: media" in reply, reply


def test_a_coding_of_no_body_is_none(server):
    assert server.request("/v2", headers={"Content-Encoding": "gzip"})[0] == 200
    assert server.request("/v2/repository/index", b"{}", {"Content-Encoding": "identity"})[0] == 200


def test_more_than_there_is(server):
    """2^40 elements, of which not one byte is sent."""
    huge = [tensor(n, [2 ** 20, 2 ** 20], parameters={"binary_data_size": 2 ** 42})
            for n in ("predictions", "targets")]
    head = json.dumps({"inputs": huge}).encode()
    refused(server, head, {LENGTH: str(len(head))}, 413, "bytes")


def test_json_reply_over_its_limit(server):
    for columns in (75000, 140000):  # known only when it is written; clear from the shape
        q, p = probabilities((1, columns), 1), probabilities((1, columns), 2)
        headers, data = oip.body({"predictions": q, "targets": p}, {"grad_predictions": None})
        refused(server, data, headers, 413, "binary_data")


@pytest.mark.parametrize("line", [b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00\x01\x02\x03\r\n\r\n",
                                  b"GET /" + b"a" * 200000 + b" HTTP/1.1\r\n\r\n",
                                  b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                                  b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
                                  b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 50000 + b"\r\n"])
def test_not_http(server, line):
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 60) as connection:
        try:
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        except OSError:
            pass
    assert server.request("/v2/health/live")[0] == 200


@pytest.mark.parametrize("text, status", [
    (b"GET / HTTP/1.1 x\r\n\r\n", 400), (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nA\r\n\r\n", 400),
    (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", 505), (b"POST /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", 400),
    (f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".encode(), 400),
    (b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
    (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + b"A: bbbbbbbb\r\n" * 6000 + b"\r\n", 431)])
def test_what_the_library_answers(server, text, status):
    """Not in JSON, as proto/README.md says; with the right status and the end of the connection."""
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 60) as connection:
        answer = b""
        try:
            connection.sendall(text)
            while got := connection.recv(65536):
                answer += got
        except ConnectionResetError:
            pass
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer


@pytest.mark.parametrize("length, status", [("2 ", 400), ("2\t", 400), ("+2", 400), ("-2", 400), ("2, 2", 400), ("0x2", 400),
                                            ("", 400), (str(1 << 64), 413)])
def test_what_the_library_answers_to_a_length(server, length, status):
    """Its page begins with the reply's own head once more, as proto/README.md says, which its length does not count."""
    got = talk(server, f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{{}}".encode())
    head, body = got.split(b"\r\n\r\n", 1)
    assert head.startswith(f"HTTP/1.1 {status} ".encode()) and b"KLD-Status" not in got and b"Connection: close" in head, got
    assert int(re.search(rb"Content-Length: (\d+)", head).group(1)) == len(body) - len(head) - 4, got
    assert body.startswith(head + b"\r\n\r\n<html>"), got


@pytest.mark.parametrize("chunk", ["1" + "0" * 16, "f" * 17])
def test_what_the_library_answers_to_a_chunk(server, chunk):
    got = talk(server, f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n{chunk}\r\n".encode())
    assert got.startswith(b"HTTP/1.1 413 ") and got.count(b"HTTP/1.1") == 1 and b"KLD-Status" not in got, got


@pytest.mark.parametrize("kib, status", [(30, 200), (32, 431)])
def test_how_long_a_head_may_be(server, kib, status):
    assert server.request("/v2/health/live", headers={"X-Long": "a" * (kib << 10)})[0] == status


@pytest.mark.parametrize("headers, status", [
    (b"Content-Length: 2\r\nContent-Length: 3\r\n", 400),
    (b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", 400),
    (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n", 400),
    (b"Transfer-Encoding: gzip, chunked\r\n", 501), (b"Transfer-Encoding: identity\r\n", 501)])
def test_body_whose_end_is_not_clear(server, headers, status):
    """Answered at once and the connection closed: what follows may be a body or a request."""
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n".encode() + headers + b"\r\n")
        reply = b""
        while got := connection.recv(65536):
            reply += got
    assert reply.startswith(b"HTTP/1.1 %d " % status) and b'{"error":' in reply


# ---- Shared memory --------------------------------------------------------------------------------

def test_register_bodies(server):
    for body, status in [({}, 400), ({"key": 5, "byte_size": 1}, 400), ([], 400),
                         ({"key": PREFIX + "none", "byte_size": 1}, 404),
                         ({"key": "/other", "byte_size": 1}, 403),
                         ({"key": PREFIX + "a/../../etc/passwd", "byte_size": 1}, 400),
                         ({"key": PREFIX + "a", "byte_size": 0}, 400),
                         ({"key": PREFIX + "a", "byte_size": 1, "offset": -1}, 400),
                         ({"key": PREFIX + "a", "byte_size": 2 ** 60}, 400),
                         ({"key": PREFIX + "a", "byte_size": 1, "size": 1}, 400),
                         ({"key": "x" * 3000, "byte_size": 1}, 400)]:
        got, reply = server.json("/v2/systemsharedmemory/region/r/register", body)
        assert got == status and reply["error"], (body, reply)
        assert "/dev/shm" not in reply["error"] and PREFIX not in reply["error"]
    longest = json.dumps({"key": PREFIX + "\x7f" * 220, "byte_size": 1}).replace("\x7f", "\\u007f").encode()
    for length, status in [(len(longest), 404), (4096, 404), (4097, 413), (100000, 413)]:
        for body in (longest.ljust(length), iter([longest.ljust(length)])):
            assert server.request("/v2/systemsharedmemory/region/r/register", body, method="POST")[0] == status, length
    assert server.json("/v2/systemsharedmemory/status") == (200, [])


def test_the_longest_number(server):
    """As the documents of the protocol have it; more digits than that say nothing that FP64 could hold."""
    for length, status in ((60, 200), (61, 400)):
        data = [f"0.5{'0' * (length - 3)}"] * 2
        body = "".join(['{"inputs":['] + [f'{{"name":"{name}","shape":[1,2],"datatype":"FP32","data":[{",".join(data)}]}}{end}'
                                          for name, end in (("predictions", ","), ("targets", "]}"))])
        got, _, reply = server.request(INFER, body.encode())
        assert got == status and (status == 200 or b"60 characters" in reply), reply
    for document in ("README.md", "openapi.yaml"):
        assert "number has at most 60 characters" in (ROOT / "proto" / document).read_text(), document


def test_registering_is_off_by_default(make_server):
    other = make_server()
    with Shared(4096) as shared:
        status, reply = register(other, "r", shared, 4096)
        assert status == 403 and "shm_prefix" in reply["error"]


def test_regions_have_a_limit(server):
    with Shared(4096) as shared:
        assert [register(server, f"r{i}", shared, 64)[0] for i in range(4)] == [200, 200, 200, 503]
        assert register(server, "long", shared, 8192)[0] in (400, 503)
        unregister(server)
        status, reply = register(server, "long", shared, 4096, 4096)
        assert status == 400 and "4096" in reply["error"]


def in_regions(q_offset, p_offset, size=None):
    inputs = [in_region("predictions", (2, 3), q_offset), in_region("targets", (2, 3), p_offset)]
    if size is not None:
        inputs[0]["parameters"]["shared_memory_byte_size"] = size
    return {"inputs": inputs}


def test_regions_that_do_not_fit(server):
    refused(server, in_regions(0, 64), status=404, part="'r'")
    with Shared(4096) as shared:
        register(server, "r", shared, 1024)
        refused(server, in_regions(0, 1008), part="1024 bytes")
        refused(server, in_regions(2 ** 53 - 8, 0), part="do not fit")
        refused(server, in_regions(2 ** 64 - 8, 0), part="2^53")
        refused(server, in_regions(2, 64), part="multiple")
        refused(server, in_regions(0, 64, 20), part="24 bytes")
        refused(server, in_regions(0, 64, 28), part="24 bytes")
        unregister(server)


def test_region_that_was_cut_short(server):
    with Shared(8192) as shared:
        register(server, "r", shared, 8192)
        shared.map[:24], shared.map[64:88] = Q.tobytes(), P.tobytes()
        request_in = in_regions(4096, 4160)
        request_out = {**in_regions(0, 64), "outputs": [{"name": "grad_predictions", "parameters": {
            "shared_memory_region": "r", "shared_memory_offset": 8000, "shared_memory_byte_size": 24}}]}
        assert server.json(INFER, request_out)[0] == 200
        os.ftruncate(shared.fd, 4096)
        refused(server, request_in, part="shorter")
        refused(server, request_out, part="shorter")
        assert os.fstat(shared.fd).st_size == 4096
        assert server.json(INFER, in_regions(0, 64))[0] == 200  # what is left still serves
        unregister(server)
        refused(server, in_regions(0, 64), status=404)


def test_statuses_are_counted(server):
    before = server.metrics()
    refused(server, b"{")
    refused(server, REQUESTS["overflow"][0], status=413)
    after = server.metrics()
    for status in ("invalid", "too_large"):
        key = f'kld_requests_total{{front="http",status="{status}"}}'
        assert after[key] == before[key] + 1
    assert re.fullmatch(r"[0-9.]+", str(after["kld_http_request_seconds_sum"]))
