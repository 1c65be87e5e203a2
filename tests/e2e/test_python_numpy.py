"""kld from NumPy: values and gradients against FP64, the same bits over every kind of connection, and how
often a byte is copied."""
import contextlib
import ctypes
import gc
import importlib
import math
import os
import threading

import numpy as np
import pytest

from conftest import needs, settled, wait_until
from pythonlib import import_kld, probabilities

kld = import_kld()
SHAPE = (96, 500)


@pytest.fixture(params=["unix", "http", "local"])
def connection(request, server):
    url = {"unix": server.url_unix, "http": server.http, "local": f"local:{server.backend}"}[request.param]
    with kld.connect(url) as made:
        yield made


@pytest.fixture
def shared(server):
    """Over the Unix socket, with no room to copy more than a page."""
    with kld.connect(server.url_unix, staging_bytes_max=4096) as made:
        yield made


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def fill(connection, values):
    array = connection.empty(values.shape, values.dtype)
    array[...] = values
    return array


Q, P = probabilities(1, SHAPE), probabilities(2, SHAPE)
Q64, P64 = Q.astype(float), P.astype(float)
TERMS = P64 * np.log(P64 / Q64)


@pytest.mark.parametrize("reduction, value, over", [
    ("batchmean", TERMS.sum() / 96, 96), ("sum", TERMS.sum(), 1), ("mean", TERMS.mean(), TERMS.size),
    ("rowmean", TERMS.sum(axis=1).mean(), 96), ("row", TERMS.sum(axis=1), 1), ("none", TERMS, 1)])
def test_reductions(connection, reduction, value, over):
    result = connection.kl_div(Q, P, reduction=reduction, grad="both", row_loss=True)
    np.testing.assert_allclose(result.loss, value, rtol=2e-6, atol=1e-7)
    assert isinstance(result.loss, float) == (reduction not in ("row", "none"))
    np.testing.assert_allclose(result.row_loss, TERMS.sum(axis=1), rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(result.grad_predictions, -P64 / Q64 / over, rtol=1e-6)
    np.testing.assert_allclose(result.grad_targets, (np.log(P64 / Q64) + 1) / over, rtol=1e-5, atol=1e-7)
    assert result.grad_predictions.dtype == np.float32 and result.grad_predictions.flags.writeable
    assert result.attempts == 1 and result.total_s > 0


def test_every_parameter(connection):
    z = np.random.default_rng(5).normal(size=(4, 6, 50))
    t = np.random.default_rng(6).normal(size=(4, 6, 50))
    mask = np.random.default_rng(7).random((4, 6)) < 0.7
    weights = np.random.default_rng(8).random((4, 6))
    p, q = softmax(t / 2), softmax(z / 2)
    m = 0.3 * p + 0.7 * q
    rows = 0.3 * (p * np.log(p / m)).sum(-1) + 0.7 * (q * np.log(q / m)).sum(-1)
    result = connection.kl_div(z, t, predictions_form="logits", targets_form="logits", temperature=2,
                               divergence="js", beta=0.3, row_mask=mask, row_weights=weights,
                               reduction="rowmean", normalizer=11, scale=4, grad_output=0.5)
    weights = weights.astype(np.float32).astype(float)
    assert result.loss == pytest.approx(4 * (rows * weights * mask).sum() / 11, rel=1e-12)
    row = 0.7 * q * (np.log(q / m) - (q * np.log(q / m)).sum(-1, keepdims=True)) / 2
    expected = 4 / 11 * 0.5 * row * (weights * mask)[..., None]
    np.testing.assert_allclose(result.grad_predictions, expected, rtol=1e-9, atol=1e-15)
    flat = connection.kl_div(z, t, predictions_form="logits", targets_form="logits", temperature=2,
                             divergence="js", beta=0.3, row_mask=mask.reshape(-1).astype(np.uint8),
                             row_weights=weights.reshape(-1), reduction="rowmean", normalizer=11, scale=4)
    assert flat.loss == result.loss
    for divergence, more in (("mixed_kl", {"weight": 0.25}), ("skew_kl", {"skew": 0.1}),
                             ("skew_reverse_kl", {"skew": 0.1}), ("tv", {}), ("cross_entropy", {})):
        assert connection.kl_div(Q, P, divergence=divergence, grad=False, **more).loss > 0


def test_gradients_that_are_asked_for(connection):
    def which(**more):
        result = connection.kl_div(Q, P, **more)
        return result.grad_predictions is not None, result.grad_targets is not None

    assert which() == (True, False) and which(grad=False) == (False, False)
    assert which(grad="targets") == (False, True) and which(grad=["targets", "predictions"]) == (True, True)
    assert which(grad=np.bool_(True)) == (True, False) and which(grad=np.bool_(False)) == (False, False)
    g = np.random.default_rng(3).random(SHAPE)
    by_element = connection.kl_div(Q, P, reduction="none", grad_output=g)
    np.testing.assert_allclose(by_element.grad_predictions, -P64 / Q64 * g, rtol=1e-6)
    by_row = connection.kl_div(Q, P, reduction="row", grad_output=g[:, 0])
    np.testing.assert_allclose(by_row.grad_predictions, -P64 / Q64 * g[:, :1], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_dtypes(connection, dtype):
    if dtype == "bfloat16":
        needs("ml_dtypes")
    q, p = fill(connection, Q), P
    q = connection.empty(SHAPE, dtype)
    q[...] = Q.astype(q.dtype)
    q64 = q.astype(float)
    result = connection.kl_div(q, p, grad="both")
    assert result.loss == pytest.approx((P64 * np.log(P64 / q64)).sum() / 96, rel=1e-6)
    assert result.grad_predictions.dtype == q.dtype and result.grad_targets.dtype == np.float32
    np.testing.assert_allclose(result.grad_predictions.astype(float), -P64 / q64 / 96,
                               rtol={"float64": 1e-6, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype])
    rows = connection.kl_div(q, p, reduction="row", grad=False).loss
    assert rows.dtype == (np.float64 if dtype == "float64" else np.float32)


def test_every_connection_gives_the_same_bits(server):
    results = []
    for url in (server.url_unix, server.http, f"local:{server.backend}"):
        with kld.connect(url) as connection:
            for make in (lambda x: x, lambda x: fill(connection, x), np.asfortranarray):
                results.append(connection.kl_div(make(Q), make(P), grad="both"))
    for result in results[1:]:
        assert result.loss == results[0].loss
        assert result.grad_predictions.tobytes() == results[0].grad_predictions.tobytes()
        assert result.grad_targets.tobytes() == results[0].grad_targets.tobytes()


LAYOUTS = {
    "rows of a wider array": lambda x: np.pad(x, ((0, 0), (3, 5)))[:, 3:-5],
    "every second row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "fortran": np.asfortranarray,
    "backwards": lambda x: x[::-1].copy()[::-1],
    "every second class": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "unaligned": lambda x: np.frombuffer(b"." + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape),
    "read-only": lambda x: np.frombuffer(x.tobytes(), np.float32).reshape(x.shape),
    "a list": lambda x: x.astype(np.float64).tolist()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(connection, layout):
    plain = connection.kl_div(Q, P)
    made = connection.kl_div(LAYOUTS[layout](Q), LAYOUTS[layout](P))
    if layout == "a list":
        assert made.loss == pytest.approx(plain.loss, rel=1e-6)
    else:
        assert made.loss == plain.loss
        assert made.grad_predictions.tobytes() == plain.grad_predictions.tobytes()


def test_one_row_for_all_and_leading_dimensions(connection):
    everywhere = np.broadcast_to(P[0], SHAPE)
    assert connection.kl_div(Q, everywhere).loss == connection.kl_div(Q, everywhere.copy()).loss
    q, p = Q.reshape(4, 24, 500)[:, ::2], P.reshape(4, 24, 500)[:, ::2]
    assert connection.kl_div(q, p).loss == connection.kl_div(q.copy(), p.copy()).loss
    assert connection.kl_div(Q[0], P[0], reduction="row").loss.shape == ()


@pytest.mark.parametrize("leading", [(4, 1), (1, 24), (1, 1)], ids=str)
def test_rows_that_are_broadcast(connection, leading):
    """Also in the middle, where the rows that are there follow each other."""
    p = np.broadcast_to(probabilities(5, (*leading, 500)), (4, 24, 500))
    q = Q.reshape(4, 24, 500)
    assert connection.kl_div(q, p).loss == connection.kl_div(q, p.copy()).loss
    out = np.broadcast_to(np.zeros((*leading, 500), np.float32), (4, 24, 500))
    out.flags.writeable = True
    with pytest.raises(ValueError, match="rows at one distance"):
        connection.kl_div(q, p, out={"grad_predictions": out})


def test_arrays_of_local_are_not_shared_with_a_child():
    with kld.connect("local:cpu") as here:
        array = here.empty(SHAPE)
        array[:] = 1
        child = os.fork()
        if child == 0:
            array[:] = 2
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (array == 1).all()


def test_shared_arrays_are_not_copied(shared):
    """There is no room to copy them, and no byte is counted as copied."""
    with pytest.raises(kld.KldError, match="staging_bytes_max"):
        shared.kl_div(Q, P)
    counted = shared.copied_bytes
    q, p = fill(shared, Q), fill(shared, P)
    first = shared.kl_div(q, p, grad="both", reduction="none")
    assert first.grad_predictions.nbytes > 64 << 10
    np.testing.assert_allclose(first.loss, TERMS, rtol=1e-5, atol=1e-7)
    views = shared.kl_div(q[10:90].reshape(80, 500), p[10:90], grad=False)
    assert views.loss == pytest.approx(TERMS[10:90].sum() / 80, rel=1e-6)
    # Results are in shared memory too: they can be the next request's inputs.
    again = shared.kl_div(np.negative(first.grad_predictions, out=first.grad_predictions), p, grad=False)
    assert np.isfinite(again.loss)
    assert shared.copied_bytes == counted


def test_other_arrays_are_copied_once(server, shared):
    with kld.connect(server.url_unix) as connection:
        connection.kl_div(Q, P)
        assert connection.copied_bytes == Q.nbytes + P.nbytes
        q, p = fill(connection, Q), fill(connection, P)
        connection.kl_div(q, p)
        assert connection.copied_bytes == Q.nbytes + P.nbytes
        connection.kl_div(q, P)
        assert connection.copied_bytes == Q.nbytes + 2 * P.nbytes
        assert all(connection._memory.find(one.ctypes.data, one.nbytes).region for one in (q, p))
    # What is gathered goes straight to shared memory: there is no room for another copy.
    before = shared.copied_bytes
    assert shared.kl_div(np.asfortranarray(Q), np.asfortranarray(P)).loss == pytest.approx(
        TERMS.sum() / 96, rel=1e-6)
    assert shared.copied_bytes - before == Q.nbytes + P.nbytes


def test_memory_is_used_again(server):
    with kld.connect(server.url_unix, cache_bytes_max=8 << 20) as connection:
        def regions():
            return connection.stats()["regions"]

        connection.kl_div(Q, P, grad="both")
        at_rest = settled(regions)  # clients before may just be losing theirs
        others = at_rest - connection._memory.counts()[0]  # what Q and P are copied through, the gateway's
        for _ in range(50):
            connection.kl_div(Q, P, grad="both")
        assert regions() == at_rest
        held = [connection.kl_div(Q, P).grad_predictions for _ in range(40)]
        assert regions() >= at_rest + 38 and len({one.ctypes.data for one in held}) == 40
        del held
        gc.collect()
        connection.kl_div(Q, P)
        assert connection._memory.cached_bytes <= 8 << 20
        big = connection.empty((4 << 20,))  # above the limit: not kept
        spans = connection._memory.counts()[0]
        del big
        assert connection._memory.counts()[0] == spans - 1
        # The worker registers and lets go a moment later.
        wait_until(lambda: regions() == spans - 1 + others, what="the regions that are left")


def test_what_is_kept_makes_room(make_server):
    """A connection may share 6 MiB: what is kept of requests of other sizes goes before one is refused."""
    server = make_server(http="", client_shared_bytes_max="6M")
    with kld.connect(f"unix:{server.unix}") as connection:
        for rows in (64, 128, 256, 400, 500, 300, 64, 512):
            a = np.full((rows, 1024), 1 / 1024, np.float32)
            assert connection.kl_div(a, a).loss == 0
        for _ in range(2):
            with pytest.raises(kld.KldError, match="share over 6291456 bytes"):
                connection.kl_div(*[np.full((700, 1024), 1 / 1024, np.float32)] * 2)
        assert connection.kl_div(a, a).loss == 0


def test_many_arrays_are_held(server):
    """As many as share memory; the results after that are ordinary memory, and right."""
    with kld.connect(server.url_unix) as connection:
        held = [connection.kl_div(Q, P).grad_predictions for _ in range(300)]
        assert all(np.array_equal(one, held[0]) for one in held)
        with pytest.raises(MemoryError, match="256 arrays"):
            connection.empty(10)
        del held
        assert connection.empty(10).shape == (10,)


def test_beyond_the_limit_of_shared_arrays(server):
    """What is laid out anew goes through plain memory then; over local: that is as good as any."""
    turned = np.asfortranarray(Q)
    for url in (server.url_unix, "local:cpu"):
        with kld.connect(url) as connection:
            right = connection.kl_div(turned, P, grad=False).loss
            held = [connection.empty(8) for _ in range(255)]
            held.append(connection.kl_div(Q, P).grad_predictions)
            held.append(connection.kl_div(Q, P).grad_predictions)
            assert connection.kl_div(turned, P, grad=False).loss == right
            if url == "local:cpu":
                assert connection.empty((3, 5)).shape == (3, 5)


def test_arrays_outlive_their_connection(connection):
    gradient = connection.kl_div(Q, P).grad_predictions
    mine = fill(connection, Q)
    kept = gradient.copy()
    connection.close()
    gc.collect()
    assert np.array_equal(gradient, kept) and np.array_equal(mine, Q)
    mine[:] = 0


def mapped(address):
    """Is there memory at this address?"""
    with open("/proc/self/maps") as maps:
        return any(int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16) for line in maps)


@pytest.mark.parametrize("kind", ["unix", "local"])
def test_arrays_that_outlive_their_connection_are_given_back(server, kind):
    """Also while the closed connection is there yet."""
    connection = kld.connect(server.url_unix if kind == "unix" else "local:cpu")
    first, second = (connection.empty((1000, 1000)) for _ in range(2))
    addresses = first.ctypes.data, second.ctypes.data
    del first
    if not (child := os.fork()):
        try:
            del second
            os._exit(10 + mapped(addresses[1]))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    connection.close()
    assert mapped(addresses[1]) and not second.flags.owndata
    second[:] = 1
    del second
    assert not mapped(addresses[1]) and not connection._memory._returned


def test_results_into_the_callers_arrays(connection):
    wide = np.zeros((96, 600), np.float32)
    out = {"grad_predictions": wide[:, :500], "row_loss": np.zeros(96, np.float32)}
    result = connection.kl_div(Q, P, grad=False, out=out)
    assert result.grad_predictions.base is wide and result.row_loss is out["row_loss"]
    np.testing.assert_allclose(wide[:, :500], -P64 / Q64 / 96, rtol=1e-6)
    assert not wide[:, 500:].any()
    mine = fill(connection, Q)  # over its own tensor
    connection.kl_div(mine, P, out={"grad_predictions": mine})
    assert np.array_equal(mine, result.grad_predictions)
    loss = np.zeros(SHAPE, np.float32)
    assert connection.kl_div(Q, P, reduction="none", out={"loss": loss}).loss is loss and loss.any()


@pytest.mark.parametrize("shape", [(5,), (96, 5), (2, 4, 5), (2, 3, 4, 5)])
def test_rows_into_the_callers_arrays(connection, shape):
    """One number a row, whatever the rank: nothing is written beside them."""
    q = probabilities(3, (math.prod(shape[:-1]), 5)).reshape(shape)
    p = np.broadcast_to(probabilities(4, (1, 5))[0], shape).copy()
    wanted = (p * np.log(p / q)).sum(axis=-1)
    size = wanted.size

    def into(take, name, **more):
        guarded = np.full(4 * size + 8, -1, np.float32)
        out = take(guarded)
        result = connection.kl_div(q, p, out={name: out}, grad=False, **more)
        assert (result.loss if name == "loss" else result.row_loss) is out
        np.testing.assert_allclose(out, wanted, rtol=1e-5)
        out[...] = -1
        assert (guarded == -1).all()

    for name, more in (("loss", {"reduction": "row"}), ("row_loss", {}), ("row_loss", {"reduction": "row"})):
        into(lambda all_of: all_of[4:4 + size].reshape(shape[:-1]), name, **more)
        into(lambda all_of: all_of[4:4 + 2 * size:2].reshape(shape[:-1]), name, **more)
    if len(shape) > 2:
        with pytest.raises(ValueError, match="rows at one distance"):
            into(lambda all_of: all_of[:2 * size].reshape(*shape[:-2], -1)[..., :shape[-2]], "row_loss")


def test_an_output_on_a_gpu_is_for_one_that_has_it(monkeypatch):
    """Also where no input is there: a CPU would write to an address that it has not."""
    values = np.zeros(SHAPE, np.float32)

    class OnGpu:
        read_only = False

        @property
        def __cuda_array_interface__(self):
            return {"typestr": "<f4", "shape": SHAPE, "strides": None, "data": (values.ctypes.data, self.read_only)}

    class Gpu:
        ordinal, uuid = 0, bytes(16)

        def look_up(self, address):
            return self

        def current(self):
            return contextlib.nullcontext()

    cuda = importlib.import_module("kld._cuda")
    monkeypatch.setattr(cuda, "driver", Gpu)
    monkeypatch.setattr(cuda, "gpu", lambda ordinal: Gpu())
    out = OnGpu()
    with kld.connect("local:cpu") as connection:
        with pytest.raises(kld.KldUnsupportedError, match="computes on a CPU"):
            connection.kl_div(Q, P, out={"grad_predictions": out})
        out.read_only = True
        with pytest.raises(ValueError, match=r"is a read-only float32\[96, 500\]; expected a writeable array"):
            connection.kl_div(Q, P, out={"grad_predictions": out})
    assert not values.any()


def test_a_server_that_lets_little_be_shared(make_server):
    """What is kept for later gives way."""
    server = make_server(client_regions_max=8)
    with kld.connect(server.url_unix) as connection:
        for number in range(1, 21):  # no two of one size
            connection.empty((33 * number, 8000))
        with pytest.raises(kld.KldMemoryError, match="the server allows 8 regions"):
            mine = [connection.empty((rows, 8000)) for rows in range(20, 40)]
            del mine


def test_results_where_no_more_can_be_shared(connection, monkeypatch):
    def take(*_):
        raise kld.KldMemoryError(kld.Status.NO_MEMORY, "none")

    wanted = connection.kl_div(Q, P[::-1])
    monkeypatch.setattr(connection._memory, "take", take)
    result = connection.kl_div(Q, P[::-1])
    assert result.loss == wanted.loss and np.array_equal(result.grad_predictions, wanted.grad_predictions)


@pytest.mark.parametrize("arguments, error, text", [
    ({"targets": P[:4]}, ValueError, "must be the same, nothing is broadcast"),
    ({"predictions": P.astype(int)}, TypeError, "predictions has dtype int64"),
    ({"predictions": P.astype(">f4")}, TypeError, "other byte order"),
    ({"predictions": np.ma.masked_array(P, P > 1)}, ValueError, "predictions is a masked array; give the mask of rows"),
    ({"row_weights": np.ma.masked_array(np.ones(96), np.ones(96) > 1)}, ValueError, "row_weights is a masked array"),
    ({"grad": 3}, ValueError, 'grad is True, False, "predictions", "targets" or "both", not 3'),
    ({"predictions": 1.0, "targets": 1.0}, ValueError, "0 dimensions"),
    ({"predictions": np.zeros((2, 0)), "targets": np.zeros((2, 0))}, ValueError, "dimension 1 of the shape is 0"),
    ({"predictions": np.ones((1,) * 9), "targets": np.ones((1,) * 9)}, ValueError, "9 dimensions"),
    ({"divergence": "kl"}, ValueError, "known: forward_kl, reverse_kl"),
    ({"divergence": 3}, TypeError, "divergence is a text"),
    ({"reduction": "avg"}, ValueError, "known: batchmean"),
    ({"temperature": 2}, ValueError, "temperature"),
    ({"temperature": "warm"}, TypeError, "temperature is a number, not str"),
    ({"beta": 0.5}, ValueError, "beta"),
    ({"normalizer": -1}, ValueError, "normalizer"),
    ({"grad": "both sides"}, ValueError, "grad is True, False"),
    ({"row_mask": np.ones(96)}, TypeError, "row_mask has dtype float64; it is bool or uint8"),
    ({"row_mask": np.ones(5, bool)}, ValueError, r"row_mask has shape \(5,\); expected \(96,\)"),
    ({"row_weights": np.ones(5)}, ValueError, r"row_weights has shape \(5,\)"),
    ({"row_weights": ["a"] * 96}, TypeError, "it holds numbers"),
    ({"grad_output": np.ones(96)}, ValueError, "grad_output has shape"),
    ({"out": {"gradient": P}}, ValueError, "out is a dict with keys of loss"),
    ({"out": {"grad_predictions": np.zeros(SHAPE)}}, ValueError, "writeable array float32"),
    ({"out": {"grad_predictions": Q.astype(">f4")}}, ValueError,
     r"is float32\[96, 500\] of the other byte order; expected a writeable array float32\[96, 500\]$"),
    ({"out": {"grad_predictions": np.broadcast_to(np.float32(1), SHAPE)}}, ValueError,
     r"is a read-only float32\[96, 500\]; expected a writeable array float32\[96, 500\]$"),
    ({"out": {"grad_predictions": [1]}}, TypeError, "a NumPy array, not list"),
    ({"out": {"grad_predictions": np.zeros(SHAPE, np.float32, order="F")}}, ValueError, "contiguous"),
    ({"out": {"loss": np.zeros(1, np.float32)}}, ValueError, "another loss is a number"),
    ({"predictions": [[1.0], [1.0, 2.0]]}, (TypeError, ValueError), "predictions"),
    ({"row_mask": "abc"}, TypeError, "row_mask has dtype"),
    ({"row_weights": [[1.0], [1.0, 2.0]]}, (TypeError, ValueError), "row_weights"),
    ({"out": {"grad_predictions": np.ma.masked_array(np.zeros(SHAPE, np.float32))}}, ValueError,
     r"out\['grad_predictions'\] is a masked array"),
    ({"predictions": np.broadcast_to(np.float32(1), (1 << 40, 5)), "targets": np.broadcast_to(np.float32(1), (1 << 40, 5))},
     MemoryError, "no 21990232555520 bytes of memory for predictions"),
    ({"row_weights": np.broadcast_to(np.float64(1), 1 << 45)}, ValueError, "row_weights has shape"),
    ({"timeout": 0}, ValueError, "timeout is a number of seconds above 0, below 1e9, or inf, not 0"),
    ({"timeout": 1e9}, ValueError, "below 1e9"), ({"timeout": float("nan")}, ValueError, "timeout")])
def test_what_is_wrong_is_said(server, arguments, error, text):
    with kld.connect(server.url_unix) as connection:
        with pytest.raises(error, match=text) as raised:
            connection.kl_div(**{"predictions": Q, "targets": P, **arguments})
        assert isinstance(raised.value, kld.KldError)
        assert connection.kl_div(Q, P).loss == pytest.approx(TERMS.sum() / 96, rel=1e-6)


def test_empty_says_what_is_wrong(connection):
    with pytest.raises(ValueError, match="at least 1"):
        connection.empty((3, 0))
    with pytest.raises(TypeError, match="dtype int64"):
        connection.empty(3, int)
    with pytest.raises(TypeError, match="is not a dtype"):
        connection.empty(3, "float33")
    assert connection.empty(np.int64(3)).shape == connection.empty((np.int64(3),)).shape == (3,)
    for shape in (3.5, "3", None, [1.5]):
        with pytest.raises(TypeError, match="a shape is a whole number or several"):
            connection.empty(shape)


def test_zeros_follow_the_limit(connection):
    nan = float("nan")
    q = np.float32([[0, 1, 0], [0, 0.5, 0.5], [nan, 0.5, 0.5]])
    p = np.float32([[0, 1, 0], [0.5, 0.5, 0], [0.5, 0.5, 0]])
    np.testing.assert_array_equal(connection.kl_div(q, p, reduction="row").loss, [0, np.inf, nan])


def test_a_late_answer(server):
    q = probabilities(1, (2000, 5000))
    with kld.connect(server.url_unix) as connection:
        mine = fill(connection, q)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                connection.kl_div(mine, mine, timeout=1e-4)
        # What may still be written to is not handed out again, nor kept.
        gc.collect()
        connection.ping()
        assert connection._memory.cached_bytes == 0 and list(connection._memory._live) == [mine.ctypes.data]
        assert connection.kl_div(mine, mine, timeout=60).loss == 0


@pytest.mark.parametrize("form", ["logits", "probs"])
def test_a_mask_that_changes_while_it_is_read(make_server, backend, form):
    """Spoils what its owner gets, and nothing else: threads and blocks of a card that share a row, and read its mask
    themselves, would wait for each other for ever."""
    server = make_server()
    with kld.connect(server.url_unix) as connection, kld.connect(server.url_unix) as other:
        q, p = (connection.empty((1, 16384)) for _ in range(2))
        q[:], p[:] = probabilities(1, 16384), probabilities(1, 16384)
        mask, ended = connection.empty((1,)).view(np.uint8)[:1], threading.Event()
        mask[:] = 1
        more = {"predictions_form": form, "targets_form": form, "divergence": "jeffreys", "grad": "predictions", "timeout": 20}

        def change():
            at = ctypes.c_uint8.from_address(mask.ctypes.data)
            while not ended.is_set():
                for _ in range(1000):
                    at.value = 0
                    at.value = 1

        right = connection.kl_div(q, p, **more).loss
        changing = threading.Thread(target=change)
        changing.start()
        try:
            for _ in range(5000 if backend == "cuda" else 100):
                connection.kl_div(q, p, row_mask=mask, **more)
        finally:
            ended.set()
            changing.join()
        assert connection.kl_div(q, p, row_mask=mask, **more).loss == right
        assert other.kl_div(q.copy(), p.copy(), **more).loss == right
        assert server.metrics()['kld_worker_restarts_total{worker="0"}'] == 0


def test_a_lost_worker(make_server):
    server = make_server()
    with kld.connect(server.url_unix) as connection:
        q, p = fill(connection, Q), fill(connection, P)
        before = connection.kl_div(q, p)
        server.kill_child("worker")
        after = connection.kl_div(q, p)
        assert after.loss == before.loss and np.array_equal(after.grad_predictions, before.grad_predictions)


class Dlpack:
    """An array on the CPU of a library that speaks DLPack only."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **more):
        return self.array.__dlpack__(**more)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.skipif(not hasattr(np, "from_dlpack"), reason="NumPy 1.23 or newer")
def test_arrays_by_dlpack(connection):
    weights = np.linspace(0.5, 2, 96, dtype=np.float32)
    right = connection.kl_div(Q, P, row_weights=weights)
    mine = connection.kl_div(Dlpack(Q.copy()), Dlpack(P.copy()), row_weights=Dlpack(weights.copy()))
    assert mine.loss == right.loss
    np.testing.assert_array_equal(mine.grad_predictions, right.grad_predictions)
    with pytest.raises(kld.KldTypeError, match="predictions has dtype int64"):
        connection.kl_div(Dlpack(np.ones((2, 3), dtype=np.int64)), P)


@pytest.mark.parametrize("weight", [2.0, np.float32(2), np.array(2.0), np.array(2, np.float32)])
def test_one_row_and_what_its_loss_is_weighed_with(connection, weight):
    one = connection.kl_div(Q[0], P[0], reduction="row").grad_predictions
    np.testing.assert_array_equal(connection.kl_div(Q[0], P[0], reduction="row", grad_output=weight).grad_predictions,
                                  2 * one)


def test_no_limit(connection):
    assert connection.kl_div(Q, P, timeout=float("inf")).loss == connection.kl_div(Q, P, timeout=None).loss


def test_results_are_compared_by_identity(connection):
    one, other = (connection.kl_div(Q, P) for _ in range(2))
    assert one == one and one != other and len({one, other}) == 2


def test_memory_of_a_refused_request_is_used_again(server):
    """No device saw it. As many as a loop that asks wrongly makes are no new memory each time."""
    shape = (100, 1000)
    with kld.connect(server.url_unix) as connection:
        mine = fill(connection, probabilities(1, shape))
        made = connection._memory._map
        spans = []
        connection._memory._map = lambda size: spans.append(size) or made(size)
        for _ in range(5):
            with pytest.raises(kld.KldValueError, match="temperature"):
                connection.kl_div(mine, mine, temperature=2.0)
            with pytest.raises(kld.KldValueError, match="lie over each other|overlap"):
                connection.kl_div(mine, mine, row_loss=True, grad="both", out={"grad_predictions": mine[::-1][::-1],
                                                                               "grad_targets": mine})
        assert connection.kl_div(mine, mine).loss == 0
        assert len(spans) < 4
