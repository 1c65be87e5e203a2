"""What cannot be put anywhere is not read: seen in bytes that the gateway has taken, and in those that its clients got rid of."""
import gzip
import json
import socket
import threading
import time

import numpy as np
import pytest

import oip
from conftest import wait_until
from httplib import POOL, probabilities
from oip import INFER, LENGTH, infer

STAGING, ASKERS = 4 << 20, 8
RECEIVED, IN_FLIGHT = "kld_http_received_bytes_total", "kld_http_requests_in_flight"
Q, P = probabilities((1000, 1000), 1), probabilities((1000, 1000), 2)


class Sender(threading.Thread):
    """One request, or the begin of it, in small parts; how much of it the socket took, and the status."""

    def __init__(self, server, method, path, headers, data, length=None):
        super().__init__()
        host, port = server.address.rsplit(":", 1)
        self.connection = socket.create_connection((host, int(port)), 120)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
        self.text = "\r\n".join(lines + [f"{k}: {v}" for k, v in headers.items()] + ["", ""]).encode() + data[:length]
        self.whole = length is None
        self.sent, self.status = 0, None
        self.start()

    def run(self):
        while self.sent < len(self.text):
            self.sent += self.connection.send(self.text[self.sent:self.sent + 65536])
        if self.whole:
            self.status = self.connection.recv(12)
            self.connection.close()


def settled(server, senders):
    """Bytes that the gateway has received, once nothing has moved for a second."""
    def state():
        return server.metrics()[RECEIVED], *[sender.sent for sender in senders]
    seen = [state()]

    def is_quiet():
        time.sleep(1)
        seen.append(state())
        return seen[-1] == seen[-2]
    wait_until(is_quiet, 60, "quiet")
    return seen[-1][0]


def fill_staging(server):
    """Requests that are all there but for a byte. -> what ends them."""
    headers, data = oip.body({"predictions": Q[:120], "targets": P[:120]})
    all_there = server.metrics()[RECEIVED] + 4 * (len(data) - 1)
    holders = [Sender(server, "POST", INFER, headers, data, len(data) - 1) for _ in range(4)]
    wait_until(lambda: server.metrics()[RECEIVED] == all_there, what="all of them")
    assert server.metrics()["kld_staging_bytes"] > STAGING * 0.9
    return lambda: [holder.connection.close() for holder in holders]


def fill_pool(server):
    path = "/v2/tensors/full"
    assert server.heard(path + "?datatype=FP32&shape=76,250000", bytes(76000000), method="PUT")[0] == 200
    return lambda: server.request(path, method="DELETE")


@pytest.mark.parametrize("put", [False, True], ids=["infer", "put"])
@pytest.mark.parametrize("fill", [fill_staging, fill_pool])
def test_bytes_stay_with_their_senders(make_server, fill, put):
    """64 MB wait, of which the gateway takes next to nothing. There is room again: all of it comes, once."""
    server = make_server(staging_bytes_max=STAGING, staging_request_bytes_max="1M", pool_bytes_max="78M",
                         http_deadline_ms=120000, http_slow_ms=120000)
    infer(server, {"predictions": Q, "targets": P})
    wait_until(lambda: server.metrics()[POOL] == 0, what="a free pool")
    empty = fill(server)
    holders = 4 * (fill is fill_staging)
    # Another loop may count the one before until its reply has gone.
    wait_until(lambda: server.metrics()[IN_FLIGHT] == holders, what="the end of those that were answered")
    headers, data = ({}, Q.tobytes() + P.tobytes()) if put else oip.body({"predictions": Q, "targets": P})
    metrics, senders = server.metrics(), []
    try:
        for i in range(ASKERS):
            path = f"/v2/tensors/{i}?datatype=FP32&shape=2,1000000" if put else INFER
            senders.append(Sender(server, "PUT" if put else "POST", path, headers, data))
        wait_until(lambda: server.metrics()[IN_FLIGHT] == metrics[IN_FLIGHT] + ASKERS, 60, "all of them")
        taken = settled(server, senders) - metrics[RECEIVED]
        assert taken < 1 << 20
        assert all(sender.status is None and sender.sent < len(data) for sender in senders)
    finally:
        empty()
        for sender in senders:
            sender.join()
    assert {sender.status for sender in senders} == {b"HTTP/1.1 200"}
    assert server.metrics()[RECEIVED] == metrics[RECEIVED] + ASKERS * len(data)


@pytest.fixture
def half_there(make_server):
    """A server with a request of 4 MiB, half of which has come, in its 64 MiB of staging."""
    server = make_server(staging_bytes_max="64M", http_deadline_ms=20000, http_slow_ms=120000)
    halves = [np.ones((1, 1 << 19), "<f4")] * 2
    headers, data = oip.body(dict(zip(("predictions", "targets"), halves)))
    before = server.metrics()[RECEIVED]
    holder = Sender(server, "POST", INFER, headers, data, len(data) // 2)
    wait_until(lambda: server.metrics()[RECEIVED] == before + len(data) // 2, what="half of it")
    yield server
    holder.connection.close()
    holder.join()


def refused_at_once(server, data, headers, status, part):
    """And the one behind it is answered."""
    begin = time.monotonic()
    got, _, body = server.request(INFER, data, headers)
    assert (got, part in body.decode()) == (status, True), body
    infer(server, {"predictions": Q[:125], "targets": P[:125]})
    assert time.monotonic() - begin < 15  # who waits is told after 20


def test_numbers_that_are_not_there_take_no_staging(half_there):
    """As many as the shape says do not fit what is left of it, and the text is far too short for them."""
    tensors = [{"name": name, "shape": [1, 7500000], "datatype": "FP32", "data": [1]} for name in ("predictions", "targets")]
    refused_at_once(half_there, json.dumps({"inputs": tensors}).encode(), {}, 400, "7500000 elements in all")


def wrong_tails(inputs):
    """{what is wrong with it: (headers, body, status, what is said)} of tails that do not fit what their JSON says."""
    headers, data = oip.body(inputs)
    size, over = int(headers[LENGTH]), json.loads(data[:int(headers[LENGTH])])
    for tensor in over["inputs"]:
        tensor["shape"], tensor["parameters"] = [2 ** 20, 2 ** 20], {"binary_data_size": 2 ** 42}
    over = json.dumps(over).encode()
    return {"short": (headers, data[:-1], 400, f"{len(data) - size - 1} came behind the JSON"),
            "long": (headers, data + b"x", 400, "goes on behind"),
            "none": (headers, data[:size], 400, "; 0 came behind the JSON"),
            "no length of JSON": ({}, data[:size], 400, LENGTH),
            "ends, in chunks": ({}, iter([data[:100], data[100:size]]), 400, LENGTH),
            "ends, compressed": ({"Content-Encoding": "gzip"}, gzip.compress(data[:size]), 400, LENGTH),
            "more than a body has": ({LENGTH: str(len(over))}, iter([over, b"x"]), 413, "body_bytes_max")}


@pytest.mark.parametrize("rows", [120, 1000], ids=["staging", "pool"])
def test_a_tail_that_cannot_fit_takes_no_memory(make_server, rows):
    """Staging is full: what takes some, for its tensors or for pieces of those, waits for the deadline."""
    server = make_server(staging_bytes_max=STAGING, staging_request_bytes_max="1M", http_deadline_ms=4000,
                         http_slow_ms=120000)
    tails, empty = wrong_tails({"predictions": Q[:rows], "targets": P[:rows]}), fill_staging(server)
    seen = {}
    try:
        for name, (headers, data, *_) in tails.items():
            status, _, reply = server.request(INFER, data, headers)
            seen[name] = status, reply
    finally:
        empty()
    for name, (_, _, status, part) in tails.items():
        assert seen[name][0] == status and part in seen[name][1].decode(), seen
