"""CUDA shared memory over HTTP (Triton's extension): GPU memory of callers on this host, registered by its IPC
handle. What is refused, everywhere; what is computed, on the CUDA back end only."""
import asyncio
import base64
import hashlib
import importlib
import json

import numpy as np
import pytest

import oip
from conftest import wait_until
from httplib import close, probabilities
from oip import INFER

PATH = "/v2/cudasharedmemory"
GOOD = {"raw_handle": {"b64": base64.b64encode(bytes(range(64))).decode()}, "device_id": 0, "byte_size": 4096}
ROOM = 4 << 20  # larger than what the driver shares out of a block
SHAPE = (64, 1024)
BYTES = 4 * SHAPE[0] * SHAPE[1]


def register(server, name, body, token=None):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    status, _, reply = server.request(f"{PATH}/region/{name}/register", json.dumps(body).encode(), headers)
    return status, json.loads(reply)["error"] if reply else ""


def tensor(name, region, offset, shape=SHAPE):
    return {"name": name, "shape": list(shape), "datatype": "FP32", "parameters": {
        "shared_memory_region": region, "shared_memory_offset": offset,
        "shared_memory_byte_size": int(np.prod(shape)) * 4}}


def output(name, region, offset, size):
    return {"name": name, "parameters": {"shared_memory_region": region, "shared_memory_offset": offset,
                                         "shared_memory_byte_size": size}}


def ask(server, inputs, outputs=None, headers=None, **more):
    body = {"inputs": inputs, **more, **({"outputs": outputs} if outputs else {})}
    status, _, reply = server.request(INFER, json.dumps(body).encode(), headers)
    return status, json.loads(reply)


# ---- Without a GPU ----------------------------------------------------------------------------------------

def test_off_until_the_operator_says_so(make_server):
    server = make_server()
    status, error = register(server, "r", GOOD)
    assert status == 403 and "cuda_shm" in error
    assert "cuda_shared_memory" not in server.json("/v2")[1]["extensions"]


def test_no_gpu_no_cuda_memory(make_server):
    server = make_server(backend="cpu", cuda_shm="true")
    status, error = register(server, "r", GOOD)
    assert status == 501 and "CPU" in error
    assert "cuda_shared_memory" not in server.json("/v2")[1]["extensions"]


@pytest.fixture(scope="module")
def plain(backend):
    from conftest import Server
    one = Server(backend=backend, cuda_shm="true", shm_prefix="/kld-test-")
    yield one
    assert one.metrics()["kld_http_regions"] == 0
    status = one.stop()
    one.remove()
    assert status == 0


HANDLE = GOOD["raw_handle"]["b64"]


@pytest.mark.parametrize("change, part", [
    ({"raw_handle": None}, "raw_handle"), ({"raw_handle": {}}, "raw_handle"), ({"raw_handle": HANDLE}, "raw_handle"),
    ({"raw_handle": {"b64": ""}}, "64 bytes"), ({"raw_handle": {"b64": 5}}, "64 bytes"),
    ({"raw_handle": {"b64": HANDLE[:-4]}}, "64 bytes"), ({"raw_handle": {"b64": HANDLE + "AAAA"}}, "64 bytes"),
    ({"raw_handle": {"b64": HANDLE[:-2] + "AA"}}, "64 bytes"), ({"raw_handle": {"b64": "-" + HANDLE[1:]}}, "64 bytes"),
    ({"raw_handle": {"b64": HANDLE[:85] + "x=="}}, "64 bytes"), ({"raw_handle": {"b64": "\\u00e4" * 44}}, "64 bytes"),
    ({"raw_handle": {"b64": HANDLE, "x": 1}}, "unknown key 'x'"), ({"key": "/a"}, "unknown key 'key'"),
    ({"device_id": -1}, "device_id"), ({"device_id": 0.5}, "device_id"), ({"device_id": "0"}, "device_id"),
    ({"device_id": 99}, "device_id 99"), ({"device_id": 2 ** 53 - 1}, "device_id"), ({"byte_size": 0}, "byte_size"),
    ({"byte_size": -5}, "byte_size"), ({"byte_size": 2 ** 60}, "byte_size"), ({"byte_size": None}, "byte_size")])
def test_bad_bodies(plain, change, part):
    body = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    status, error = register(plain, "r", body)
    assert status == 400 and part in error, error
    assert plain.json(PATH + "/status") == (200, [])


def test_bad_names(plain):
    status, error = register(plain, "x" * 128, GOOD)
    assert status == 400 and "name" in error
    status, error = register(plain, "a%cd", GOOD)
    assert status == 400 and "UTF-8" in error
    assert plain.request(f"{PATH}/region//register", b"{}")[0] == 404
    for body in (b"", b"[]", b"{", b"null"):
        assert plain.request(f"{PATH}/region/a/register", body, method="POST")[0] == 400


def test_what_is_not_registered(plain):
    assert plain.json(f"{PATH}/region/none/status")[0] == 404
    assert plain.request(f"{PATH}/region/none/unregister", b"", method="POST")[0] == 200
    assert plain.request(f"{PATH}/unregister", b"", method="POST")[0] == 200
    status, reply = ask(plain, [tensor("predictions", "none", 0), tensor("targets", "none", BYTES)])
    assert status == 404 and "none" in reply["error"]


# ---- On the card ------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def gpu(backend):
    if backend != "cuda":
        pytest.skip("needs the CUDA back end")
    from gpulib import Gpu
    return Gpu()


@pytest.fixture
def server(gpu, make_server):
    return make_server(cuda_shm="true", shm_prefix="/kld-test-", http_threads=2)


@pytest.fixture
def memory(gpu):
    from gpulib import Allocation
    gpu.select()
    one = Allocation(gpu, ROOM)
    yield one
    one.free()


def body_of(memory, size=None):
    return {"raw_handle": {"b64": base64.b64encode(memory.handle).decode()}, "device_id": memory.gpu.index,
            "byte_size": size or memory.size}


def fill(gpu, memory, seed=1):
    q, p = probabilities(SHAPE, seed), probabilities(SHAPE, seed + 1)
    gpu.put(memory.at, q)
    gpu.put(memory.at + BYTES, p)
    return q, p


INPUTS = [tensor("predictions", "r", 0), tensor("targets", "r", BYTES)]


def test_loss_and_gradient_in_the_callers_memory(gpu, server, memory):
    q, p = fill(gpu, memory)
    assert "cuda_shared_memory" in server.json("/v2")[1]["extensions"]
    assert register(server, "r", body_of(memory)) == (200, "")
    listed = [{"name": "r", "device_id": gpu.index, "byte_size": ROOM}]
    assert server.json(PATH + "/status") == (200, listed) == server.json(f"{PATH}/region/r/status")
    assert server.metrics()["kld_http_regions"] == 1
    truth = oip.expected(q, p)
    for _ in range(3):
        status, reply = ask(server, INPUTS, [{"name": "loss"}, output("grad_predictions", "r", 2 * BYTES, BYTES)])
        assert status == 200, reply
        close(np.array(reply["outputs"][0]["data"], "<f4"), np.reshape(truth["loss"], (1,)), "FP32")
        assert "data" not in reply["outputs"][1]
        close(gpu.get(memory.at + 2 * BYTES, SHAPE), truth["grad_predictions"], "FP32")
    # Over its own input; with the other input sent along; the loss into the region.
    headers, data = oip.body({"targets": p})
    length = int(headers[oip.LENGTH])
    mixed = json.loads(data[:length])
    mixed["inputs"].insert(0, INPUTS[0])
    mixed["outputs"] = [output("loss", "r", 3 * BYTES, 4), output("grad_predictions", "r", 0, BYTES)]
    text = json.dumps(mixed).encode()
    status, _, reply = server.request(INFER, text + data[length:], {oip.LENGTH: str(len(text))})
    assert status == 200, reply
    close(gpu.get(memory.at, SHAPE), truth["grad_predictions"], "FP32")
    close(gpu.get(memory.at + 3 * BYTES, (1,)), np.reshape(truth["loss"], (1,)), "FP32")
    assert server.request(f"{PATH}/region/r/unregister", b"", method="POST")[0] == 200
    assert ask(server, INPUTS)[0] == 404 and server.json(PATH + "/status") == (200, [])
    assert register(server, "r", body_of(memory)) == (200, "")  # again
    assert server.request(f"{PATH}/unregister", b"", method="POST")[0] == 200
    wait_until(lambda: server.metrics()['kld_worker_regions{worker="0"}'] == 3, what="the worker's release")


def test_what_the_worker_refuses(gpu, server, memory):
    status, error = register(server, "r", {**body_of(memory), "byte_size": 64 * ROOM})
    assert status == 400 and "beyond" in error, error
    status, error = register(server, "r", {**GOOD, "device_id": gpu.index})
    assert 400 <= status < 500 and error, (status, error)
    assert server.json(PATH + "/status") == (200, [])
    assert register(server, "r", body_of(memory)) == (200, "")
    assert register(server, "r", body_of(memory))[0] == 409
    status, reply = ask(server, [tensor("predictions", "r", ROOM - 4), INPUTS[1]])
    assert status == 400 and "do not fit" in reply["error"]
    status, reply = ask(server, [tensor("predictions", "r", 2 ** 53 - 1), INPUTS[1]])
    assert status == 400
    status, reply = ask(server, [tensor("predictions", "r", 2), INPUTS[1]])
    assert status == 400, reply  # not aligned
    status, reply = ask(server, INPUTS, [output("grad_predictions", "r", 4 * 512, BYTES)])
    assert status == 400, reply  # overlaps its input in part
    assert ask(server, INPUTS)[0] == 200


def test_one_name_for_both_kinds(gpu, server, memory):
    from httplib import Shared
    assert register(server, "r", body_of(memory)) == (200, "")
    with Shared(4096) as shared:
        system = "/v2/systemsharedmemory/region/"
        wanted = {"key": shared.key, "byte_size": 4096}
        assert server.json(system + "r/register", wanted)[0] == 409
        assert server.request(system + "s/register", json.dumps(wanted).encode())[0] == 200
        assert register(server, "s", body_of(memory))[0] == 409


def test_a_worker_that_is_replaced_has_it_again(gpu, server, memory):
    q, p = fill(gpu, memory, 5)
    assert register(server, "r", body_of(memory)) == (200, "")
    assert ask(server, INPUTS)[0] == 200
    server.kill_child("worker")
    truth = oip.expected(q, p)["loss"]

    def answered():
        status, reply = ask(server, INPUTS)
        return status == 200 and reply
    reply = wait_until(answered, 30, what="the next worker")
    close(np.array(reply["outputs"][0]["data"], "<f4"), np.reshape(truth, (1,)), "FP32")


def test_regions_belong_to_who_registered_them(gpu, make_server, memory, tmp_path):
    path = tmp_path / "tokens"
    path.write_text("".join(f"{name} {hashlib.sha256(name.encode()).hexdigest()} infer,shm\n" for name in ("a1", "b2")))
    server = make_server(cuda_shm="true", tokens=str(path))
    fill(gpu, memory)
    assert register(server, "r", body_of(memory), "a1") == (200, "")
    other = {"Authorization": "Bearer b2"}
    assert server.request(PATH + "/status", headers=other)[2] == b"[]"
    assert ask(server, INPUTS, headers=other)[0] == 404
    assert server.request(f"{PATH}/unregister", b"", other, "POST")[0] == 200
    assert ask(server, INPUTS, headers={"Authorization": "Bearer a1"})[0] == 200


def test_two_small_allocations_of_one_block(gpu, server):
    """The driver gives out small allocations from one block; each handle is of its own."""
    from gpulib import Allocation
    gpu.select()
    shape = (2, 8)
    q, p = probabilities(shape, 7), probabilities(shape, 8)
    one, two = Allocation(gpu, q.nbytes), Allocation(gpu, p.nbytes)
    gpu.put(one.at, q)
    gpu.put(two.at, p)
    try:
        assert register(server, "q", body_of(one)) == register(server, "p", body_of(two)) == (200, "")
        status, reply = ask(server, [tensor("predictions", "q", 0, shape), tensor("targets", "p", 0, shape)])
        assert status == 200, reply
        close(np.array(reply["outputs"][0]["data"], "<f4"), np.reshape(oip.expected(q, p)["loss"], (1,)), "FP32")
    finally:
        one.free()
        two.free()


def triton(name):
    """A module of tritonclient and its utility; that needs cuda-bindings beside a card."""
    try:
        import tritonclient.utils.cuda_shared_memory as cudashm
        return importlib.import_module(name), cudashm
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))


def inputs_in_region(http):
    inputs = []
    for i, name in enumerate(("predictions", "targets")):
        inputs.append(http.InferInput(name, list(SHAPE), "FP32"))
        inputs[-1].set_shared_memory("r", BYTES, offset=i * BYTES)
    return inputs


def output_in_region(http, name, place):
    wanted = http.InferRequestedOutput(name)
    wanted.set_shared_memory("r", BYTES, offset=place * BYTES)
    return wanted


def test_tritonclients_own_utility(gpu, server):
    """As NVIDIA's examples do it."""
    http, cudashm = triton("tritonclient.http")
    q, p = probabilities(SHAPE, 9), probabilities(SHAPE, 10)
    region = cudashm.create_shared_memory_region("r", ROOM, gpu.index)
    try:
        cudashm.set_shared_memory_region(region, [q, p])
        client = http.InferenceServerClient(server.address)
        client.register_cuda_shared_memory("r", cudashm.get_raw_handle(region), gpu.index, ROOM)
        assert client.get_cuda_shared_memory_status()[0]["byte_size"] == ROOM
        client.infer("kl_div", inputs_in_region(http), outputs=[output_in_region(http, "grad_predictions", 2)])
        got = cudashm.get_contents_as_numpy(region, np.float32, [3, *SHAPE])[2]
        close(got, oip.expected(q, p)["grad_predictions"], "FP32")
        client.unregister_cuda_shared_memory("r")
        assert client.get_cuda_shared_memory_status() == []
    finally:
        cudashm.destroy_shared_memory_region(region)


def test_tritonclients_asyncio_with_its_own_utility(gpu, server):
    """Two requests at a time, each with its gradient in a place of its own."""
    http, cudashm = triton("tritonclient.http.aio")
    q, p = probabilities(SHAPE, 11), probabilities(SHAPE, 12)
    region = cudashm.create_shared_memory_region("r", ROOM, gpu.index)

    def request(client, name, place):
        return client.infer("kl_div", inputs_in_region(http), outputs=[output_in_region(http, name, place)])

    async def talk():
        async with http.InferenceServerClient(server.address) as client:
            await client.register_cuda_shared_memory("r", cudashm.get_raw_handle(region), gpu.index, ROOM)
            assert (await client.get_cuda_shared_memory_status())[0]["byte_size"] == ROOM
            await asyncio.gather(request(client, "grad_predictions", 2), request(client, "grad_targets", 3))
            await client.unregister_cuda_shared_memory("r")
            assert await client.get_cuda_shared_memory_status() == []
    try:
        cudashm.set_shared_memory_region(region, [q, p])
        asyncio.run(talk())
        got = cudashm.get_contents_as_numpy(region, np.float32, [4, *SHAPE])
        truth = oip.expected(q, p)
        close(got[2], truth["grad_predictions"], "FP32")
        close(got[3], truth["grad_targets"], "FP32")
    finally:
        cudashm.destroy_shared_memory_region(region)
