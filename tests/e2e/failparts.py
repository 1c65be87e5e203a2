"""The conversation of test_fail_nth.py in parts, each for itself, with the right answer known: right, an
error that says what was wrong (Clear), or a closed connection (Cut)."""
import contextlib
import gzip
import http.client
import io
import json
import os
import signal
import socket
import time

import numpy as np

import oip
import wire
from conftest import suspend
from faillib import Blamed, Clear, Cut
from httplib import Shared, probabilities
from unixlib import forward_kl

SECONDS = 8  # without an answer: a hang
# What says that the server, not the client, is at fault.
OURS = {"no_memory", "internal", "unavailable", "busy", "device_lost"}

Q, P = probabilities((16, 24), 1), probabilities((16, 24), 2)
LOSS = float(forward_kl(Q, P).sum() / 16)
GRADIENT = (-P.astype(np.float64) / Q / 16).astype("<f4")
LARGE = probabilities((200, 500), 3), probabilities((200, 500), 4)  # 400 KB each: in pieces
LARGE_LOSS = float(forward_kl(*LARGE).sum() / 200)


@contextlib.contextmanager
def spoken():
    """Errors of the Unix socket as those of this file."""
    try:
        yield
    except wire.Failed as error:
        raise (Clear if error.status in OURS else Blamed)(str(error)) from None
    except wire.Ended:
        raise Cut("unix") from None
    except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError, BlockingIOError) as error:
        raise Cut(f"unix: {error}") from None


class Tensors:
    def __init__(self, q=Q, p=P):
        self.memory = wire.Memory(3 * q.nbytes + 4 * len(q))
        self.shape, size = q.shape, q.nbytes
        self.offset = {"predictions": 0, "targets": size, "grad_predictions": 2 * size, "row_loss": 3 * size}
        for name, array in (("predictions", q), ("targets", p)):
            self.view(name)[:] = array

    def view(self, name):
        return self.memory.array(self.offset[name], self.shape, "<f4")

    def named(self, region, *names):
        return {name: wire.tensor(region, self.offset[name]) for name in names}

    def __enter__(self):
        return self

    def __exit__(self, *ignored):
        self.memory.close()


def near(got, truth, tolerance=1e-5):
    np.testing.assert_allclose(got, truth, rtol=tolerance, atol=1e-7)


# ---- the Unix socket ---------------------------------------------------------------------------
def unix_compute(server):
    with spoken(), Tensors() as tensors, wire.Client(server.unix, timeout=SECONDS) as client:
        client.ping()
        region = client.region(tensors.memory)
        named = tensors.named(region, "predictions", "targets", "grad_predictions")
        near(client.run(Q.shape, named)["loss"], LOSS)
        near(tensors.view("grad_predictions"), GRADIENT)
        client.stream(2, 1)
        rows = tensors.named(region, "predictions", "targets", "row_loss")
        client.run(Q.shape, rows, reduction="sum", stream=2)
        near(tensors.memory.array(tensors.offset["row_loss"], (len(Q),), "<f4"), forward_kl(Q, P))
        assert client.stats()["regions"] >= 1
        client.drop(region)


def unix_pool(server):
    with spoken(), Tensors() as tensors, wire.Client(server.unix, timeout=SECONDS) as client:
        region = client.region(tensors.memory)
        pool = client.region_add(wire.POOL, tensors.memory.size)
        client.copy(pool, 0, region, 0, 2 * Q.nbytes)
        named = tensors.named(pool, "predictions", "targets", "grad_predictions")
        near(client.run(Q.shape, named)["loss"], LOSS)
        client.copy(region, 2 * Q.nbytes, pool, 2 * Q.nbytes, Q.nbytes)
        near(tensors.view("grad_predictions"), GRADIENT)
        client.drop(pool)


def unix_share(server):
    with spoken(), Tensors() as tensors, wire.Client(server.unix, timeout=SECONDS) as teacher, \
            wire.Client(server.unix, timeout=SECONDS) as student:
        region = teacher.region(tensors.memory)
        teacher.publish("nth", region, wire.description(Q.shape), tensors.offset["targets"])
        try:
            attached, _, about = student.attach("nth")
        except wire.Failed as error:
            if error.status == "not_found":  # its owner's connection was cut, and it went with that
                teacher.ping()
            raise
        assert about["shape"] == Q.shape
        own = student.region(tensors.memory)
        named = tensors.named(own, "predictions", "grad_predictions")
        near(student.run(Q.shape, {**named, "targets": wire.tensor(attached)})["loss"], LOSS)
        student.drop(attached)
        teacher.detach("nth")


def unix_cancel(server):
    shape = 64, 4096
    with spoken(), wire.Client(server.unix, timeout=SECONDS) as client:
        memory = wire.Memory(4 * shape[0] * shape[1])
        try:
            memory.array(0, shape, "<f4")[:] = 1 / shape[1]
            region = client.region(memory)
            both = {"predictions": wire.tensor(region), "targets": wire.tensor(region)}
            running = [client.submit(shape, both) for _ in range(6)]
            late = client.submit(shape, both, timeout_ns=1)
            asked = client.send(wire.CANCEL, running[-1].to_bytes(8, "little"))
            refused = 0
            for request in [*running, late]:
                try:
                    near(client.result(request)["loss"], 0)
                except wire.Failed as error:
                    refused += 1
                    if error.status not in ("cancelled", "deadline"):
                        raise
                    assert request in (running[-1], late)
            try:
                client.reply(asked)
            except wire.Failed as error:
                if error.status != "not_found":  # it had ended by then
                    raise
        finally:
            memory.close()


def unix_refused(server):
    """Errors of the client's own are told as such also then."""
    with spoken(), wire.Client(server.unix, timeout=SECONDS) as client:
        for ask, status in ((lambda: client.drop(77), "not_found"), (lambda: client.attach("none"), "not_found"),
                            (lambda: client.run(Q.shape, {"predictions": wire.tensor(5),
                                                          "targets": wire.tensor(5)}), "not_found")):
            try:
                ask()
                raise AssertionError("not refused")
            except wire.Failed as error:
                if error.status in OURS:
                    raise
                assert error.status == status, error
        client.ping()


# ---- HTTP -------------------------------------------------------------------------------------
@contextlib.contextmanager
def cuts(what):
    try:
        yield
    except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError, http.client.RemoteDisconnected,
            http.client.IncompleteRead) as error:
        raise Cut(f"{what}: {error!r}") from None


def undo(server, path, **more):
    """What a part left half done; also while the next calls in a row still fail."""
    for _ in range(6):
        with contextlib.suppress(OSError, http.client.HTTPException):
            if server.request(path, **more)[0] in (200, 404):
                return


class Http:
    """A connection of its own."""

    def __init__(self, server):
        self.http = http.client.HTTPConnection(server.address, timeout=SECONDS)

    def __enter__(self):
        return self

    def __exit__(self, *ignored):
        self.http.close()

    def ask(self, method, path, data=None, headers=None, expect=200):
        chunked = data is not None and not isinstance(data, bytes)
        with cuts(f"{method} {path.split('?')[0]}"):
            self.http.request(method, path, body=data, headers=headers or {}, encode_chunked=chunked)
        return self.answer(method, path, expect)

    def answer(self, method, path, expect=200):
        with cuts(f"{method} {path.split('?')[0]}"):
            reply = self.http.getresponse()
            body = reply.read()
        if reply.status == expect:
            return reply.headers, body
        text = f"{method} {path.split('?')[0]}: {reply.status} {body[:300]!r}"
        if reply.status < 500:
            raise Blamed(text)
        assert json.loads(body)["error"], text
        raise Clear(text)

    def infer(self, q=Q, p=P, outputs=None, binary=True, chunks=None, packed=False, headers=None, tensors=None):
        more, data = oip.body(tensors or {"predictions": q, "targets": p}, outputs, {"reduction": "batchmean"}, binary)
        more = {**more, **(headers or {})}
        if packed:
            data, more["Content-Encoding"] = gzip.compress(data), "gzip"
        if chunks:
            whole, more["Transfer-Encoding"] = data, "chunked"
            data = (whole[i:i + chunks] for i in range(0, len(whole), chunks))
        reply_headers, reply = self.ask("POST", oip.INFER, data, more)
        if reply_headers.get("Content-Encoding") == "gzip":
            reply = gzip.decompress(reply)
        return oip.parse(reply_headers, reply)[1]


BOTH = {"loss": {}, "grad_predictions": {}}
BINARY = {"loss": {"binary_data": True}, "grad_predictions": {"binary_data": True}}


def right(got, loss=LOSS, gradient=GRADIENT):
    near(got["loss"][0], loss)
    if gradient is not None:
        near(got["grad_predictions"], gradient)


def http_json(server):
    with Http(server) as client:
        right(client.infer(Q[:2], P[:2], {"loss": {}}, binary=False), forward_kl(Q[:2], P[:2]).sum() / 2, None)
        right(client.infer(outputs=BOTH, binary=False))
        right(client.infer(outputs=BOTH, binary=False, packed=True, headers={"Accept-Encoding": "gzip"}))


def http_binary(server):
    with Http(server) as client:
        right(client.infer(outputs=BINARY))
        right(client.infer(outputs=BINARY, chunks=700))
        right(client.infer(outputs=BINARY, headers={
            "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}))


def http_bulk(server):
    with Http(server) as client:
        right(client.infer(*LARGE, {"loss": {"binary_data": True}}, chunks=50000), LARGE_LOSS, None)
        got = client.infer(*LARGE, BINARY)
        near(got["grad_predictions"], -LARGE[1] / LARGE[0] / 200, 1e-4)


def http_shared(server):
    size = 3 * Q.nbytes
    with Shared(size, "nth") as shared, Http(server) as client:
        base = "/v2/systemsharedmemory"
        name = f"nth{os.getpid()}"
        np.frombuffer(shared.map, "<f4", Q.size)[:] = Q.ravel()
        np.frombuffer(shared.map, "<f4", Q.size, Q.nbytes)[:] = P.ravel()
        try:
            client.ask("POST", f"{base}/region/{name}/register", json.dumps(
                {"key": shared.key, "offset": 0, "byte_size": size}).encode())
            _, listed = client.ask("GET", f"{base}/status")
            assert name.encode() in listed

            def at(which, offset):
                return {"name": which, "shape": list(Q.shape), "datatype": "FP32", "parameters": {
                    "shared_memory_region": name, "shared_memory_offset": offset,
                    "shared_memory_byte_size": Q.nbytes}}
            body = {"inputs": [at("predictions", 0), at("targets", Q.nbytes)],
                    "outputs": [{"name": "loss"}, {k: v for k, v in at("grad_predictions", 2 * Q.nbytes).items()
                                                   if k in ("name", "parameters")}]}
            _, reply = client.ask("POST", oip.INFER, json.dumps(body).encode())
            near(json.loads(reply)["outputs"][0]["data"][0], LOSS)
            near(np.frombuffer(shared.map, "<f4", Q.size, 2 * Q.nbytes).reshape(Q.shape), GRADIENT)
            client.ask("POST", f"{base}/region/{name}/unregister", b"")
        except (Clear, Cut, Blamed):
            undo(server, f"{base}/region/{name}/unregister", data=b"", method="POST")
            raise


def http_tensor(server):
    with Http(server) as client:
        try:
            client.ask("PUT", "/v2/tensors/nth?shape=16,24&datatype=FP32", P.tobytes())
            _, listed = client.ask("GET", "/v2/tensors")
            assert b"nth" in listed
            head = json.dumps({"inputs": [
                {"name": "predictions", "shape": [16, 24], "datatype": "FP32",
                 "parameters": {"binary_data_size": Q.nbytes}},
                {"name": "targets", "shape": [16, 24], "datatype": "FP32", "parameters": {"stored_tensor": "nth"}}],
                "outputs": [{"name": "loss"}]}).encode()
            _, reply = client.ask("POST", oip.INFER, head + Q.tobytes(), {oip.LENGTH: str(len(head))})
            near(json.loads(reply)["outputs"][0]["data"][0], LOSS)
            client.ask("DELETE", "/v2/tensors/nth")
        except (Clear, Cut, Blamed):
            undo(server, "/v2/tensors/nth", method="DELETE")
            raise


def http_tensor_slow(server):
    """A tensor whose upload is held up, for memory on the device, with most of it still to come; and the line of
    its end."""
    path, data = "/v2/tensors/slow", LARGE[0].tobytes()
    with Http(server) as client:
        try:
            with cuts(path):
                client.http.putrequest("PUT", path + "?shape=200,500&datatype=FP32")
                client.http.putheader("Content-Length", str(len(data)))
                client.http.endheaders(data[:1000])
                time.sleep(0.05)
                client.http.send(data[1000:])
            client.answer("PUT", path)
            client.ask("DELETE", path)
        except (Clear, Cut, Blamed):
            undo(server, path, method="DELETE")
            raise


def http_looks(server):
    with Http(server) as client:
        assert b"kld_" in client.ask("GET", "/metrics")[1]
        assert b"<html" in client.ask("GET", "/")[1].lower()
        assert json.loads(client.ask("GET", "/v2")[1])["name"]
        assert json.loads(client.ask("GET", "/v2/models/kl_div")[1])["inputs"]
        client.ask("GET", "/v2/health/ready")
        client.ask("GET", "/v2/models/other", expect=404)
        packed = client.ask("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
        assert b"kld_" in (gzip.decompress(packed[1]) if packed[0].get("Content-Encoding") else packed[1])


def http_leaves(server):
    """A client that is gone before its answer; another one's is right."""
    with Http(server) as client:
        headers, data = oip.body({"predictions": LARGE[0], "targets": LARGE[1]}, BINARY)
        headers[oip.LENGTH] = headers[oip.LENGTH]
        head = "".join(f"{k}: {v}\r\n" for k, v in {**headers, "Content-Length": len(data), "Host": "localhost"}.items())
        try:
            with socket.create_connection(server.address.rsplit(":", 1), timeout=SECONDS) as one:
                one.sendall(f"POST {oip.INFER} HTTP/1.1\r\n{head}\r\n".encode() + data[:300000])
            with socket.create_connection(server.address.rsplit(":", 1), timeout=SECONDS) as one:
                one.sendall(f"POST {oip.INFER} HTTP/1.1\r\n{head}\r\n".encode() + data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Cut(repr(error)) from None
        right(client.infer(outputs=BINARY))


TOGETHER = 6  # requests, of which each second one is small JSON


def http_together(server):
    """Requests that come in one turn of the gateway's loop go to the worker in one packet. Each for itself is answered
    rightly, or not."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Http(server)) for _ in range(TOGETHER)]
        for client in clients:
            client.ask("GET", "/v2/health/live")
        gateway = server.child("gateway")
        suspend(gateway)
        try:
            for i, client in enumerate(clients):
                headers, data = oip.body({"predictions": Q[:2], "targets": P[:2]}, {"loss": {}}, {"reduction": "sum"},
                                         binary=i % 2 == 0)
                client.http.request("POST", oip.INFER, data, headers)
        finally:
            os.kill(gateway, signal.SIGCONT)
        worst = None
        for client in clients:
            try:
                right(oip.parse(*client.answer("POST", oip.INFER))[1], forward_kl(Q[:2], P[:2]).sum(), None)
            except (Clear, Cut) as error:
                worst = error
        if worst:
            raise worst


NO_END = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n"  # nobody knows where it ends


def http_parting(server):
    """Who still sends behind what was refused reads the reply before that, and the refusal."""
    more, data = oip.body({"predictions": Q, "targets": P}, BINARY, {"reduction": "batchmean"})
    head = "".join(f"{k}: {v}\r\n" for k, v in {**more, "Content-Length": len(data), "Host": "localhost"}.items())
    with cuts("what is refused"), socket.create_connection(server.address.rsplit(":", 1), timeout=SECONDS) as one:
        one.sendall(f"POST {oip.INFER} HTTP/1.1\r\n{head}\r\n".encode() + data + NO_END)
        for _ in range(8):
            one.sendall(bytes(65536))
        text = io.BytesIO(b"".join(iter(lambda: one.recv(65536), b"")))
    for expected in (200, 501):
        line, headers = text.readline(), http.client.parse_headers(text)
        body = text.read(int(headers.get("Content-Length", 0)))
        if not body or len(body) < int(headers["Content-Length"]):
            raise Cut(f"{line!r}")
        status = int(line.split()[1])
        if status != expected:
            assert json.loads(body)["error"], body
            raise (Clear if status >= 500 else Blamed)(f"{status} {body!r}")
        if status == 200:
            right(oip.parse(headers, body)[1])
    assert not text.read()


UNIX = [unix_compute, unix_pool, unix_share, unix_cancel, unix_refused]
HTTP = [http_json, http_binary, http_bulk, http_shared, http_tensor, http_looks, http_leaves, http_tensor_slow,
        http_together, http_parting]
