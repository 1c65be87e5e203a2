"""Tensors of gigabytes over HTTP: every row arrives where it belongs, and the gateway's memory is what it was."""
import gzip
import itertools
import json
import os
import pathlib
import re
import socket

import numpy as np
import pytest

import oip
from conftest import wait_until
from httplib import POOL, close, is_sanitized, memory_of, probabilities
from oip import INFER, LENGTH, Connection, infer


# ---- More than 32 bits ----------------------------------------------------------------------------

ROWS, CLASSES = 4097, 1 << 17  # of FP32: 2 GiB and a row
PERIODS = 61, 59  # of rows; no power of two, so that a row that lies 2^k bytes from where it belongs is another one


def divergences(q, p):
    """KL(p[i], q[j]) of all pairs, in FP64."""
    q, p = q.astype("<f8"), p.astype("<f8")
    return (p * np.log(p)).sum(1)[:, None] - p @ np.log(q).T


def memory_available():
    return int(re.search(r"MemAvailable:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text()).group(1)) << 10


def test_a_staged_body_larger_than_caches(make_server):
    """It is copied past them, from wherever it comes to wherever it belongs: the JSON before it has any length."""
    server = make_server()
    rows, classes = 1031, 8209  # two tensors of 64 MiB and a bit, which default staging takes whole
    q, p = (np.resize(probabilities((count, classes), seed), (rows, classes)) for seed, count in enumerate(PERIODS))
    truth = (p.astype("<f8") * (np.log(p.astype("<f8")) - np.log(q.astype("<f8")))).sum(1)
    for padding in range(3):
        _, found = infer(server, {"predictions": q, "targets": p}, {"row_loss": {"binary_data": True}}, id="x" * (1 + 11 * padding))
        np.testing.assert_allclose(found["row_loss"], truth, rtol=1e-5)


@pytest.mark.skipif(is_sanitized(), reason="minutes under a sanitizer")
@pytest.mark.skipif(memory_available() < 9 << 30 and os.environ.get("CI") != "true", reason="needs 9 GiB of memory")
def test_more_than_two_gib(make_server):
    """Two tensors of 2 GiB each and as large a gradient: sizes and offsets are 64 bits all the way. Each row is compared."""
    server = make_server(http_deadline_ms=600000)
    q, p = (probabilities((rows, CLASSES), seed) for seed, rows in enumerate(PERIODS))
    head = json.dumps({
        "inputs": [{"name": name, "shape": [ROWS, CLASSES], "datatype": "FP32",
                    "parameters": {"binary_data_size": 4 * ROWS * CLASSES}} for name in ("predictions", "targets")],
        "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in ("row_loss", "grad_predictions")],
        "parameters": {"reduction": "sum"}}).encode()
    with Connection(server, timeout=280) as connection:
        http = connection.http
        http.putrequest("POST", INFER)
        http.putheader("Content-Length", str(len(head) + 8 * ROWS * CLASSES))
        http.putheader(LENGTH, str(len(head)))
        http.endheaders(head)
        for block in (q, p):
            for at in range(0, ROWS, len(block)):
                http.send(memoryview(block[:ROWS - at]).cast("B"))
        reply = http.getresponse()
        said = json.loads(reply.read(int(reply.headers[LENGTH])))
        assert reply.status == 200, said
        assert [output["parameters"]["binary_data_size"] for output in said["outputs"]] == [4 * ROWS, 4 * ROWS * CLASSES]
        losses = np.frombuffer(reply.read(4 * ROWS), "<f4")
        row, wrong = np.empty(CLASSES, "<f4"), []
        for i in range(ROWS):
            assert reply.readinto(memoryview(row).cast("B")) == row.nbytes
            truth = -p[i % PERIODS[1]] / q[i % PERIODS[0]]
            if not (np.abs(row - truth) <= 2e-6 * np.abs(truth)).all():
                wrong.append(i)
        assert not wrong and reply.read() == b"", wrong[:10]
    rows = np.arange(ROWS)
    np.testing.assert_allclose(losses, divergences(q, p)[rows % PERIODS[1], rows % PERIODS[0]], rtol=2e-5)
    assert server.metrics()["kld_http_received_bytes_total"] > 1 << 32
    assert server.metrics()["kld_http_sent_bytes_total"] > 1 << 31
    assert memory_of(server.child("gateway"))["peak"] < 200 << 20


def members(blocks, compressed):
    """The body's pieces: each array of rows as often as ROWS needs it; compressed: a member of gzip each."""
    for block in blocks:
        whole, rest = divmod(ROWS, len(block))
        pieces = [block.tobytes(), block[:rest].tobytes()]
        pieces = [gzip.compress(piece, 1) for piece in pieces] if compressed else pieces
        yield from [pieces[0]] * whole + [pieces[1]]


@pytest.mark.skipif(is_sanitized(), reason="minutes under a sanitizer")
@pytest.mark.skipif(memory_available() < 9 << 30 and os.environ.get("CI") != "true", reason="needs 9 GiB of memory")
@pytest.mark.parametrize("compressed", [False, True], ids=["chunks", "gzip in chunks"])
def test_more_than_two_gib_without_a_length(make_server, compressed):
    """The same where nothing says how much will come. A row is 2,048 times the same 64 classes: losses are far apart."""
    server = make_server(http_deadline_ms=600000)
    q, p = (probabilities((rows, 64), seed) / (CLASSES // 64) for seed, rows in enumerate(PERIODS))
    head = json.dumps({
        "inputs": [{"name": name, "shape": [ROWS, CLASSES], "datatype": "FP32",
                    "parameters": {"binary_data_size": 4 * ROWS * CLASSES}} for name in ("predictions", "targets")],
        "outputs": [{"name": "row_loss", "parameters": {"binary_data": True}}],
        "parameters": {"reduction": "sum"}}).encode()
    wide = (np.tile(rows.astype("<f4"), CLASSES // 64) for rows in (q, p))
    with Connection(server, timeout=280) as connection:
        begin = [gzip.compress(head) if compressed else head]
        connection.http.request("POST", INFER, itertools.chain(begin, members(wide, compressed)),
                                {LENGTH: str(len(head)), **({"Content-Encoding": "gzip"} if compressed else {})},
                                encode_chunked=True)
        reply = connection.http.getresponse()
        answer = reply.read()
        assert reply.status == 200, answer
    losses = np.frombuffer(answer[int(reply.headers[LENGTH]):], "<f4")
    rows = np.arange(ROWS)
    truth = divergences(q, p)[rows % PERIODS[1], rows % PERIODS[0]] * (CLASSES // 64)
    np.testing.assert_allclose(losses, truth, rtol=2e-5)
    assert len(set(truth.round(5))) > 1000
    assert (server.metrics()["kld_http_received_bytes_total"] > 1 << 32) != compressed
    assert memory_of(server.child("gateway"))["peak"] < 200 << 20


# ---- A large reply --------------------------------------------------------------------------------

def test_slow_readers_of_large_gradients(make_server):
    """64 MB each for three who take them a little at a time: not their size but staging is what the gateway holds."""
    staging = 4 << 20
    server = make_server(staging_bytes_max=staging, staging_request_bytes_max="1M", http_slow_ms=600000)
    q, p = probabilities((1000, 16000), 1), probabilities((1000, 16000), 2)
    headers, data = oip.body({"predictions": q, "targets": p}, {"grad_predictions": {"binary_data": True}})
    small = probabilities((1000, 1003), 3)
    for _ in range(2):
        infer(server, {"predictions": small, "targets": small}, {"grad_predictions": {"binary_data": True}})
    gateway, readers, held = server.child("gateway"), [], []
    before = memory_of(gateway)
    host, port = server.address.rsplit(":", 1)
    lines = [f"POST {INFER} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}", f"{LENGTH}: {headers[LENGTH]}"]
    try:
        for _ in range(3):
            readers.append(socket.socket())
            readers[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            readers[-1].settimeout(60)
            readers[-1].connect((host, int(port)))
            readers[-1].sendall("\r\n".join([*lines, "", ""]).encode() + data)
        replies = [reader.makefile("rb", 65536) for reader in readers]
        left, parts = [], [[] for _ in replies]
        for reply in replies:
            reply_head = b"".join(iter(reply.readline, b"\r\n"))
            left.append(int(re.search(rb"(?i)^content-length: (\d+)", reply_head, re.M).group(1)))
        while any(left):
            for i, reply in enumerate(replies):
                parts[i].append(reply.read(min(left[i], 1 << 20)))
                left[i] -= len(parts[i][-1])
            held.append(memory_of(gateway))
    finally:
        for reader in readers:
            reader.close()
    truth = oip.expected(q, p)["grad_predictions"]
    for got in parts:
        close(np.frombuffer(b"".join(got)[-q.nbytes:], "<f4").reshape(q.shape), truth, "FP32")
    assert len(held) >= 60
    assert max(one["shared"] for one in held) < staging + (1 << 20)
    assert is_sanitized() or max(one["own"] for one in held) < before["own"] + (4 << 20)
    wait_until(lambda: server.metrics()["kld_staging_bytes"] == server.metrics()[POOL] == 0, what="free memory")
