"""Other people's clients against our server: tritonclient (blocking and asyncio), curl, schemathesis.
They come from PyPI (tests/requirements.txt); without them these tests are skipped, in CI they fail."""
import asyncio
import gzip
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import oip
from conftest import ROOT, SANITIZER, Server, needs
from httplib import PREFIX, Shared, close, logits, probabilities
from oip import INFER, LENGTH


@pytest.fixture(scope="module")
def server(backend):
    one = Server(backend=backend, shm_prefix=PREFIX, staging_bytes_max="256M", json_bytes_max="16M").wait_linked()
    yield one
    alive = one.process.poll() is None
    status = one.stop() if alive else None
    log = one.log()
    one.remove()
    assert alive and status == 0 and not SANITIZER.search(log), log


# ---- tritonclient ---------------------------------------------------------------------------------

@pytest.fixture
def triton(server):
    needs("tritonclient")
    import tritonclient.http
    client = tritonclient.http.InferenceServerClient(server.address, concurrency=4)
    client.module = tritonclient.http
    yield client
    client.close()


def tensors(module, arrays, binary=True):
    inputs = []
    for name, array in arrays.items():
        inputs.append(module.InferInput(name, list(array.shape), oip.NAMES[array.dtype]))
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    return inputs


def outputs(module, names, binary=True):
    return [module.InferRequestedOutput(name, binary_data=binary) for name in names]


PAIR = {"predictions": probabilities((5, 17), 1), "targets": probabilities((5, 17), 2)}
NAMES = ["loss", "row_loss", "grad_predictions", "grad_targets"]


def right(result, names=NAMES, **parameters):
    truth = oip.expected(PAIR["predictions"], PAIR["targets"], **parameters)
    for name in names:
        close(result.as_numpy(name), truth[name], "FP32")


def test_triton_asks_about_everything(triton):
    assert triton.is_server_live() and triton.is_server_ready()
    assert triton.is_model_ready("kl_div") and triton.is_model_ready("kl_div", "1")
    assert not triton.is_model_ready("other") and not triton.is_model_ready("kl_div", "2")
    assert "statistics" in triton.get_server_metadata()["extensions"]
    assert triton.get_model_metadata("kl_div", "1")["platform"] == "kld_native"
    assert triton.get_model_config("kl_div")["max_batch_size"] == 0
    assert triton.get_model_repository_index()[0]["state"] == "READY"
    assert triton.get_system_shared_memory_status() == triton.get_cuda_shared_memory_status() == []
    with pytest.raises(triton.module.InferenceServerException, match="no such"):
        triton.get_model_metadata("other")


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("sent", [None, "gzip", "deflate"])
@pytest.mark.parametrize("asked", [None, "gzip", "deflate"])
def test_triton_infers(triton, binary, sent, asked):
    result = triton.infer("kl_div", tensors(triton.module, PAIR, binary), model_version="1",
                          outputs=outputs(triton.module, NAMES, binary), request_id="a/7 \u00e9",
                          parameters={"divergence": "js", "beta": 0.3}, timeout=30000000, priority=1,
                          request_compression_algorithm=sent, response_compression_algorithm=asked)
    right(result, divergence="js", beta=0.3)
    assert result.get_response()["id"] == "a/7 \u00e9"
    assert result.get_output("loss")["datatype"] == "FP32" and result.get_output("lose") is None


def test_triton_without_outputs_gets_the_loss(triton):
    """The client asks for binary outputs then (binary_data_output)."""
    result = triton.infer("kl_div", tensors(triton.module, PAIR))
    right(result, ["loss"])
    assert [o["name"] for o in result.get_response()["outputs"]] == ["loss"]


def test_triton_asynchronously(triton):
    waiting = [triton.async_infer("kl_div", tensors(triton.module, PAIR), request_id=str(i))
               for i in range(8)]
    for i, one in enumerate(waiting):
        result = one.get_result(timeout=60)
        right(result, ["loss"])
        assert result.get_response()["id"] == str(i)


def test_triton_bf16(triton):
    """Tensors and gradient in the client's own BF16."""
    needs("ml_dtypes")
    from ml_dtypes import bfloat16
    q, p = (probabilities((4, 8), seed).astype(bfloat16) for seed in (3, 4))
    inputs = []
    for name, array in (("predictions", q), ("targets", p)):
        inputs.append(triton.module.InferInput(name, [4, 8], "BF16"))
        inputs[-1].set_data_from_numpy(array)
    result = triton.infer("kl_div", inputs, outputs=outputs(triton.module, ["loss", "grad_predictions"]))
    truth = oip.expected(q.astype("<f8"), p.astype("<f8"))
    close(result.as_numpy("loss"), truth["loss"], "FP32")
    assert result.get_output("grad_predictions")["datatype"] == "BF16"
    close(result.as_numpy("grad_predictions").astype("<f4"), truth["grad_predictions"], "BF16")


def test_triton_half_weights_and_mask(triton):
    q, p = probabilities((4, 8), 5).astype("<f2"), probabilities((4, 8), 6).astype("<f2")
    weights, mask = np.array([1, 2, 0.5, 1], "<f4"), np.array([True, True, False, True])
    result = triton.infer("kl_div", tensors(triton.module, {
        "predictions": q, "targets": p, "row_weights": weights, "row_mask": mask}),
        outputs=outputs(triton.module, ["loss", "grad_predictions"]), parameters={"reduction": "rowmean"})
    truth = oip.expected(q, p, reduction="rowmean", row_weights=weights, row_mask=mask)
    close(result.as_numpy("loss"), truth["loss"], "FP32")
    assert result.as_numpy("grad_predictions").dtype == np.float16


def test_triton_statistics(triton):
    before = triton.get_inference_statistics("kl_div")["model_stats"][0]["inference_stats"]
    triton.infer("kl_div", tensors(triton.module, PAIR))
    with pytest.raises(triton.module.InferenceServerException, match="unknown divergence"):
        triton.infer("kl_div", tensors(triton.module, PAIR), parameters={"divergence": "x"})
    for found in (triton.get_inference_statistics(), triton.get_inference_statistics("kl_div", "1")):
        after = found["model_stats"][0]["inference_stats"]
        assert after["success"]["count"] == before["success"]["count"] + 1
        assert after["fail"]["count"] == before["fail"]["count"] + 1
        assert after["success"]["ns"] > before["success"]["ns"]


def test_triton_system_shared_memory(triton):
    """By the client's own utility: tensors in, gradient and loss out."""
    import tritonclient.utils.shared_memory as shm
    q, p = PAIR["predictions"], PAIR["targets"]
    key = f"{PREFIX}{os.getpid()}-triton"
    region = shm.create_shared_memory_region("tensors", key, 4096)
    try:
        shm.set_shared_memory_region(region, [q, p])
        triton.register_system_shared_memory("tensors", key, 4096)
        assert triton.get_system_shared_memory_status("tensors")[0]["byte_size"] == 4096
        inputs = [triton.module.InferInput(name, [5, 17], "FP32") for name in PAIR]
        wanted = [triton.module.InferRequestedOutput(name) for name in ("loss", "grad_predictions")]
        for i, tensor in enumerate(inputs):
            tensor.set_shared_memory("tensors", q.nbytes, i * q.nbytes)
        wanted[0].set_shared_memory("tensors", 4, 3000)
        wanted[1].set_shared_memory("tensors", q.nbytes, 2 * q.nbytes)
        result = triton.infer("kl_div", inputs, outputs=wanted)
        assert "data" not in result.get_output("loss")
        truth = oip.expected(q, p)
        close(shm.get_contents_as_numpy(region, np.float32, [1], 3000), truth["loss"], "FP32")
        close(shm.get_contents_as_numpy(region, np.float32, [5, 17], 2 * q.nbytes),
              truth["grad_predictions"], "FP32")
        triton.unregister_system_shared_memory("tensors")
        assert triton.get_system_shared_memory_status() == []
    finally:
        shm.destroy_shared_memory_region(region)


def by_asyncio(server, ask):
    """Runs ask(client, module) with a client of tritonclient's asyncio."""
    needs("tritonclient")
    import tritonclient.http.aio as module

    async def run():
        async with module.InferenceServerClient(server.address) as client:
            await ask(client, module)
    asyncio.run(run())


def test_triton_asyncio(server):
    async def ask(client, module):
        assert await client.is_server_live() and await client.is_model_ready("kl_div", "1")
        assert (await client.get_model_metadata("kl_div"))["versions"] == ["1"]
        results = await asyncio.gather(*[
            client.infer("kl_div", tensors(module, PAIR, binary), outputs=outputs(module, NAMES, binary),
                         request_id=str(i), request_compression_algorithm=sent,
                         response_compression_algorithm=asked)
            for i, (binary, sent, asked) in enumerate(
                (b, s, a) for b in (True, False) for s in (None, "gzip", "deflate")
                for a in (None, "gzip", "deflate"))])
        for i, result in enumerate(results):
            right(result)
            assert result.get_response()["id"] == str(i)
        assert (await client.get_inference_statistics())["model_stats"][0]["inference_count"] >= 18
        with pytest.raises(module.InferenceServerException, match="unknown parameter"):
            await client.infer("kl_div", tensors(module, PAIR), parameters={"x": 1})
    by_asyncio(server, ask)


def test_triton_asyncio_asks_about_everything(server):
    async def ask(client, module):
        assert await client.is_server_ready() and not await client.is_model_ready("other")
        assert "statistics" in (await client.get_server_metadata())["extensions"]
        assert (await client.get_model_config("kl_div"))["max_batch_size"] == 0
        index = await client.get_model_repository_index()
        assert [(model["name"], model["version"], model["state"]) for model in index] == [("kl_div", "1", "READY")]
        assert await client.get_system_shared_memory_status() == await client.get_cuda_shared_memory_status() == []
        with pytest.raises(module.InferenceServerException, match="no such"):
            await client.get_model_metadata("other")
    by_asyncio(server, ask)


@pytest.mark.parametrize("parameters", [{"divergence": "js", "beta": 0.3}, {"divergence": "skew_kl", "skew": 0.1},
                                        {"reduction": "sum", "scale": 2.5}, {"reduction": "mean", "normalizer": 7}])
def test_triton_asyncio_parameters(server, parameters):
    async def ask(client, module):
        result = await client.infer("kl_div", tensors(module, PAIR), model_version="1", outputs=outputs(module, NAMES),
                                    parameters=parameters, timeout=30000000, priority=1, request_id="a/7 \u00e9")
        right(result, **parameters)
        assert result.get_response()["id"] == "a/7 \u00e9"
    by_asyncio(server, ask)


def test_triton_asyncio_bf16(server):
    needs("ml_dtypes")
    from ml_dtypes import bfloat16
    pair = {name: array.astype(bfloat16) for name, array in PAIR.items()}

    async def ask(client, module):
        inputs = [module.InferInput(name, [5, 17], "BF16") for name in pair]
        for tensor, array in zip(inputs, pair.values()):
            tensor.set_data_from_numpy(array)
        result = await client.infer("kl_div", inputs, outputs=outputs(module, ["loss", "grad_predictions"]))
        truth = oip.expected(*(array.astype("<f8") for array in pair.values()))
        close(result.as_numpy("loss"), truth["loss"], "FP32")
        assert result.get_output("grad_predictions")["datatype"] == "BF16"
        close(result.as_numpy("grad_predictions").astype("<f4"), truth["grad_predictions"], "BF16")
    by_asyncio(server, ask)


def test_triton_asyncio_system_shared_memory(server):
    """Tensors in and gradient out of one region, the loss into another; what is read is what lies there then."""
    q, p = PAIR["predictions"], PAIR["targets"]

    async def ask(client, module):
        inputs = [module.InferInput(name, [5, 17], "FP32") for name in PAIR]
        for i, tensor in enumerate(inputs):
            tensor.set_shared_memory("a", q.nbytes, i * q.nbytes)
        wanted = [module.InferRequestedOutput(name) for name in ("loss", "grad_predictions")]
        wanted[0].set_shared_memory("b", 4, 8)
        wanted[1].set_shared_memory("a", q.nbytes, 2 * q.nbytes)
        await client.register_system_shared_memory("a", one.key, 4000)
        await client.register_system_shared_memory("b", two.key, 12, offset=100)
        for pair in ((q, p), (p, q)):
            one.map[:2 * q.nbytes] = pair[0].tobytes() + pair[1].tobytes()
            result = await client.infer("kl_div", inputs, outputs=wanted)
            assert "data" not in result.get_output("loss")
            truth = oip.expected(*pair)
            close(np.frombuffer(two.map[108:112], "<f4"), truth["loss"], "FP32")
            close(np.frombuffer(one.map[2 * q.nbytes:3 * q.nbytes], "<f4").reshape(5, 17), truth["grad_predictions"],
                  "FP32")
        assert {entry["name"] for entry in await client.get_system_shared_memory_status()} == {"a", "b"}
        assert (await client.get_system_shared_memory_status("b"))[0]["offset"] == 100
        await client.unregister_system_shared_memory("a")
        with pytest.raises(module.InferenceServerException, match="'a'"):
            await client.infer("kl_div", inputs, outputs=wanted)
        await client.unregister_system_shared_memory()
        assert await client.get_system_shared_memory_status() == []
    with Shared(4096, "a") as one, Shared(4096, "b") as two:
        by_asyncio(server, ask)


# ---- curl -----------------------------------------------------------------------------------------

def curl(server, *arguments, data=None):
    """-> (the last status, its headers as text, the body)."""
    out = subprocess.run(["curl", "-sS", "-i", server.http + INFER, *arguments], input=data,
                         capture_output=True, check=True).stdout
    while out.startswith(b"HTTP/1.1 100"):
        out = out.split(b"\r\n\r\n", 1)[1]
    head, body = out.split(b"\r\n\r\n", 1)
    return int(head.split()[1]), head.decode(), body


@pytest.mark.parametrize("transport", [[], ["-H", "Expect: 100-continue"],
                                       ["-H", "Transfer-Encoding: chunked"],
                                       ["-H", "Transfer-Encoding: chunked", "-H", "Expect: 100-continue"],
                                       ["--http1.0"]])
@pytest.mark.parametrize("packed", [False, True])
def test_curl_sends_every_way(server, transport, packed):
    q, p = logits((300, 1000), 7), logits((300, 1000), 8)
    headers, data = oip.body({"predictions": q, "targets": p}, None,
                             {"predictions_form": "logits", "targets_form": "logits"})
    more = ["-H", f"{LENGTH}: {headers[LENGTH]}", "-H", "Content-Type: application/octet-stream"]
    if packed:
        data = gzip.compress(data, 1)
        more += ["-H", "Content-Encoding: gzip"]
    status, _, body = curl(server, *transport, *more, "--data-binary", "@-", data=data)
    assert status == 200, body
    truth = oip.expected(q, p, predictions_form="logits", targets_form="logits")["loss"]
    close(np.array(json.loads(body)["outputs"][0]["data"], "<f4"), truth, "FP32")


# ---- The document ---------------------------------------------------------------------------------

# No schema can say which parameters fit which divergence, or that all bytes of a body add up.

CONFIGURATION = "".join(f"""
[[operations]]
include-name = "POST {path}"
checks.positive_data_acceptance.enabled = false
checks.negative_data_rejection.expected-statuses = [400, 404, 405, 413, 415, 501]
""" for path in (INFER, INFER.replace("/infer", "/versions/1/infer"))) + """
[[operations]]
include-name = "PUT /v2/tensors/{name}"
checks.positive_data_acceptance.enabled = false
checks.negative_data_rejection.expected-statuses = [400, 404, 405, 413, 415]
"""


def schemathesis(server, folder, *arguments):
    """-> how many requests it made; none of them found anything."""
    needs("schemathesis")
    (folder / "configuration").write_text(CONFIGURATION)
    result = subprocess.run(
        [str(pathlib.Path(sys.executable).with_name("st")), "--config-file", "configuration", "run",
         str(ROOT / "proto/openapi.yaml"), "--url", server.http, "--seed", "1", "--max-examples", "30",
         "--phases", "examples,coverage,fuzzing", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr
    return int(re.search(r"(\d+) generated", result.stdout).group(1))


def test_schemathesis_finds_nothing(server, tmp_path):
    """Requests made from proto/openapi.yaml, right and wrong ones; every reply is as it says."""
    assert schemathesis(server, tmp_path) > 500
    assert server.request("/v2/health/ready")[0] == 200


# Where 401 and 403 are no answer to what is right, of these only the replies are looked at.
REPLIES = ["--checks", "not_a_server_error,status_code_conformance,content_type_conformance,"
           "response_headers_conformance,response_schema_conformance"]


@pytest.mark.parametrize("name, arguments", [("all", []), ("one", REPLIES), (None, REPLIES)])
def test_schemathesis_and_tokens(make_server, tmp_path, name, arguments):
    """By a token that may do everything, by one that may only infer, by nobody."""
    (tmp_path / "tokens").write_text("".join(
        f"{token} {hashlib.sha256(token.encode()).hexdigest()} {rights}\n"
        for token, rights in (("all", "infer,shm,metrics"), ("one", "infer"))))
    server = make_server(tokens=tmp_path / "tokens", shm_prefix=PREFIX)
    bearer = ["--header", f"Authorization: Bearer {name}"] if name else []
    assert schemathesis(server, tmp_path, *bearer, *arguments) > 500
    text = server.request("/metrics", headers={"Authorization": "Bearer all"})[2].decode()
    forbidden, unknown = (int(re.search(rf'_rejected_total{{front="http",reason="{reason}"}} (\d+)', text).group(1))
                          for reason in ("forbidden", "unauthenticated"))
    assert unknown > 500 if name is None else unknown == 0
    assert forbidden > 200 if name == "one" else forbidden < 200  # keys without the prefix, too
