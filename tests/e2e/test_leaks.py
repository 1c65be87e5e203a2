"""What one client can learn of another: errors, lists, metrics, the status page and the log hold no name, number or word of
somebody else's. Each word that is looked for here was sent by the other one in some place where text may stand."""
import hashlib
import json
import re

import numpy as np
import pytest

import oip
from httplib import PREFIX, Shared, probabilities

WORD, NUMBER = "alpha", 424243
SAYS = [("GET", "/"), ("GET", "/metrics"), ("GET", "/v2"), ("GET", "/v2/models/kl_div"), ("GET", "/v2/models/kl_div/stats"),
        ("GET", "/v2/models/stats"), ("GET", "/v2/models/kl_div/config"), ("POST", "/v2/repository/index"),
        ("GET", "/v2/systemsharedmemory/status"), ("GET", "/v2/cudasharedmemory/status"), ("GET", "/v2/tensors"),
        ("GET", "/v2/health/ready"), ("GET", "/nowhere")]


@pytest.fixture
def pair(make_server, tmp_path):
    """A server and, for two tokens with every right, what asks it: ask(path, body, method, headers) -> (status, body)."""
    (tmp_path / "tokens").write_text("".join(f"{name} {hashlib.sha256(name.encode()).hexdigest()} infer,shm,metrics\n"
                                             for name in (f"{WORD}-token", "bob")))
    server = make_server(tokens=tmp_path / "tokens", shm_prefix=PREFIX, log_level="debug")

    def asks(name):
        def ask(path, data=None, method=None, headers=None):
            status, _, body = server.heard(path, data, {**(headers or {}), "Authorization": f"Bearer {name}"}, method)
            return status, body.decode()
        return ask
    return server, asks(f"{WORD}-token"), asks("bob")


def leave_traces(ask, shared):
    """Says the word wherever a caller can, mostly in vain."""
    def json_body(**more):
        tensors = [{"name": name, "shape": [1, 2], "datatype": "FP32", "data": [0.5, 0.5]}
                   for name in ("predictions", "targets")]
        return json.dumps({"inputs": tensors, **more}).encode()
    region = {"key": shared.key, "byte_size": 4096}
    assert ask(f"/v2/systemsharedmemory/region/{WORD}-region/register", json.dumps(region).encode())[0] == 200
    place = f"/v2/tensors/{WORD}-tensor?datatype=FP32&shape=2,3"
    assert ask(place, probabilities((2, 3), 1).tobytes(), "PUT")[0] == 200
    assert ask(oip.INFER, json_body(id=f"{WORD}-id"))[0] == 200
    for body in (json_body(parameters={f"{WORD}-parameter": 1}), json_body(outputs=[{"name": f"{WORD}-output"}]),
                 json_body(parameters={"divergence": f"{WORD}-divergence"}), b'{"%s": 1, "%s": 2}' % ((WORD.encode(),) * 2),
                 json.dumps({"inputs": [{"name": f"{WORD}-input", "shape": [NUMBER], "datatype": f"{WORD}"}]}).encode(),
                 json_body(parameters={"temperature": -NUMBER}), b"{" + WORD.encode()):
        assert ask(oip.INFER, body)[0] == 400
    tensor = {"name": "predictions", "shape": [1, NUMBER], "datatype": "FP32",
              "parameters": {"shared_memory_region": f"{WORD}-absent", "shared_memory_byte_size": 4 * NUMBER}}
    assert ask(oip.INFER, json.dumps({"inputs": [tensor, {**tensor, "name": "targets"}]}).encode())[0] >= 400
    assert ask(oip.INFER, b"x", headers={"Content-Encoding": WORD})[0] >= 400
    assert ask(f"/v2/tensors/{WORD}?datatype={WORD}&shape={NUMBER}", b"1", "PUT")[0] == 400
    assert ask(f"/v2/tensors/{WORD}?{WORD}=1", b"1", "PUT")[0] == 400
    assert ask(f"/{WORD}/path")[0] == 404
    bad = {"key": f"{PREFIX}{WORD}-key", "byte_size": NUMBER}
    assert ask(f"/v2/systemsharedmemory/region/{WORD}-2/register", json.dumps(bad).encode())[0] >= 400


def test_a_token_learns_nothing_of_another(pair):
    server, alpha, bob = pair
    with Shared(4096, f"{WORD}-object") as shared:
        leave_traces(alpha, shared)
        for method, path in SAYS:
            _, body = bob(path, b"" if method == "POST" else None, method)
            # of its own: a count of nanoseconds has had it in it
            assert WORD not in body and not re.search(rf"(?<!\d){NUMBER}(?!\d)", body), (path, body)
        assert json.loads(bob("/v2/systemsharedmemory/status")[1]) == []
        # The same names are his own: nothing is there, nothing is taken.
        assert bob(f"/v2/tensors/{WORD}-tensor")[0] == bob(f"/v2/tensors/{WORD}-tensor", None, "DELETE")[0] == 404
        assert bob(f"/v2/systemsharedmemory/region/{WORD}-region/status")[0] == 404
        tensor = {"name": "predictions", "shape": [2, 3], "datatype": "FP32"}
        for name in ("region", "tensor"):
            where = {"shared_memory_region": f"{WORD}-{name}", "shared_memory_byte_size": 24}
            if name == "tensor":
                where = {"stored_tensor": f"{WORD}-tensor"}
            there = json.dumps({"inputs": [{**tensor, "parameters": where}, {**tensor, "name": "targets",
                                                                            "data": [1, 0, 0, 1, 0, 0]}]})
            status, body = bob(oip.INFER, there.encode())
            assert status in (400, 404) and "24 bytes" not in body, body
        assert bob(f"/v2/tensors/{WORD}-tensor?datatype=FP32&shape=1", np.zeros(1, "<f4").tobytes(), "PUT")[0] == 200
        assert bob("/v2/systemsharedmemory/unregister", b"", "POST")[0] == 200
        # And what she has is as it was.
        assert alpha(f"/v2/systemsharedmemory/region/{WORD}-region/status")[0] == 200
        assert '"shape":[2,3]' in alpha(f"/v2/tensors/{WORD}-tensor")[1].replace(" ", "")
    # The log is the operator's: it names tokens, and nothing that their callers called anything.
    log = re.sub(f'token="{WORD}-token"', "", server.log())
    lines = [line for line in log.splitlines() if WORD in line or str(NUMBER) in line]
    assert lines == []
