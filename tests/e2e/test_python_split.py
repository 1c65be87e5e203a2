"""Several servers as one connection, from Python: every divergence, reduction, mask, weight and gradient with the
bits of one server, for numbers of rows that divide by nothing."""
import time

import numpy as np
import pytest

from pythonlib import import_kld, import_torch

kld = import_kld()
DIVERGENCES = {"forward_kl": {}, "reverse_kl": {}, "jeffreys": {}, "mixed_kl": {"weight": 0.3}, "js": {"beta": 0.4},
               "skew_kl": {"skew": 0.2}, "skew_reverse_kl": {"skew": 0.7}, "tv": {}, "cross_entropy": {}}
REDUCTIONS = ("batchmean", "sum", "mean", "rowmean", "row", "none")


@pytest.fixture(scope="module")
def connections(servers):
    """One server; all of them, in parts of a few rows; two of them, in parts as they come."""
    with kld.connect(servers[0].url_unix) as one, \
            kld.connect([servers[0].http, servers[1].url_unix, servers[2].http], part_bytes_max=9000) as many, \
            kld.connect(f"split:{servers[1].http},{servers[2].url_unix}") as two:
        yield one, many, two


def same(a, b, what):
    assert (a is None) == (b is None), what
    if a is not None:
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), what


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_bits_of_one(servers, connections, divergence, reduction):
    random = np.random.default_rng(sorted(DIVERGENCES).index(divergence) * 6 + REDUCTIONS.index(reduction))
    one, *others = connections
    for turn, (rows, classes, dtype) in enumerate([(1, 300, "float32"), (67, 33, "float32"), (131, 41, "float64"),
                                                   (23, 700, "float16"), (5, 5, "float32")]):
        q, p = random.normal(0, 2, (2, rows, classes)).astype(dtype)
        more = dict(DIVERGENCES[divergence], divergence=divergence, reduction=reduction, row_loss=turn % 2 == 0,
                    grad=("both", False, "predictions", "targets", "both")[turn])
        if turn != 1:
            more.update(predictions_form="logits", targets_form="logits", temperature=1.3)
        else:
            q, p = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (q, p))
        if turn in (0, 2, 3):
            more.update(row_weights=random.random(rows).astype("float32"), scale=0.3)
        if turn in (2, 3, 4):
            more.update(row_mask=random.random(rows) < 0.6)
        if turn in (2, 4) and reduction not in ("sum", "row", "none"):
            more.update(normalizer=7.7)
        if more["grad"]:
            shape = {"row": (rows,), "none": (rows, classes)}.get(reduction)
            wide = "float64" if dtype == "float64" else "float32"
            more.update(grad_output=-0.7 if shape is None else random.normal(size=shape).astype(wide))
        expected = one.kl_div(q, p, **more)
        for connection in others:
            got = connection.kl_div(q, p, **more)
            what = f"{divergence} {reduction} {rows}x{classes} {dtype} over {connection.url}"
            for name in ("grad_predictions", "grad_targets", "row_loss"):
                same(getattr(expected, name), getattr(got, name), f"{name} of {what}")
            if servers[0].backend == "cpu" or reduction in ("row", "none"):
                same(expected.loss, got.loss, f"loss of {what}")
            else:  # added in another order there
                assert expected.loss == pytest.approx(got.loss, rel=1e-6)


def test_masked_rows_and_weights_of_nothing(connections):
    one, *others = connections
    random = np.random.default_rng(3)
    q, p = random.dirichlet(np.ones(9), (2, 40)).astype("float32")
    weights = random.normal(size=40).astype("float32")
    weights *= -np.sign(weights.sum())  # they sum to less than 0
    for more in ({"row_mask": np.zeros(40, bool)}, {"row_weights": np.zeros(40, "float32")}, {"row_weights": weights},
                 {"row_mask": np.zeros(40, bool), "grad_output": 2.0}):
        expected = one.kl_div(q, p, reduction="rowmean", row_loss=True, grad="both", **more)
        for connection in others:
            got = connection.kl_div(q, p, reduction="rowmean", row_loss=True, grad="both", **more)
            for name in ("grad_predictions", "grad_targets", "row_loss"):
                same(getattr(expected, name), getattr(got, name), name)
            assert got.loss == pytest.approx(expected.loss, rel=1e-6)


def test_sums_of_many_groups(servers, connections):
    """In FP64 the order of 5000 rows shows: the sum is one of groups (proto/README.md)."""
    one, *others = connections
    q, p = np.random.default_rng(6).dirichlet(np.ones(70), (2, 5000))
    expected = one.kl_div(q, p, reduction="sum", grad=False, row_loss=True)
    if servers[0].backend == "cpu":
        in_order = 0.0
        for term in expected.row_loss:
            in_order += term
        assert in_order != expected.loss, "no order would be told from another"
        for connection in others:
            same(expected.loss, connection.kl_div(q, p, reduction="sum", grad=False).loss, connection.url)


def test_a_gradient_over_its_own_tensor_and_rows_with_gaps(connections):
    one, *others = connections
    random = np.random.default_rng(4)
    wide, p = random.dirichlet(np.ones(120), (2, 90)).astype("float32")
    expected = one.kl_div(wide[:, :100], p[:, :100], grad=True)
    for connection in others:
        target = wide.copy()
        got = connection.kl_div(target[:, :100], p[:, :100], out={"grad_predictions": target[:, :100]})
        same(expected.grad_predictions, np.ascontiguousarray(target[:, :100]), "gradient")
        same(target[:, 100:].copy(), wide[:, 100:].copy(), "what lies between the rows")
        assert got.attempts == 1


def test_what_it_says_of_itself(servers, connections):
    _, many, two = connections
    info = many.info()
    assert info.backend == servers[0].backend and info.device.startswith("3 servers: ")
    assert info.version == kld.__version__ and many.ping() > 0
    assert many.url.startswith("split:http://") and repr(two)
    with pytest.raises(kld.KldUnsupportedError, match="unix:"):
        many.publish("x", np.ones((2, 2), "float32"))


def test_a_server_that_is_gone_from_its_socket_gets_no_parts(servers, make_server):
    """What it said when it was there is no answer now."""
    doomed = make_server(threads=1)
    q, p = np.random.default_rng(5).dirichlet(np.ones(50), (2, 200)).astype("float32")
    with kld.connect([servers[0].http, doomed.url_unix], part_bytes_max=9000) as both:
        assert both.kl_div(q, p).attempts == 1
        doomed.process.kill()
        doomed.process.wait()
        in_vain, end = 0, time.monotonic() + 4
        while time.monotonic() < end:
            in_vain += both.kl_div(q, p).attempts - 1
        assert in_vain <= 2  # those on their way when it went


def test_what_is_wrong():
    for url, error, text in [([], kld.KldValueError, "empty"), (["a,b"], kld.KldValueError, "comma"),
                             ([1], kld.KldTypeError, "list of texts"), (3, kld.KldTypeError, "list of texts"),
                             (["ftp://a"], kld.KldValueError, "unknown kind"),
                             (["http://127.0.0.1:9"], kld.KldConnectionError, "127.0.0.1:9: no answer")]:
        with pytest.raises(error, match=text):
            kld.connect(url, connect_timeout=0.2)
    with pytest.raises(kld.KldValueError, match="part_timeout"):
        kld.connect("local:", part_timeout=0)
    with pytest.raises(kld.KldValueError, match="part_bytes_max"):
        kld.connect("local:", part_bytes_max=-1)


def test_from_pytorch(connections):
    torch = import_torch()
    from kld.functional import kl_div
    one, many, _ = connections
    x = torch.randn(57, 31, generator=torch.Generator().manual_seed(1))
    target = torch.randn(57, 31, generator=torch.Generator().manual_seed(2)).softmax(-1)
    gradients = []
    for connection in (one, many):
        student = x.clone().requires_grad_()
        kl_div(student, target, input_form="logits", reduction="batchmean", connection=connection).backward()
        gradients.append(student.grad.numpy())
    same(*gradients, "gradient")
