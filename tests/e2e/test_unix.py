"""The worker over its Unix socket, frame by frame: right answers, order, copies, regions."""
import os
import struct
import threading

import numpy as np
import pytest

import wire
from conftest import wait_until
from unixlib import (Case, case, client, no_leak, path, worker_server, forward_kl,  # noqa: F401
                     softmax64, RNG)
from wire import Client, Failed, Memory, tensor


# ---- Right answers ---------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype, tolerance", [("FP32", 1e-6), ("FP64", 1e-13)])
def test_forward_kl_of_probabilities(client, dtype, tolerance):
    case = Case(client, 33, 257, dtype)
    done = client.run(case.shape, case.tensors("predictions", "targets", "grad_predictions", "row_loss"))
    rows = forward_kl(case.q, case.p)
    assert done["scalar"] == 1
    assert done["loss"] == pytest.approx(rows.sum() / 33, rel=tolerance)
    np.testing.assert_allclose(case.rows, rows, rtol=10 * tolerance, atol=tolerance)
    expected = -case.p.astype(np.float64) / case.q.astype(np.float64) / 33
    np.testing.assert_allclose(case.gradient, expected, rtol=4 * tolerance)
    assert done["bytes"] >= 3 * case.q.nbytes and done["kernel_ns"] > 0
    case.close()


def test_logits_in_place_with_temperature(client):
    case = Case(client, 16, 1000)
    z, w = RNG.normal(size=(2, 16, 1000)).astype(np.float32) * 3
    case.q[:], case.p[:] = z, w
    own = case.tensors("predictions", "targets")
    done = client.run(case.shape, {**own, "grad_predictions": own["predictions"]}, predictions_form="logits",
                      targets_form="logits", temperature=2.0, reduction="sum", scale=4.0)
    q, p = softmax64(z / 2), softmax64(w / 2)
    assert done["loss"] == pytest.approx(4 * forward_kl(q, p).sum(), rel=1e-6)
    np.testing.assert_allclose(case.q, 4 * (q - p) / 2, rtol=1e-5, atol=1e-7)
    case.close()


def test_row_reduction_into_region_and_strides(client, case):
    """Every second row of a larger tensor; the loss itself goes to a region."""
    rows, classes = case.shape
    stride = 2 * classes * 4
    tensors = {"predictions": tensor(case.region, 0, stride=stride),
               "targets": tensor(case.region, case.offsets["targets"], stride=stride),
               "loss": tensor(case.region, case.offsets["row_loss"])}
    done = client.run((rows // 2, classes), tensors, reduction="row")
    assert done["scalar"] == 0 and done["loss"] == 0
    np.testing.assert_allclose(case.rows[:rows // 2], forward_kl(case.q[::2], case.p[::2]), rtol=1e-5)


def test_two_regions_and_the_same_bits_again(client, case):
    other = Memory(case.p.nbytes)
    other.array(0, case.shape, "<f4")[:] = case.p
    second = client.region(other)
    one = client.run(case.shape, case.tensors())["loss"]
    two = client.run(case.shape, case.tensors(targets=tensor(second)))["loss"]
    assert struct.pack("d", one) == struct.pack("d", two)
    other.close()


def test_copy_through_the_pool(client, case):
    pool = client.region_add(wire.POOL, 2 * case.q.nbytes)
    assert client.stats()["pool_bytes"] >= 2 * case.q.nbytes
    size = case.q.nbytes
    assert client.copy(pool, 0, case.region, 0, size)["bytes"] >= size
    client.copy(pool, size, case.region, size, size)
    one = client.run(case.shape, case.tensors("predictions", "targets"))["loss"]
    two = client.run(case.shape, {"predictions": tensor(pool), "targets": tensor(pool, size)})["loss"]
    assert one == two
    client.copy(case.region, 2 * size, pool, size, size)
    np.testing.assert_array_equal(case.gradient, case.p)
    client.drop(pool)
    wait_until(lambda: client.stats()["pool_bytes"] == 0, what="the pool being empty")


def test_pool_region_starts_as_zeros(client):
    memory = Memory(4096)
    memory.array(0, (4096,), "u1")[:] = 0xAA
    shared = client.region(memory)
    pool = client.region_add(wire.POOL, 4096)
    client.copy(pool, 0, shared, 0, 4096)
    client.drop(pool)
    pool = client.region_add(wire.POOL, 4096)
    client.copy(shared, 0, pool, 0, 4096)
    assert not memory.array(0, (4096,), "u1").any()
    memory.close()


def test_requests_in_flight_on_several_streams(client, case):
    numbers = [client.submit(case.shape, case.tensors("predictions", "targets"), stream=i % 3)
               for i in range(12)]
    losses = {client.result(number)["loss"] for number in reversed(numbers)}
    assert len(losses) == 1
    assert losses.pop() == pytest.approx(forward_kl(case.q, case.p).mean(), rel=1e-6)


def test_several_clients_in_parallel(path):
    problems = []

    def work(seed):
        try:
            with Client(path) as one:
                case = Case(one, 20 + seed, 50 + seed)
                expected = forward_kl(case.q, case.p).mean()
                for _ in range(20):
                    loss = one.run(case.shape, case.tensors())["loss"]
                    assert abs(loss - expected) <= 1e-6 * abs(expected)
                case.close()
        except BaseException as problem:  # a thread's failure is the test's
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


def test_welcome_and_stats(path, backend):
    with Client(path, name="tester") as one:
        welcome = one.welcome
        assert welcome["backend"] == backend and welcome["epoch"] != 0 and welcome["version"] == 1
        assert (welcome["regions_max"], welcome["requests_max"], welcome["streams_max"]) == (32, 12, 3)
        assert welcome["region_bytes_max"] == 1 << 30 and welcome["pool_bytes_max"] == 64 << 20
        assert welcome["devices"] == 1 and welcome["device"] == 0 and welcome["name"]
        case = Case(one)
        before = one.stats()
        one.run(case.shape, case.tensors())
        after = one.stats()
        assert after["epoch"] == welcome["epoch"] and after["clients"] == 1
        assert after["requests_total"] == before["requests_total"] + 1
        assert after["bytes_total"] > before["bytes_total"] and after["uptime_ns"] > before["uptime_ns"]
        # Those of clients before are counted until a thread that has unmapped them has said so.
        wait_until(lambda: [one.stats()[what] for what in ("regions", "region_bytes")] == [1, case.memory.size],
                   what="its one region")
        case.close()


# ---- Regions ---------------------------------------------------------------------------------------

def test_drop_while_in_use(client):
    case = Case(client, 512, 4096)
    numbers = [client.submit(case.shape, case.tensors()) for _ in range(4)]
    client.drop(case.region)
    with pytest.raises(Failed, match="not_found"):
        client.run(case.shape, case.tensors())
    expected = forward_kl(case.q, case.p).mean()
    for number in numbers:
        assert client.result(number)["loss"] == pytest.approx(expected, rel=1e-6)
    again = client.region(case.memory)
    assert again != case.region
    client.drop(again)
    case.close()


def test_region_ids_are_never_given_twice(client):
    memory = Memory(4096)
    seen = set()
    for _ in range(100):
        region = client.region(memory)
        assert region not in seen
        seen.add(region)
        client.drop(region)
    memory.close()


def test_regions_belong_to_their_connection(path, client, case):
    with Client(path) as other:
        with pytest.raises(Failed, match=f"not_found.*no region {case.region}"):
            other.run(case.shape, case.tensors())
        with pytest.raises(Failed, match="not_found"):
            other.drop(case.region)
        other.ping()
    client.run(case.shape, case.tensors())


def test_one_memfd_twice_is_one_memory(client, case):
    """Two ids for the same bytes: overlap of outputs is seen all the same, in place is allowed."""
    twin = client.region(case.memory)
    assert twin != case.region
    tensors = case.tensors("predictions", "targets")
    with pytest.raises(Failed, match="invalid.*grad_predictions overlaps targets"):
        client.run(case.shape, {**tensors, "grad_predictions": tensor(twin, case.offsets["targets"])})
    with pytest.raises(Failed, match="invalid.*grad_predictions overlaps predictions"):
        client.run(case.shape, {**tensors, "grad_predictions": tensor(twin, 4)})
    with pytest.raises(Failed, match="invalid.*overlap"):
        client.copy(twin, 0, case.region, 100, 200)
    q, p = case.q.astype(np.float64), case.p.astype(np.float64)
    client.run(case.shape, {**tensors, "grad_predictions": tensor(twin, 0)}, reduction="sum")
    np.testing.assert_allclose(case.q, -p / q, rtol=1e-6)


def test_memfd_that_cannot_be_cut(client, case):
    with pytest.raises(OSError):
        os.ftruncate(case.memory.fd, 100)
    client.run(case.shape, case.tensors())
