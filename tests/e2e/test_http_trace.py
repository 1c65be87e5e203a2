"""The line that the log has of each request, and the caller's trace (W3C `traceparent`) in it."""
import hashlib
import http.client
import json
import os
import re
import socket
import ssl
import struct

import numpy as np
import pytest

import oip
import wire
from conftest import wait_until
from httplib import certificates, tls_flags
from unixlib import Case

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
BODY = json.dumps({"id": "my-own-id", "inputs": [
    {"name": "predictions", "shape": [2, 3], "datatype": "FP32", "data": [0.2, 0.3, 0.5, 0.0625, 0.0625, 0.875]},
    {"name": "targets", "shape": [2, 3], "datatype": "FP32", "data": [0.1, 0.4, 0.5, 0.25, 0.25, 0.5]}]})


def lines(server, role):
    return [line for line in server.log_lines() if line["event"] == "request" and line["role"] == role]


def ask(server, *headers, body=BODY):
    connection = http.client.HTTPConnection(*server.http.removeprefix("http://").rsplit(":", 1), timeout=60)
    connection.putrequest("POST", "/v2/models/kl_div/infer")
    connection.putheader("Content-Length", str(len(body)))
    for name, value in headers:
        connection.putheader(name, value)
    connection.endheaders(body.encode())
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status


def test_a_line_a_request_with_the_callers_trace(make_server):
    server = make_server(log_level="debug", log_format="json")
    many = [("traceparent", PARENT)] * 2
    asked = [(("traceparent", PARENT),), (("TraceParent", PARENT),), (), many,
             (("traceparent", f"00-{'0' * 32}-{SPAN}-01"),), (("traceparent", f"00-{TRACE}-{'0' * 16}-01"),),
             (("traceparent", f"ff-{TRACE}-{SPAN}-01"),), (("traceparent", "\" evil=1"),)]
    for headers in asked:
        assert ask(server, *headers) == 200
    assert ask(server, ("traceparent", PARENT), body="{") == 400
    wait_until(lambda: len(lines(server, "gateway")) == len(asked) + 1)
    said = lines(server, "gateway")
    for line in said[:-1]:
        assert line["level"] == "debug" and line["transport"] == "http" and line["status"] == "ok"
        assert (line["op"], line["shape"], line["dtype"]) == ("forward_kl", "2x3", "FP32")
        assert line["total_us"] >= line["receive_us"] >= 0 and line["total_us"] > 0
        assert line["queue_us"] + line["copy_us"] + line["kernel_us"] <= line["total_us"]
        assert "evil" not in line
    for line in said[:2]:
        assert (line["trace_id"], line["span"], line["sampled"]) == (TRACE, SPAN, 1)
    for line in said[2:-1]:
        assert not {"trace_id", "span", "sampled"} & set(line)
    assert said[-1]["status"] == "invalid" and said[-1]["trace_id"] == TRACE and "op" not in said[-1]
    workers = lines(server, "worker0")
    assert len(workers) == len(asked)
    for line in workers:
        assert line["transport"] == "unix" and (line["op"], line["shape"], line["dtype"]) == (
            "forward_kl", "2x3", "FP32")
        assert line["queue_us"] + line["kernel_us"] <= line["total_us"]
        assert (line["pid"], line["client_pid"]) == (server.child("worker"), server.child("gateway"))
    for line in workers[:2]:
        assert (line["trace_id"], line["span"], line["sampled"]) == (TRACE, SPAN, 1)
    for line in workers[2:]:
        assert not {"trace_id", "span", "sampled"} & set(line)
    for secret in ("0.0625", "0.875", "my-own-id"):  # 20:06:40.875 is a time
        assert not re.search(r"(?<!\d)" + re.escape(secret), server.log())


def test_a_request_in_pieces_has_its_trace_too(make_server):
    server = make_server(log_level="debug", log_format="json", staging_bytes_max="4M", staging_request_bytes_max="64K")
    values = np.full((100, 1000), 0.001, "<f4")
    headers, body = oip.body({"predictions": values, "targets": values})
    status = server.request(oip.INFER, body, {**headers, "traceparent": PARENT.replace("-01", "-00")})[0]
    assert status == 200
    wait_until(lambda: lines(server, "worker0"))
    said = [line for line in lines(server, "worker0") if line["op"] == "forward_kl"]
    assert [(line["trace_id"], line["span"], line["sampled"]) for line in said] == [(TRACE, SPAN, 0)]


def test_over_the_unix_socket(make_server):
    """A frame before its request: it has no answer, and is of no other request."""
    server = make_server(log_level="debug", log_format="json")
    good = (bytes.fromhex(TRACE), bytes.fromhex(SPAN), 1, 0)
    with wire.Client(server.unix) as client:
        case = Case(client)

        def submit(target, *fields):
            client.send(wire.TRACE, struct.pack("<Q16s8sII", target, *fields), request=client.next_number())
            return client.submit(case.shape, case.tensors())
        for target in (client.number + 2, client.number + 1):  # its own; the number before
            client.result(submit(target, *good))
        client.run(case.shape, case.tensors())
        for wrong in ((bytes(16), *good[1:]), (good[0], bytes(8), 1, 0), (*good[:2], 256, 0), (*good[:3], 1)):
            number = submit(client.number + 2, *wrong)
            with pytest.raises(wire.Failed, match="TRACE with a target"):
                client.reply(number - 1)
            client.result(number)
        with pytest.raises(wire.Failed, match="TRACE with a target"):
            client.ask(wire.TRACE, struct.pack("<Q16s8sII", 0, *good))
        with pytest.raises(wire.Failed, match="temperature"):
            client.run(case.shape, case.tensors(), temperature=-1)
        case.close()
    wait_until(lambda: len(lines(server, "worker0")) == 7)

    def events():
        return {line["event"]: line for line in server.log_lines()
                if line["role"] == "worker0" and line.get("client_pid") == os.getpid()}
    wait_until(lambda: {"request", "refused", "client left"} <= set(events()))
    assert {line["pid"] for line in events().values()} == {server.child("worker")}
    assert [line.get("trace_id") for line in lines(server, "worker0")] == [TRACE] + 6 * [None]


def tensor(server, method, path, data=None, *headers):
    connection = http.client.HTTPConnection(server.address, timeout=60)
    connection.request(method, "/v2/tensors/" + path, data, dict(headers))
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status


def test_stored_tensors_have_lines_too(make_server):
    server = make_server(log_level="debug", log_format="json")
    place = "secret-name?datatype=FP32&shape=2,1,3"
    assert tensor(server, "PUT", place, bytes(24), ("traceparent", PARENT)) == 200
    assert tensor(server, "PUT", place, bytes(23)) == 400
    assert tensor(server, "PUT", "secret-name?datatype=FP99&shape=2") == 400
    assert tensor(server, "PUT", place, iter([bytes(24), bytes(1)])) == 400  # more than it said, in chunks
    assert tensor(server, "DELETE", "secret-name", None, ("traceparent", PARENT)) == 200
    assert tensor(server, "DELETE", "secret-name") == 404
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 60) as left:
        left.sendall(f"PUT /v2/tensors/{place} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 24\r\n\r\n123".encode())
        wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1)
    wait_until(lambda: len(lines(server, "gateway")) == 7, what="the line of who left")
    said = lines(server, "gateway")
    assert [(line["op"], line["status"]) for line in said] == [
        ("put_tensor", "ok"), ("put_tensor", "invalid"), ("put_tensor", "invalid"), ("put_tensor", "invalid"),
        ("delete_tensor", "ok"), ("delete_tensor", "not_found"), ("put_tensor", "cancelled")]
    for line in said:
        assert line["level"] == ("debug" if line["status"] == "ok" else "info") and line["transport"] == "http"
        assert line["total_us"] >= line["receive_us"] >= 0
        if line["op"] == "put_tensor" and line is not said[2] and line is not said[1]:
            assert (line["shape"], line["dtype"], line["bytes"]) == ("2x1x3", "FP32", 24)
        else:
            assert "shape" not in line
        traced = line in (said[0], said[4])
        assert (line.get("trace_id"), line.get("span")) == ((TRACE, SPAN) if traced else (None, None))
    assert "secret-name" not in server.log()
    assert tensor(server, "PUT", "a?datatype=FP32&shape=10", bytes(40)) == 200
    wait_until(lambda: len(lines(server, "gateway")) == 8)
    assert lines(server, "gateway")[7]["shape"] == "10"  # a text in JSON, like those of more dimensions


def test_the_longest_shape_has_a_whole_line(make_server):
    server = make_server(log_level="debug")
    shape = ",".join(["1"] * 7 + [str(1 << 20)])
    assert tensor(server, "PUT", f"a?datatype=UINT8&shape={shape}", bytes(1 << 20)) == 200
    said = f'op=put_tensor shape="{shape.replace(",", "x")}" dtype=UINT8 bytes={1 << 20} total_us='
    wait_until(lambda: said in server.log())


def test_what_failed_has_a_line_at_the_usual_level(make_server, tmp_path):
    """With the caller's trace and the name of his token; never the token, and not as many as anybody cares to cause.
    A name is a text, whatever it looks like."""
    (tmp_path / "tokens").write_text("".join(
        f"{name} {hashlib.sha256(f'word-of-{name}'.encode()).hexdigest()} {rights}\n"
        for name, rights in (("alice", "infer"), ("123", "metrics"))))
    server = make_server(log_format="json", tokens=tmp_path / "tokens", http_threads=1)
    alice, bob = ({"Authorization": f"Bearer word-of-{name}", "traceparent": PARENT} for name in ("alice", "123"))
    wrong = {"Authorization": "Bearer word-of-nobody", "traceparent": PARENT}
    assert server.request(oip.INFER, b"{", alice)[0] == 400
    assert server.request(oip.INFER, BODY.encode(), alice)[0] == 200
    assert server.request("/v2/tensors/secret-name?datatype=FP99&shape=2", b"1", alice, "PUT")[0] == 400
    assert server.request(oip.INFER, BODY.encode(), bob)[0] == 403
    assert server.request(oip.INFER, BODY.encode(), wrong)[0] == 401
    assert server.request("/secret-path", None, alice)[0] == 404

    def said():
        return [line for line in server.log_lines() if line["role"] == "gateway" and line.get("transport") == "http"]
    wait_until(lambda: len(said()) >= 5)
    assert [(line["event"], line.get("op"), line["status"], line.get("token"), line["trace_id"], line["level"])
            for line in said()] == [
        ("request", None, "invalid", "alice", TRACE, "info"), ("request", "put_tensor", "invalid", "alice", TRACE, "info"),
        ("refused", None, "forbidden", "123", TRACE, "info"), ("refused", None, "unauthenticated", None, TRACE, "info"),
        ("refused", None, "not_found", "alice", TRACE, "info")]
    assert all(re.fullmatch(r"127\.0\.0\.1:[1-9][0-9]*", line["peer"]) for line in said())
    for secret in ("word-of", "secret-name", "secret-path", hashlib.sha256(b"word-of-alice").hexdigest()):
        assert secret not in server.log()


@pytest.mark.parametrize("host, shown", [("127.0.0.1", "127.0.0.1:%d"), ("::1", "[::1]:%d")])
def test_the_address_of_who_is_refused(make_server, host, shown):
    """His own, also where a socket of IPv6 takes both; nobody's who is served."""
    if not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    server = make_server(log_format="json", log_level="debug", http="[::]:0", insecure_bind="true", http_threads=1)
    with socket.create_connection((host, int(server.address.rsplit(":", 1)[1])), 60) as raw:
        for request, status in (("GET /nothing HTTP/1.1", b"404"), (f"POST {oip.INFER} HTTP/1.1\r\nContent-Length: 0", b"400"),
                                ("PUT /v2/tensors/a HTTP/1.1\r\nContent-Length: 0", b"400"),
                                ("DELETE /v2/tensors/a HTTP/1.1", b"404")):
            raw.sendall(f"{request}\r\nHost: localhost\r\n\r\n".encode())
            assert raw.recv(4096).split()[1] == status
        data = BODY.encode()
        raw.sendall(f"POST {oip.INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        assert raw.recv(4096).split()[1] == b"200"
        port = raw.getsockname()[1]

    def said():
        return [(line["event"], line["status"], line.get("peer")) for line in server.log_lines()
                if line["role"] == "gateway" and line.get("transport") == "http"]
    wait_until(lambda: len(said()) == 5)
    peer = shown % port
    assert said() == [("refused", "not_found", peer), ("request", "invalid", peer), ("request", "invalid", peer),
                      ("request", "not_found", peer), ("request", "ok", None)]


def test_whoever_is_refused_has_a_line(make_server, certificates):
    """Also before his path is looked up, and at the second address."""
    server = make_server(log_format="json", http_threads=1, metrics_http="127.0.0.1:0", body_bytes_max=65536)
    second = next(line["http"] for line in server.log_lines() if line["event"] == "metrics have an address")

    def ask_it(method, path, data=None, headers=(), address=server.address, context=None):
        kind = {"context": context} if context else {}
        connection = (http.client.HTTPSConnection if context else http.client.HTTPConnection)(address, timeout=60, **kind)
        connection.request(method, path, data, {"traceparent": PARENT, **dict(headers)})
        status = connection.getresponse().status
        connection.close()
        return status
    assert ask_it("DELETE", "/v2") == 405
    assert ask_it("GET", "/v2/models/other") == 404
    assert ask_it("GET", "/" + "x" * 600) == 404
    assert ask_it("GET", "/v2", address=second) == 404
    assert ask_it("POST", oip.INFER, bytes(65537)) == 413
    assert ask_it("POST", oip.INFER, b"x", {"Content-Length": "1", "Transfer-Encoding": "chunked"}) == 400
    closed = make_server(log_format="json", http_threads=1, **tls_flags(certificates, tls_client_ca=certificates / "ca.crt"))
    context = ssl.create_default_context(cafile=certificates / "ca.crt")
    assert ask_it("GET", "/v2", address=closed.address, context=context) == 401

    def refused(one):
        return [(line["status"], line["trace_id"]) for line in one.log_lines() if line["event"] == "refused"]
    wait_until(lambda: len(refused(server)) >= 6 and refused(closed))
    assert [status for status, _ in refused(server)] == ["method", "not_found", "not_found", "not_found", "too_large",
                                                         "invalid"]
    assert refused(closed) == [("unauthenticated", TRACE)] and {trace for _, trace in refused(server)} == {TRACE}


def refuse_many(server, count):
    """All are there before the first is answered, so that how fast this process asks does not matter."""
    with socket.create_connection(server.address.rsplit(":", 1), 60) as raw:
        raw.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer nobody\r\n\r\n" * count)
        replies = b""
        while replies.count(b"HTTP/1.1 401") < count:
            replies += raw.recv(1 << 16)


def test_of_many_that_fail_some_have_a_line_and_the_others_are_counted(make_server, tmp_path):
    (tmp_path / "tokens").write_text(f"alice {hashlib.sha256(b'word-of-alice').hexdigest()} infer\n")
    server, asked = make_server(log_format="json", tokens=tmp_path / "tokens", http_threads=1), 0

    def left_out():
        return [line["requests"] for line in server.log_lines() if line["event"] == "lines left out"]

    def all_told():
        nonlocal asked
        if not left_out():  # more than 50 in one second: at once, or on a slow machine at last
            refuse_many(server, 300)
            asked += 300
        return left_out() and sum(line["event"] == "refused" for line in server.log_lines()) + sum(left_out()) == asked
    wait_until(all_told, 60, "a line that tells how many have none")


def test_no_lines_at_the_usual_level(make_server):
    server = make_server(log_format="json")
    assert ask(server, ("traceparent", PARENT)) == 200
    assert tensor(server, "PUT", "a?datatype=FP32&shape=1", bytes(4)) == 200
    assert server.stop() == 0
    assert not lines(server, "gateway") and not lines(server, "worker0") and TRACE not in server.log()
