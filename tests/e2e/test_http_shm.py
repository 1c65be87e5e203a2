"""Tensors and results in POSIX shared memory that HTTP callers registered."""
import os
import signal
import threading
import time

import numpy as np
import pytest

import oip
from conftest import suspend, wait_until
from httplib import PREFIX, Shared, close, in_region, probabilities, register, unregister
from oip import INFER, infer


@pytest.fixture(scope="module")
def server(backend):
    from conftest import SANITIZER, Server
    one = Server(backend=backend, shm_prefix=PREFIX, staging_bytes_max="256M", json_bytes_max="16M")
    yield one
    alive = one.process.poll() is None
    status = one.stop() if alive else None
    log = one.log()
    one.remove()
    assert alive and status == 0 and not SANITIZER.search(log), log


def test_regions_are_registered_listed_and_dropped(server):
    with Shared(8192) as shared:
        assert register(server, "r", shared, 4096, 1024) == (200, None)
        assert register(server, "r", shared, 4096)[0] == 409
        entry = {"name": "r", "key": shared.key, "offset": 1024, "byte_size": 4096}
        assert server.json("/v2/systemsharedmemory/status") == (200, [entry])
        assert server.json("/v2/systemsharedmemory/region/r/status") == (200, [entry])
        assert server.json("/v2/systemsharedmemory/region/x/status")[0] == 404
        assert server.metrics()["kld_http_regions"] == 1
        assert unregister(server, "unknown") == 200
        assert unregister(server, "r") == 200
        assert server.json("/v2/systemsharedmemory/status") == (200, [])
        assert register(server, "r", shared, 4096) == (200, None)
        assert unregister(server) == 200
        assert server.json("/v2/systemsharedmemory/status") == (200, [])


def test_tensors_and_results_in_a_region(server):
    q, p = probabilities((8, 16), 23), probabilities((8, 16), 24)
    with Shared(4096) as shared:
        shared.map[256:256 + q.nbytes] = q.tobytes()
        shared.map[1024:1024 + p.nbytes] = p.tobytes()
        assert register(server, "r", shared, 4096 - 256, 256)[0] == 200
        status, reply = server.json(INFER, {
            "inputs": [in_region("predictions", q.shape, 0), in_region("targets", p.shape, 768)],
            "outputs": [{"name": "loss"},
                        {k: v for k, v in in_region("grad_predictions", q.shape, 1536).items()
                         if k in ("name", "parameters")}]})
        assert status == 200, reply
        assert "data" not in reply["outputs"][1]
        assert reply["outputs"][1]["parameters"]["shared_memory_byte_size"] == q.nbytes
        gradient = np.frombuffer(shared.map[1792:1792 + q.nbytes], "<f4").reshape(q.shape)
        _, truth = infer(server, {"predictions": q, "targets": p},
                         {"loss": None, "grad_predictions": {"binary_data": True}})
        assert gradient.tobytes() == truth["grad_predictions"].tobytes()
        assert reply["outputs"][0]["data"][0] == float("%.9g" % truth["loss"][0])
        unregister(server)


def test_gradient_over_its_own_tensor_in_a_region(server):
    q, p = probabilities((4, 4), 25), probabilities((4, 4), 26)
    with Shared(4096) as shared:
        shared.map[:64], shared.map[64:128] = q.tobytes(), p.tobytes()
        register(server, "r", shared, 4096)
        request = {"inputs": [in_region("predictions", (4, 4), 0), in_region("targets", (4, 4), 64)],
                   "outputs": [{"name": "grad_predictions", "parameters":
                                in_region("x", (4, 4), 0)["parameters"]}]}
        assert server.json(INFER, request)[0] == 200
        got = np.frombuffer(shared.map[:64], "<f4").reshape(4, 4)
        close(got, oip.expected(q, p)["grad_predictions"], "FP32")
        request["outputs"][0]["parameters"]["shared_memory_offset"] = 32
        status, reply = server.json(INFER, request)
        assert status == 400 and "overlaps" in reply["error"]
        unregister(server)


@pytest.mark.parametrize("bulk", [False, True])
def test_a_worker_lost_in_between(make_server, bulk):
    """What it was asked is there still: the next worker is asked. Of what went to the lost one's pool piece by piece its
    caller may be told to ask again; the gradient that is to lie over its own tensor was not written then."""
    server = make_server(shm_prefix=PREFIX, staging_bytes_max="4M", staging_request_bytes_max="1M")
    shape = (1000, 1003) if bulk else (20, 50)
    q, p = probabilities(shape, 27), probabilities(shape, 28)
    size, replies, truth = q.nbytes, [], oip.expected(q, p)
    places = {"grad_predictions": 0, "grad_targets": 2 * size}
    outputs = [{k: v for k, v in in_region(name, shape, at).items() if k in ("name", "parameters")}
               for name, at in places.items()]
    request = {"inputs": [in_region("predictions", shape, 0), in_region("targets", shape, size)],
               "outputs": [{"name": "loss"}, *outputs]}
    with Shared(3 * size) as shared:
        assert register(server, "r", shared, 3 * size)[0] == 200
        assert server.json(INFER, request)[0] == 200
        for _ in range(4):
            tensors = shared.map[:] = q.tobytes() + p.tobytes() + bytes(size)
            worker = server.child("worker")
            suspend(worker)
            asker = threading.Thread(target=lambda: replies.append(server.json(INFER, request)))
            asker.start()
            wait_until(lambda: server.metrics()["kld_http_requests_in_flight"] == 1, what="the request")
            time.sleep(0.4)  # it is the worker's now
            os.kill(worker, signal.SIGKILL)
            asker.join()
            status, reply = replies.pop()
            if bulk and status == 503:
                assert shared.map[:] == tensors
                status, reply = wait_until(lambda: (got := server.json(INFER, request))[0] != 503 and got,
                                           what="the next worker")
            assert status == 200, reply
            assert abs(reply["outputs"][0]["data"][0] - truth["loss"][0]) < 1e-6
            for name, at in places.items():
                close(np.frombuffer(shared.map[at:at + size], "<f4").reshape(shape), truth[name], "FP32")
    assert bulk or server.metrics()["kld_requests_repeated_total"] >= 1
