"""Tensors of gigabytes over HTTP: every row arrives where it belongs."""
import json
import os
import pathlib
import re

import numpy as np
import pytest

from httplib import SANITIZED, memory_of, probabilities
from oip import INFER, LENGTH, Connection


# ---- More than 32 bits ----------------------------------------------------------------------------

ROWS, CLASSES = 4097, 1 << 17  # of FP32: 2 GiB and a row
PERIODS = 61, 59  # of rows; no power of two, so that a row that lies 2^k bytes from where it belongs is another one


def divergences(q, p):
    """KL(p[i], q[j]) of all pairs, in FP64."""
    q, p = q.astype("<f8"), p.astype("<f8")
    return (p * np.log(p)).sum(1)[:, None] - p @ np.log(q).T


def memory_available():
    return int(re.search(r"MemAvailable:\s+(\d+)", pathlib.Path("/proc/meminfo").read_text()).group(1)) << 10


@pytest.mark.skipif(SANITIZED, reason="minutes under a sanitizer")
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
