"""Replies to what is right, each held against what proto/openapi.yaml says of it: made-up requests (schemathesis in
test_http_clients.py) are hardly ever right to the last word. And the README's client of the protocol."""
import json
import re
import socket
import struct

import numpy as np
import pytest

import oip
from conftest import ROOT, end_well, needs
from httplib import PREFIX, Shared, close, probabilities, register
from oip import INFER

SHAPE = (3, 5)
PAIR = {"predictions": probabilities(SHAPE, 1), "targets": probabilities(SHAPE, 2)}


@pytest.fixture(scope="module")
def server(backend):
    from conftest import Server
    one = Server(backend=backend, shm_prefix=PREFIX).wait_linked()
    yield one
    end_well(one)


@pytest.fixture(scope="module")
def document():
    needs("schemathesis")
    import schemathesis
    return schemathesis.openapi.from_path(ROOT / "proto/openapi.yaml")


@pytest.fixture
def ask(server, document):
    """-> the reply, which the document knows."""
    import requests

    def asked(method, path, documented=None, status=200, **more):
        reply = requests.request(method, server.http + path, timeout=60, **more)
        assert reply.status_code == status, reply.text
        document[documented or path.split("?")[0]][method].validate_response(reply)
        return reply
    return asked


def request(outputs, inputs=PAIR, **parameters):
    return {"id": "a", "inputs": [{"name": name, "datatype": "FP32", "shape": list(array.shape), "data": array.ravel().tolist()}
                                  for name, array in inputs.items()],
            "outputs": [{"name": name} for name in outputs], **({"parameters": parameters} if parameters else {})}


def test_a_reply_that_is_not_as_documented_is_seen(server, document):
    import requests
    reply = requests.get(server.http + "/v2/models/kl_div", timeout=60)
    with pytest.raises(BaseExceptionGroup) as raised:  # noqa: F821 - of Python 3.11
        document[INFER]["POST"].validate_response(reply)
    assert {type(one).__name__ for one in raised.value.exceptions} == {"JsonSchemaError"}


@pytest.mark.parametrize("reduction, outputs", [
    ("batchmean", ["loss"]), ("batchmean", ["loss", "row_loss", "grad_predictions", "grad_targets"]),
    ("row", ["loss"]), ("none", ["loss", "grad_predictions"])])
def test_inference(ask, reduction, outputs):
    for path in (INFER, INFER.replace("/infer", "/versions/1/infer")):
        reply = ask("POST", path, json=request(outputs, reduction=reduction))
        assert [one["name"] for one in reply.json()["outputs"]] == outputs


def test_inference_without_a_finite_loss(ask):
    one_hot = {"predictions": np.array([[0, 1]], "<f4"), "targets": np.array([[1, 0]], "<f4")}
    reply = ask("POST", INFER, json=request(["loss"], one_hot))
    assert reply.json()["outputs"][0]["parameters"]["non_finite"] == "inf"


def test_inference_in_binary(ask):
    headers, data = oip.body(PAIR)
    reply = ask("POST", INFER, data=data, headers={name: str(value) for name, value in headers.items()})
    assert "Inference-Header-Content-Length" not in reply.headers or reply.headers["Content-Type"] == "application/octet-stream"


def test_shared_memory_and_stored_tensors(ask, server):
    with Shared(8192) as shared:
        assert register(server, "r", shared, 4096, 64) == (200, None)
        ask("GET", "/v2/systemsharedmemory/status")
        ask("GET", "/v2/systemsharedmemory/region/r/status", "/v2/systemsharedmemory/region/{name}/status")
        body = request([])
        body["outputs"] = [{"name": "loss"}, {"name": "grad_predictions", "parameters": {
            "shared_memory_region": "r", "shared_memory_byte_size": PAIR["targets"].nbytes}}]
        ask("POST", INFER, json=body)
        ask("POST", "/v2/systemsharedmemory/region/r/unregister", "/v2/systemsharedmemory/region/{name}/unregister")
    ask("GET", "/v2/cudasharedmemory/status")
    named = "/v2/tensors/{name}"
    ask("PUT", "/v2/tensors/teacher?datatype=FP32&shape=3,5", named, data=PAIR["targets"].tobytes())
    assert ask("GET", "/v2/tensors").json()[0]["name"] == "teacher"
    ask("GET", "/v2/tensors/teacher", named)
    body = request(["loss"])
    body["inputs"][1] = {"name": "targets", "datatype": "FP32", "shape": [3, 5], "parameters": {"stored_tensor": "teacher"}}
    ask("POST", INFER, json=body)
    ask("DELETE", "/v2/tensors/teacher", named)


def test_what_is_said_of_the_server(ask):
    ask("POST", INFER, json=request(["loss"]))
    for path in ("/v2", "/v2/models/kl_div", "/v2/models/kl_div/versions/1", "/v2/models/kl_div/config", "/v2/models/kl_div/stats",
                 "/v2/models/stats", "/v2/models/kl_div/ready", "/v2/health/live", "/v2/health/ready", "/metrics", "/"):
        ask("GET", path)
    ask("POST", "/v2/repository/index", json={})


SEGMENTS = 152  # where struct tcp_info counts those with data that came (Linux 4.6)


def segments(connection):
    counted = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(counted) < SEGMENTS + 4:
        pytest.skip("this kernel does not count segments")
    return struct.unpack_from("=I", counted, SEGMENTS)[0]


@pytest.mark.parametrize("rows, binary, more", [
    (2, True, {}), (2, False, {}), (100, True, {}), (60, False, {}), (100, False, {"Accept-Encoding": "gzip"})],
    ids=("binary", "json", "binary_of_kilobytes", "json_of_kilobytes", "gzip"))
def test_a_small_reply_is_sent_at_once(server, rows, binary, more):
    """Head and outputs in one call, and so in one segment: each costs both sides more than the bytes do. What the kernel
    sends again is rare."""
    pair = {"predictions": probabilities((rows, 8), 1), "targets": probabilities((rows, 8), 2)}
    outputs = {name: {"binary_data": binary} for name in ("loss", "grad_predictions", "grad_targets")}
    headers, body = oip.body(pair, outputs)
    with oip.Connection(server) as connection:
        assert connection.ask("POST", INFER, body, {**headers, **more})[0] == 200
        before = segments(connection.http.sock)
        for _ in range(50):
            _, got, reply = connection.ask("POST", INFER, body, {**headers, **more})
        assert segments(connection.http.sock) - before <= 55
        assert bool(more) == (got["Content-Encoding"] == "gzip") and len(reply) < 16 << 10
        if not more:
            truth = oip.expected(**pair)
            for name, array in oip.parse(got, reply)[1].items():
                close(array, truth[name], "FP32")


def test_errors(ask):
    ask("POST", INFER, status=400, json=request(["loss"], divergence="unknown"))
    ask("GET", "/v2/tensors/none", "/v2/tensors/{name}", status=404)
    ask("PUT", "/v2/tensors/t?datatype=FP32&shape=2", "/v2/tensors/{name}", status=400, data=b"1")
    ask("POST", "/v2/systemsharedmemory/region/r/register", "/v2/systemsharedmemory/region/{name}/register", status=400, data=b"{")


def test_the_readmes_client(server, capsys):
    needs("tritonclient")
    readme = (ROOT / "README.md").read_text()
    program, = (text for text in re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S) if "tritonclient" in text)
    exec(compile(program.replace("127.0.0.1:8080", server.address), "README.md", "exec"), {})  # noqa: S102
    printed = capsys.readouterr().out
    meant = json.loads(re.search(r"^```json\n(.*?)^```$", readme, re.M | re.S).group(1))["outputs"]
    loss, *gradient = (float(number) for number in re.findall(r"-?\d+\.\d+", printed))
    assert loss == pytest.approx(meant[0]["data"][0], rel=1e-6)
    assert gradient == pytest.approx(meant[1]["data"], rel=1e-6)
