"""HTTP end to end: every route, and inference against FP64 and against the Unix socket."""
import datetime
import gzip
import json
import re
import socket
import subprocess
import threading
import time
import zlib

import numpy as np
import pytest

import oip
import wire
from httplib import PREFIX, close, logits, probabilities
from oip import INFER, LENGTH, Connection, infer


@pytest.fixture(scope="module")
def server(backend):
    from conftest import SANITIZER, Server
    one = Server(backend=backend, shm_prefix=PREFIX, staging_bytes_max="256M", json_bytes_max="16M").wait_linked()
    yield one
    alive = one.process.poll() is None
    status = one.stop() if alive else None
    log = one.log()
    one.remove()
    assert alive and status == 0 and not SANITIZER.search(log), log


@pytest.fixture(scope="module")
def small_staging(backend):
    """Tensors of a megabyte travel in pieces here."""
    from conftest import Server, end_well
    one = Server(backend=backend, staging_bytes_max="4M", staging_request_bytes_max="1M").wait_linked()
    yield one
    end_well(one)


# ---- Routes ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/models/kl_div/ready",
                                  "/v2/models/kl_div/versions/1/ready"])
def test_health(server, path):
    status, headers, body = server.request(path)
    assert (status, body) == (200, b"")


def test_server_metadata(server):
    status, reply = server.json("/v2")
    assert status == 200 and reply["name"] == "kld"
    assert re.fullmatch(r"\d+\.\d+\.\d+", reply["version"])
    assert "binary_tensor_data" in reply["extensions"]
    assert "system_shared_memory" in reply["extensions"]
    assert "cuda_shared_memory" not in reply["extensions"]
    assert reply["backend"] == server.backend and len(reply["device"]) > 3


def test_row_losses_in_fp64_are_what_the_loss_is_the_sum_of(server):
    """Where a group has all rows: one after the other (proto/README.md)."""
    random = np.random.default_rng(5)
    q, p = random.dirichlet(np.ones(40), (2, 300)).astype(np.float32)
    headers, body = oip.body({"predictions": q, "targets": p}, {"row_loss": {"datatype": "FP64"}, "loss": {}},
                             {"reduction": "sum", "scale": 0.3})
    status, headers, reply = server.request(INFER, body, headers)
    assert status == 200, reply
    answer, arrays = oip.parse(headers, reply)
    assert [output["datatype"] for output in answer["outputs"]] == ["FP64", "FP32"]
    total = 0.0
    for term in arrays["row_loss"]:
        total += term
    assert np.float32(total) == arrays["loss"][0]


def test_extensions_say_only_what_works(make_server):
    status, reply = make_server().json("/v2")
    assert "system_shared_memory" not in reply["extensions"]


@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_model_metadata_and_config(server, version):
    status, reply = server.json("/v2/models/kl_div" + version)
    assert status == 200 and reply["platform"] == "kld_native" and reply["versions"] == ["1"]
    assert [t["name"] for t in reply["inputs"]] == ["predictions", "targets", "row_weights",
                                                    "row_mask", "grad_output"]
    assert [t["name"] for t in reply["outputs"]] == ["loss", "row_loss", "grad_predictions",
                                                     "grad_targets"]
    assert all(set(t) == {"name", "datatype", "shape"} for t in reply["inputs"] + reply["outputs"])
    status, reply = server.json(f"/v2/models/kl_div{version}/config")
    assert status == 200 and reply["name"] == "kl_div" and reply["max_batch_size"] == 0
    assert [t["name"] for t in reply["input"] if t.get("optional")] == ["row_weights", "row_mask",
                                                                       "grad_output"]


def test_statistics_have_every_field_of_triton(server):
    before = server.json("/v2/models/stats")[1]["model_stats"][0]
    infer(server, {"predictions": probabilities((2, 3), 1), "targets": probabilities((2, 3), 2)})
    server.request(INFER, b"{}")
    for path in ["/v2/models/stats", "/v2/models/kl_div/stats", "/v2/models/kl_div/versions/1/stats"]:
        status, reply = server.json(path)
        assert status == 200
        stats = reply["model_stats"][0]
        assert {"name", "version", "last_inference", "inference_count", "execution_count",
                "inference_stats", "batch_stats", "memory_usage"} <= set(stats)
        assert set(stats["inference_stats"]) == {
            "success", "fail", "queue", "compute_input", "compute_infer", "compute_output",
            "cache_hit", "cache_miss"}
        assert stats["inference_count"] == before["inference_count"] + 1
        assert stats["inference_stats"]["fail"]["count"] == \
            before["inference_stats"]["fail"]["count"] + 1
        assert abs(stats["last_inference"] / 1000 - time.time()) < 60


def stats_of(server):
    return {name: value["ns"] for name, value in
            server.json("/v2/models/stats")[1]["model_stats"][0]["inference_stats"].items()}


@pytest.mark.parametrize("how", ["json", "binary", "bulk"])
def test_statistics_say_where_the_time_goes(server, small_staging, how):
    """Each part of a request takes some, and all of them no more than it took as a whole, which the client saw end."""
    server = small_staging if how == "bulk" else server
    rows = 20 if how == "json" else 700
    inputs = {"predictions": probabilities((rows, 1000), 1), "targets": probabilities((rows, 1000), 2)}
    before, begin = stats_of(server), time.monotonic_ns()
    infer(server, inputs, {"loss": None, "grad_predictions": {"binary_data": how != "json"}}, None, how != "json")
    took, after = time.monotonic_ns() - begin, stats_of(server)
    ns = {name: after[name] - before[name] for name in after}
    parts = [ns[name] for name in ("queue", "compute_input", "compute_infer", "compute_output")]
    assert all(part > 0 for part in parts) and sum(parts) <= ns["success"] <= took, ns
    assert ns["fail"] == ns["cache_hit"] == ns["cache_miss"] == 0
    assert ns["compute_infer"] > 1000, ns
    if how == "json":  # to read and write 20,000 numbers takes longer than to put two tensors in their place
        assert min(ns["compute_input"], ns["compute_output"]) > 100000, ns
    metrics, stats = server.metrics(), server.json("/v2/models/stats")[1]["model_stats"][0]
    for name in ("input", "output"):
        told = metrics[f'nv_inference_compute_{name}_duration_us{{model="kl_div",version="1"}}']
        assert told == after[f"compute_{name}"] // 1000
        assert stats["batch_stats"][0][f"compute_{name}"] == stats["inference_stats"][f"compute_{name}"]


@pytest.mark.parametrize("body", [b"", b"{}", b'{"ready": true}', b'{"ready": false}'])
def test_repository_index(server, body):
    status, _, reply = server.request("/v2/repository/index", body, method="POST")
    assert status == 200
    assert json.loads(reply) == [{"name": "kl_div", "version": "1", "state": "READY", "reason": ""}]


@pytest.mark.parametrize("body", [b"[]", b"true", b"null", b'{"ready": 1}', b'{"ready": "true"}', b'{"ready": null}'])
def test_a_repository_index_of_what_is_no_wish(server, body):
    status, _, reply = server.request("/v2/repository/index", body, method="POST")
    assert (status, json.loads(reply)) == (400, {"error": 'expected {"ready": true or false}'})


def test_page(server):
    status, headers, body = server.request("/")
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert b"<script" not in body and b"ready" in body
    said = re.search(rb"As of <time>(.*)</time> UTC", body)[1].decode()
    said = datetime.datetime.strptime(said, "%Y-%m-%d %H:%M:%S").replace(tzinfo=datetime.timezone.utc).timestamp()
    assert abs(said - time.time()) < 60
    infer(server, {"predictions": probabilities((2, 3), 1), "targets": probabilities((2, 3), 2)})
    server.request(INFER, b'{"id": "not-for-others"}')
    body = server.request("/")[2].decode()
    for row in (r"50 % of requests took under<td>[0-9.]+ ms", r"99 % of requests took under<td>[0-9.]+ ms",
                r"of those: invalid<td>[1-9]", r"shared-memory regions<td>0", r"stored tensors<td>0"):
        assert re.search(row, body), row
    assert "not-for-others" not in body and server.unix not in body


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/", "/metrics", "/v2", "/v2/health/ready", "/v2/models/kl_div/stats", "/nothing",
                                  "/v2/models/kl_div/infer"])
def test_what_it_says_of_itself_is_not_kept(server, method, path):
    assert server.request(path, method=method)[1]["Cache-Control"] == "no-store"


def test_metrics_are_prometheus_text(server):
    infer(server, {"predictions": probabilities((2, 3), 1), "targets": probabilities((2, 3), 2)})
    status, headers, body = server.request("/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    types, sample = {}, re.compile(r'([a-z_]+)(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? (\S+)')
    values = {}
    for line in body.decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in types
            types[name] = kind
        elif not line.startswith("# HELP "):
            name, labels, _, value = sample.fullmatch(line).groups()
            family = re.sub(r"_(bucket|sum|count)$", "", name) if name not in types else name
            assert family in types, line
            assert name + (labels or "") not in values, line
            values[name + (labels or "")] = float(value)
    assert values['kld_requests_total{front="http",status="ok"}'] >= 1
    assert any(k.startswith("kld_build_info{version=") for k in values)
    for name, kind in types.items():
        if kind != "histogram":
            continue
        series = {}
        for key, value in values.items():
            if key.startswith(name + "_bucket{"):
                labels, le = re.fullmatch(r'\w+\{(.*?),?le="([^"]+)"\}', key).groups()
                series.setdefault(labels, []).append((value, le))
        assert series
        for labels, buckets in series.items():
            assert buckets == sorted(buckets, key=lambda pair: pair[0]) and buckets[-1][1] == "+Inf"
            assert buckets[-1][0] == values[name + "_count" + (labels and f"{{{labels}}}")]
    assert values["kld_http_request_seconds_count"] >= 1


@pytest.mark.parametrize("path", ["/v1", "/v2/", "/v2/models", "/v2/models/", "/v2/models/other",
                                  "/v2/models/kl_div/versions/2", "/v2/models/kl_div/x", "/%00",
                                  "/v2/models/kl_div%2Finfer", "/" + "a" * 5000,
                                  "/v2/systemsharedmemory/region//status"])
def test_unknown_paths(server, path):
    status, headers, body = server.request(path)
    assert status in (404, 405), body
    assert headers["Content-Type"] == "application/json" and json.loads(body)["error"]


@pytest.mark.parametrize("method, path, allow", [
    ("POST", "/v2", "GET, HEAD"), ("DELETE", "/metrics", "GET, HEAD"), ("GET", INFER, "POST"),
    ("PUT", "/v2/repository/index", "POST"), ("BREW", "/v2/health/live", "GET, HEAD"),
    ("POST", "/v2/models/stats", "GET, HEAD"), ("PATCH", "/v2/tensors/x", "GET, HEAD, PUT, DELETE")])
def test_wrong_method(server, method, path, allow):
    status, headers, body = server.request(path, method=method)
    assert status == 405 and headers["Allow"] == allow and json.loads(body)["error"]
    assert headers["KLD-Status"] == "method"


def test_head(server):
    with Connection(server) as connection:
        status, headers, body = connection.ask("HEAD", "/v2")
        assert status == 200 and int(headers["Content-Length"]) > 0 and body == b""


# ---- Inference ------------------------------------------------------------------------------------

def test_curl(server, tmp_path):
    request = {"id": "7", "inputs": [
        {"name": "predictions", "shape": [1, 2], "datatype": "FP32", "data": [0.5, 0.5]},
        {"name": "targets", "shape": [1, 2], "datatype": "FP32", "data": [[0.25, 0.75]]}]}
    reply = subprocess.run(["curl", "-sS", "--fail-with-body", server.http + INFER, "-d",
                            json.dumps(request)], capture_output=True, check=True).stdout
    reply = json.loads(reply)
    assert reply["id"] == "7" and reply["model_name"] == "kl_div" and reply["model_version"] == "1"
    assert len(reply["outputs"]) == 1 and reply["outputs"][0]["shape"] == [1]
    truth = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
    assert abs(reply["outputs"][0]["data"][0] - truth) < 1e-7


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("reduction", ["batchmean", "none", "row", "sum", "mean", "rowmean"])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "js"])
def test_every_reduction(server, divergence, reduction, binary):
    shape = (3, 4, 5)
    q, p = probabilities(shape, 1), probabilities(shape, 2)
    asked = ["loss", "row_loss", "grad_predictions", "grad_targets"]
    reply, got = infer(server, {"predictions": q, "targets": p},
                       {name: {"binary_data": binary} for name in asked},
                       {"divergence": divergence, "reduction": reduction}, binary)
    truth = oip.expected(q, p, divergence, reduction=reduction)
    assert [o["name"] for o in reply["outputs"]] == asked
    for name in asked:
        close(got[name], truth[name], "FP32")


@pytest.mark.parametrize("forms", [(a, b) for a in ("probs", "logprobs", "logits")
                                   for b in ("probs", "logprobs", "logits")])
@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
def test_every_form(server, forms, dtype):
    shape = (6, 33)
    make = {"probs": probabilities, "logits": logits,
            "logprobs": lambda s, i, d: np.log(probabilities(s, i, "<f8")).astype(d)}
    q, p = make[forms[0]](shape, 3, dtype), make[forms[1]](shape, 4, dtype)
    parameters = {"predictions_form": forms[0], "targets_form": forms[1]}
    if "logits" in forms:
        parameters["temperature"] = 2.0
    _, got = infer(server, {"predictions": q, "targets": p},
                   {"loss": None, "grad_predictions": None, "grad_targets": None},
                   {**parameters, "binary_data_output": True})
    truth = oip.expected(q, p, **{"temperature": 1.0, **parameters})
    for name, value in got.items():
        close(value, truth[name], oip.NAMES[np.dtype(dtype)])


@pytest.mark.parametrize("form", ["probs", "logprobs", "logits"])
@pytest.mark.parametrize("divergence", oip.DIVERGENCES)
def test_every_divergence(server, divergence, form):
    """Against FP64; over the Unix socket the same bits."""
    make = logits if form == "logits" else probabilities
    q, p = make((6, 33), 31), make((6, 33), 32)
    if form == "logprobs":
        q, p = np.log(q), np.log(p)
    parameters = {"divergence": divergence, "predictions_form": form, "targets_form": form,
                  **oip.DIVERGENCES[divergence]}
    _, got = infer(server, {"predictions": q, "targets": p},
                   {"loss": None, "row_loss": None, "grad_predictions": None, "grad_targets": None},
                   {**parameters, "binary_data_output": True})
    truth = oip.expected(q, p, **parameters)
    for name, value in got.items():
        close(value, truth[name], "FP32")
    _, got = infer(server, {"predictions": q, "targets": p}, {"loss": None, "grad_predictions": None},
                   {**parameters, "binary_data_output": True})
    assert over_unix(server, q, p, "batchmean", **parameters) == (
        got["loss"].tobytes(), got["grad_predictions"].tobytes())


@pytest.mark.parametrize("divergence, parameter, alias", [
    ("js", {"beta": 0}, "forward_kl"), ("js", {"beta": 1}, "reverse_kl"), ("skew_kl", {"skew": 0}, "forward_kl"),
    ("skew_reverse_kl", {"skew": 0}, "reverse_kl"), ("mixed_kl", {"weight": 1}, "forward_kl")])
def test_a_parameter_at_its_end_is_another_divergence(server, divergence, parameter, alias):
    q, p = probabilities((6, 33), 33), probabilities((6, 33), 34)
    outputs = {"loss": None, "grad_predictions": None, "grad_targets": None}
    answers = [infer(server, {"predictions": q, "targets": p}, outputs,
                     {**more, "binary_data_output": True})[1]
               for more in ({"divergence": divergence, **parameter}, {"divergence": alias})]
    for name in outputs:
        assert answers[0][name].tobytes() == answers[1][name].tobytes()


def test_weights_mask_normalizer_scale_and_grad_output(server):
    shape = (5, 7)
    q, p = probabilities(shape, 5), probabilities(shape, 6)
    weights = np.array([0.5, 1, 2, 0, 3], "<f4")
    mask = np.array([1, 1, 0, 1, 1], "?")
    _, got = infer(server, {"predictions": q, "targets": p, "row_weights": weights, "row_mask": mask},
                   {"loss": None, "row_loss": None, "grad_predictions": None},
                   {"reduction": "rowmean", "scale": 4.0, "normalizer": 9.0, "grad_output": 0.5})
    truth = oip.expected(q, p, reduction="rowmean", scale=4.0, normalizer=9.0, row_weights=weights,
                         row_mask=mask, grad_output=0.5)
    for name, value in got.items():
        close(value, truth[name], "FP32")
    upstream = np.array([1, 2, 3, 4, 5], "<f4")
    _, got = infer(server, {"predictions": q, "targets": p, "grad_output": upstream},
                   {"grad_predictions": None}, {"reduction": "row"})
    close(got["grad_predictions"],
          oip.expected(q, p, reduction="row", grad_output=upstream)["grad_predictions"], "FP32")


@pytest.mark.parametrize("dtype", ["FP16", "BF16"])
def test_half_precision_is_binary(server, dtype):
    q, p = probabilities((4, 9), 7), probabilities((4, 9), 8)
    pack = oip.to_bf16 if dtype == "BF16" else lambda x: x.astype("<f2")
    unpack = oip.from_bf16 if dtype == "BF16" else lambda x: x.astype("<f8")
    q, p = pack(q), pack(p)
    _, got = infer(server, {"predictions": q, "targets": p},
                   {"loss": None, "grad_predictions": {"binary_data": True}})
    truth = oip.expected(unpack(q), unpack(p))
    assert got["loss"].dtype == np.dtype("<f4")
    close(got["loss"], truth["loss"], "FP32")
    close(unpack(got["grad_predictions"]), truth["grad_predictions"], dtype)


@pytest.mark.parametrize("values, word", [([[0.0, 1.0]], "inf"), ([[-1.0, 2.0]], "nan")])
def test_a_loss_that_is_not_finite(server, values, word):
    q, p = np.array(values, "<f4"), np.array([[0.5, 0.5]], "<f4")
    reply, _ = infer(server, {"predictions": q, "targets": p}, binary=False)
    output = reply["outputs"][0]
    assert output["data"] == [None] and output["parameters"]["non_finite"] == word
    _, got = infer(server, {"predictions": q, "targets": p}, {"loss": {"binary_data": True}})
    assert np.isnan(got["loss"][0]) if word == "nan" else got["loss"][0] == np.inf


def over_unix(server, q, p, reduction, **parameters):
    """Loss and gradient over the Unix socket, as bytes."""
    with wire.Client(server.unix) as client:
        memory = wire.Memory(1 << 20)
        memory.array(0, q.shape, q.dtype)[...] = q
        memory.array(1 << 18, p.shape, p.dtype)[...] = p
        region = client.region(memory)
        client.run(q.shape, {"predictions": wire.tensor(region, 0),
                             "targets": wire.tensor(region, 1 << 18),
                             "loss": wire.tensor(region, 1 << 19),
                             "grad_predictions": wire.tensor(region, 3 << 18)},
                   reduction=reduction, **parameters)
        loss = memory.array(1 << 19, (1,), "<f4").tobytes()
        gradient = memory.array(3 << 18, q.shape, "<f4").tobytes()
        client.drop(region)
        memory.close()
        return loss, gradient


@pytest.mark.parametrize("binary", [True, False])
def test_bit_identical_to_the_unix_socket(server, binary):
    q, p = probabilities((60, 777), 9), probabilities((60, 777), 10)
    _, got = infer(server, {"predictions": q, "targets": p},
                   {"loss": {"binary_data": binary}, "grad_predictions": {"binary_data": binary}},
                   {"reduction": "mean"}, binary)
    loss, gradient = over_unix(server, q, p, "mean")
    assert got["loss"].tobytes() == loss and got["grad_predictions"].tobytes() == gradient


def test_large_json_both_ways(server):
    """Some megabytes of numbers: read and written on the thread pool."""
    q, p = probabilities((100, 2000), 11), probabilities((100, 2000), 12)
    asked = {"loss": None, "grad_predictions": None}
    _, as_json = infer(server, {"predictions": q, "targets": p}, asked, None, False)
    _, as_binary = infer(server, {"predictions": q, "targets": p}, asked,
                         {"binary_data_output": True})
    for name in asked:
        assert as_json[name].tobytes() == as_binary[name].tobytes()


def test_large_json_header_before_a_tail(server):
    """The header is parsed on the pool while the tail waits."""
    q, p = probabilities((40, 2000), 11), probabilities((40, 2000), 12)
    request = {"inputs": [
        {"name": "predictions", "shape": [40, 2000], "datatype": "FP32", "data": q.tolist()},
        {"name": "targets", "shape": [40, 2000], "datatype": "FP32",
         "parameters": {"binary_data_size": p.nbytes}}]}
    head = json.dumps(request).encode()
    status, headers, body = server.request(INFER, head + p.tobytes(), {LENGTH: str(len(head))})
    assert status == 200, body
    close(oip.parse(headers, body)[1]["loss"], oip.expected(q, p)["loss"], "FP32")


def test_inputs_in_any_order_and_unaligned_tail(server):
    """Blobs follow each other without padding; each lands aligned."""
    q, p = probabilities((3, 5), 13, "<f8"), probabilities((3, 5), 14, "<f4")
    mask = np.array([1, 0, 1], "?")
    inputs = {"row_mask": mask, "targets": p, "predictions": q}
    _, got = infer(server, inputs, {"loss": None, "row_loss": {"binary_data": True}})
    truth = oip.expected(q, p, row_mask=mask)
    assert got["loss"].dtype == np.dtype("<f8")
    close(got["loss"], truth["loss"], "FP32")
    close(got["row_loss"], truth["row_loss"], "FP32")


def pieces_of(data, size):
    for at in range(0, len(data), size):
        yield data[at:at + size]


@pytest.mark.parametrize("size", [1, 7, 100000])
@pytest.mark.parametrize("binary", [True, False])
def test_chunked(server, binary, size):
    shape = (2, 3) if size < 100000 else (100, 2000)
    q, p = probabilities(shape, 15), probabilities(shape, 16)
    headers, data = oip.body({"predictions": q, "targets": p}, binary=binary)
    with Connection(server) as connection:
        for _ in range(2):
            connection.http.request("POST", INFER, body=pieces_of(data, size), headers=headers,
                                    encode_chunked=True)
            reply = connection.http.getresponse()
            body = reply.read()
            assert reply.status == 200, body
            close(oip.parse(reply.headers, body)[1]["loss"], oip.expected(q, p)["loss"], "FP32")


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("shape", [(2, 3), (500, 2000)])
def test_compressed(server, encoding, binary, shape):
    q, p = probabilities(shape, 17), probabilities(shape, 18)
    if not binary and shape[0] > 2:
        q, p = q[:50], p[:50]
    headers, data = oip.body({"predictions": q, "targets": p}, binary=binary)
    packed = gzip.compress(data, 1) if encoding != "deflate" else zlib.compress(data, 1)
    status, reply_headers, body = server.request(INFER, packed,
                                                 {**headers, "Content-Encoding": encoding})
    assert status == 200, body
    close(oip.parse(reply_headers, body)[1]["loss"], oip.expected(q, p)["loss"], "FP32")


def test_gzip_in_several_members(server):
    """As `cat a.gz b.gz` makes it; split anywhere, an empty one among them."""
    q, p = probabilities((50, 200), 17), probabilities((50, 200), 18)
    headers, data = oip.body({"predictions": q, "targets": p})
    for cuts in ([1], [len(data) // 2], [200, 200, 5000], [len(data)]):
        edges = [0, *cuts, len(data)]
        packed = b"".join(gzip.compress(data[a:b]) for a, b in zip(edges, edges[1:]))
        for pieces in (packed, pieces_of(packed, 997)):
            with Connection(server) as connection:
                connection.http.request("POST", INFER, pieces, {**headers, "Content-Encoding": "gzip"},
                                        encode_chunked=pieces is not packed)
                reply = connection.http.getresponse()
                body = reply.read()
                assert reply.status == 200, body
                close(oip.parse(reply.headers, body)[1]["loss"], oip.expected(q, p)["loss"], "FP32")


@pytest.mark.parametrize("accept, coding", [
    (None, None), ("gzip", "gzip"), ("deflate", "deflate"), ("br;q=1, gzip;q=0.2, deflate;q=0.8", "deflate"),
    ("gzip;q=0", None), ("identity", None), ("*", "gzip")])
def test_compressed_replies(server, accept, coding):
    """Inference and what is not JSON, for who asks for it; tensors, small texts and other JSON go as they are."""
    q, p = probabilities((40, 100), 19), probabilities((40, 100), 20)
    more = {"Accept-Encoding": accept} if accept else {}
    unpack = {"gzip": gzip.decompress, "deflate": zlib.decompress, None: bytes}[coding]
    asked = {"loss": None, "grad_predictions": None}
    headers, data = oip.body({"predictions": q, "targets": p}, asked)
    status, reply_headers, body = server.request(INFER, data, {**headers, **more})
    assert status == 200 and reply_headers["Content-Encoding"] == coding
    assert coding is None or (reply_headers["Vary"] == "Accept-Encoding" and
                              len(body) < 0.7 * len(unpack(body)))
    close(oip.parse({}, unpack(body))[1]["grad_predictions"], oip.expected(q, p)["grad_predictions"], "FP32")
    for path, expected in (("/metrics", coding), ("/v2/models/kl_div/config", None), ("/v2", None)):
        assert server.request(path, headers=more)[1]["Content-Encoding"] == expected, path
    headers, data = oip.body({"predictions": q, "targets": p}, asked, {"binary_data_output": True})
    status, reply_headers, body = server.request(INFER, data, {**headers, **more})
    assert status == 200 and reply_headers["Content-Encoding"] is None


@pytest.mark.parametrize("target", ["http://example.org/v2", "HTTPS://127.0.0.1:1/v2?x=1", "http://[::1]:80/v2"])
def test_a_proxy_names_the_whole_url(server, target):
    with Connection(server) as connection:
        connection.http.putrequest("GET", target, skip_host=True)
        connection.http.putheader("Host", "localhost")
        connection.http.endheaders()
        reply = connection.http.getresponse()
        assert reply.status == 200 and json.loads(reply.read())["name"] == "kld"


def test_expect_100_continue(server):
    q, p = probabilities((2, 3), 19), probabilities((2, 3), 20)
    headers, data = oip.body({"predictions": q, "targets": p})
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 60) as connection:
        lines = [f"POST {INFER} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}",
                 "Expect: 100-continue"] + [f"{k}: {v}" for k, v in headers.items()]
        connection.sendall("\r\n".join(lines + ["", ""]).encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
        connection.sendall(data)
        assert b" 200 OK" in connection.recv(1000)


def test_kept_alive_without_a_body(server):
    """Replies to requests that have no body, errors too, leave the connection open."""
    with Connection(server) as connection:
        connection.http.connect()
        socket_of = connection.http.sock
        for method, path, expected in [("GET", "/v2/health/live", 200), ("HEAD", "/v2", 200),
                                       ("GET", "/nope", 404), ("GET", INFER, 405),
                                       ("POST", INFER, 400), ("POST", "/v2/repository/index", 200),
                                       ("GET", "/metrics", 200)]:
            status, headers, _ = connection.ask(method, path)
            assert status == expected and headers.get("Connection", "").lower() != "close"
            assert connection.http.sock is socket_of


def test_pipelined_without_waiting(server):
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 60) as connection:
        line = b"%s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
        connection.sendall(line % (b"GET /v2/health/live", b"") + line % (b"GET /nope", b"") +
                           line % (b"POST " + INFER.encode(), b"Content-Length: 2\r\n") + b"{}" +
                           line % (b"GET /v2", b"Connection: close\r\n"))
        replies = b""
        while got := connection.recv(65536):
            replies += got
    assert re.findall(rb"HTTP/1.1 (\d+)", replies) == [b"200", b"404", b"400", b"200"]


def test_pipelined_and_kept_alive(server):
    with Connection(server) as connection:
        for seed in range(20):
            q, p = probabilities((3, 8), seed), probabilities((3, 8), seed + 100)
            headers, data = oip.body({"predictions": q, "targets": p}, id=str(seed))
            status, headers, body = connection.ask("POST", INFER, data, headers)
            reply, got = oip.parse(headers, body)
            assert status == 200 and reply["id"] == str(seed)
            close(got["loss"], oip.expected(q, p)["loss"], "FP32")


def test_many_connections_at_once(server):
    """More in flight than the worker takes from one client: the rest wait their turn."""
    q, p = probabilities((200, 1000), 21), probabilities((200, 1000), 22)
    headers, data = oip.body({"predictions": q, "targets": p})
    _, truth = infer(server, {"predictions": q, "targets": p})
    problems = []

    def ask():
        try:
            with Connection(server) as connection:
                for _ in range(3):
                    status, reply_headers, body = connection.ask("POST", INFER, data, headers)
                    if status == 503:
                        continue  # the staging memory was full
                    got = oip.parse(reply_headers, body)[1]["loss"]
                    assert got.tobytes() == truth["loss"].tobytes()
        except Exception as problem:  # noqa: BLE001 - told by the main thread
            problems.append(problem)

    threads = [threading.Thread(target=ask) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems[0]
