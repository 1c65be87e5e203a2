"""A request without Content-Length and without Transfer-Encoding has an empty body, whatever its method: what follows
is the next request."""
import re
import socket

import pytest

from httplib import PREFIX
from oip import INFER

NEXT = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def server(backend):
    from conftest import Server, end_well
    one = Server(backend=backend, shm_prefix=PREFIX)
    yield one
    end_well(one)


def answers(server, text):
    """[(status, head, body)] of all that comes until the connection ends."""
    host, port = server.address.rsplit(":", 1)
    got, found = b"", []
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.sendall(text)
        while piece := connection.recv(65536):
            got += piece
    while got:
        head, got = got.split(b"\r\n\r\n", 1)
        size = int(re.search(rb"(?i)^content-length: (\d+)", head, re.M).group(1))
        found.append((int(head.split()[1]), head, got[:size]))
        got = got[size:]
    return found


WITHOUT = [
    ("POST", INFER, 400, b"too early"), ("POST", INFER.replace("/infer", "/versions/1/infer"), 400, b"too early"),
    ("POST", "/v2/repository/index", 200, b"kl_div"), ("POST", "/v2/systemsharedmemory/unregister", 200, b""),
    ("POST", "/v2/cudasharedmemory/region/r/unregister", 200, b""),
    ("POST", "/v2/systemsharedmemory/region/r/register", 400, b"too early"),
    ("PUT", "/v2/tensors/t?datatype=FP32&shape=2", 400, b"has 0 bytes"), ("POST", "/v2", 405, b"GET"), ("POST", "/nope", 404, b"")]


@pytest.mark.parametrize("more", ["", "Content-Type: application/json\r\n", "Expect: 100-continue\r\n",
                                  "Inference-Header-Content-Length: 0\r\n"])
@pytest.mark.parametrize("method, path, status, part", WITHOUT)
def test_a_request_without_a_length(server, method, path, status, part, more):
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode()
    first, second = answers(server, head + NEXT)
    assert first[0] == status and part in first[2], first
    assert b"connection: close" not in first[1].lower(), first
    assert second[0] == 200 and b'"extensions"' in second[2], second


@pytest.mark.parametrize("method, path, status, part", WITHOUT)
def test_without_a_length_by_http_1_0(server, method, path, status, part):
    """Its end is that of the connection, which is answered before."""
    [(got, head, body)] = answers(server, f"{method} {path} HTTP/1.0\r\n\r\n".encode() + NEXT)
    assert got == status and part in body, body


def test_json_without_a_length_is_no_request(server):
    """It is not waited for, and nothing is computed; the connection ends with it."""
    data = b'{"inputs":[{"name":"predictions","shape":[1],"datatype":"FP32","data":[1]}]}\r\n\r\n'
    for reply in answers(server, f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() + data):
        assert reply[0] == 400 and b"predictions" not in reply[2], reply
