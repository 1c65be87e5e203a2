"""kld from PyTorch, held against torch.nn.functional.kl_div of the torch at hand, on the CPU: every reduction
x log_target x dtype x shape, values and gradients, errors; autograd; where kld differs by choice."""
import inspect
import pickle
import re
import threading
import warnings

import numpy as np
import pytest

from conftest import needs
from pythonlib import import_kld, import_torch

kld = import_kld()
torch = import_torch()
from kld import functional, nn  # noqa: E402

F = torch.nn.functional
REDUCTIONS = ("none", "mean", "batchmean", "sum")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16,
          "float16": torch.float16}
SHAPES = [(1,), (7,), (5, 9), (3, 4, 17), (2, 3, 2, 33), (64, 300)]
torch.set_num_threads(2)


@pytest.fixture(scope="module")
def connection(server):
    with kld.connect(server.url_unix) as made:
        yield made


def data(shape, dtype=torch.float32, log_target=False, seed=1):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(-1).to(dtype)
    p = torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(-1)
    p = (p if log_target else p.exp()).to(dtype)
    return q.requires_grad_(), p.requires_grad_()


def reference(q, p, weigh=None, **arguments):
    """PyTorch in float64 on the same numbers -> loss, gradients."""
    q, p = (x.detach().double().requires_grad_() for x in (q, p))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that "mean" divides by more than the batch
        loss = F.kl_div(q, p, **arguments)
    loss.backward(weigh if weigh is None else weigh.double())
    return loss.detach(), q.grad, p.grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("log_target", [False, True], ids=["probs", "logprobs"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_parity(connection, reduction, log_target, dtype, shape):
    q, p = data(shape, DTYPES[dtype], log_target)
    weigh = None
    if reduction == "none":
        weigh = torch.rand(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = reference(q, p, weigh, reduction=reduction, log_target=log_target)
    loss = functional.kl_div(q, p, reduction=reduction, log_target=log_target, connection=connection)
    assert loss.shape == expected[0].shape
    assert loss.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    loss.backward(None if weigh is None else weigh.to(loss.dtype))
    tolerance = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1.6e-2, "float16": 2e-3}
    exact = tolerance["float64" if dtype == "float64" else "float32"]
    terms = (p.detach().double().exp() if log_target else p.detach().double()).max()
    torch.testing.assert_close(loss.detach().double(), expected[0], rtol=exact, atol=float(exact * terms * 10))
    for mine, theirs, tensor in ((q.grad, expected[1], q), (p.grad, expected[2], p)):
        assert mine.dtype == tensor.dtype and mine.shape == tensor.shape
        floor = float(theirs.abs().max()) * (1e-14 if dtype == "float64" else 3e-7)
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance[dtype], atol=max(floor, 6e-8 if dtype ==
                                   "float16" else 0))


MANY = (2, 1, 3, 1, 2, 1, 2, 1, 3, 5)


@pytest.mark.parametrize("layout", ["dense", "turned"])
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "row", "rowmean"])
def test_more_dimensions_than_libkld_takes(connection, reduction, layout):
    q, p = (one.detach() for one in data(MANY))
    if layout == "turned":
        q = q.transpose(0, -2).contiguous().transpose(0, -2)
    q, p = q.requires_grad_(), p.requires_grad_()
    like = {"row": "none", "rowmean": "none"}.get(reduction, reduction)
    a, b = (one.detach().double().requires_grad_() for one in (q, p))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right = F.kl_div(a, b, reduction=like)
    right = {"row": right.sum(-1), "rowmean": right.sum(-1).mean()}.get(reduction, right)
    loss = functional.kl_div(q, p, reduction=reduction, connection=connection)
    assert loss.shape == right.shape
    torch.testing.assert_close(loss.double(), right, rtol=2e-6, atol=1e-7)
    weigh = torch.rand(loss.shape)
    loss.backward(weigh)
    right.backward(weigh.double())
    for mine, theirs in ((q, a), (p, b)):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=2e-6, atol=1e-7)


def test_rows_of_many_dimensions(connection):
    """Masks and weights by the leading dimensions, or by row; what is wrong is said as ever."""
    q, p = (one.detach() for one in data(MANY))
    mask, flat = torch.rand(MANY[:-1]) < 0.5, (q.reshape(-1, 5), p.reshape(-1, 5))
    weights = torch.rand(MANY[:-1])
    right = functional.kl_div(*flat, reduction="row", row_mask=mask.flatten(), row_weights=weights.flatten(),
                              connection=connection)
    for one, other in ((mask, weights), (mask.flatten(), weights.numpy()), (mask.numpy(), weights.flatten()),
                       (mask.tolist(), weights.tolist())):
        loss = functional.kl_div(q, p, reduction="row", row_mask=one, row_weights=other, connection=connection)
        assert loss.shape == MANY[:-1] and torch.equal(loss.flatten(), right)
    for more, text in (({"target": p[..., :1]}, "nothing is broadcast"), ({"row_mask": mask[..., :1]}, re.escape(
            f"row_mask has shape {tuple(mask[..., :1].shape)}; expected {(mask.numel(),)} or {MANY[:-1]}")),
                       ({"input": q[..., :0], "target": p[..., :0]}, f"dimension {len(MANY) - 1} of the shape is 0"), ({"reduction": "average"}, "reduction")):
        with pytest.raises(kld.KldValueError, match=text):
            functional.kl_div(**{"input": q, "target": p, "connection": connection, **more})


def test_the_defaults_are_pytorchs(connection):
    q, p = data((6, 11))
    assert float(functional.kl_div(q, p, connection=connection)) == pytest.approx(
        float(reference(q, p)[0]), rel=1e-6)
    loss = nn.KLDivLoss(connection=connection)
    theirs = torch.nn.KLDivLoss()  # which warns of "mean", where kld does not
    assert (loss.reduction, loss.log_target) == (theirs.reduction, theirs.log_target) == ("mean", False)
    assert float(loss(q, p)) == pytest.approx(float(reference(q, p)[0]), rel=1e-6)
    module = nn.KLDivLoss(reduction="batchmean", log_target=True, divergence="js", connection=connection)
    assert repr(module) == "KLDivLoss(reduction='batchmean', log_target=True, divergence='js')"
    assert float(module(q, data((6, 11), log_target=True)[1])) > 0
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'temprature'"):
        nn.KLDivLoss(temprature=2.0)
    named = {name for name, one in inspect.signature(functional.kl_div).parameters.items() if one.kind == one.KEYWORD_ONLY}
    assert set(nn.Options.__annotations__) == named - {"connection"}
    zero = torch.tensor(-0.5), torch.tensor(0.3)
    for reduction in ("none", "mean", "sum"):
        mine = functional.kl_div(*zero, reduction=reduction, connection=connection)
        assert mine.shape == () and float(mine) == pytest.approx(
            float(F.kl_div(*zero, reduction=reduction)), rel=1e-6)


def test_copies_of_a_model(connection):
    """An averaged copy uses the same connection; a pickle has none, and says so."""
    q, p = data((6, 11))
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(11, 11),
                                 "loss": nn.KLDivLoss(reduction="sum", temperature=2.0, input_form="logits",
                                                      connection=connection)})
    copied = torch.optim.swa_utils.AveragedModel(model).module
    assert copied["loss"] is not model["loss"] and copied["loss"].connection is connection
    assert copied["body"].weight is not model["body"].weight and not connection.closed
    expected = float(model["loss"](q, p))
    assert float(copied["loss"](q, p)) == expected
    copied["loss"].options["temperature"] = 1.0
    assert model["loss"].options["temperature"] == 2.0
    with pytest.raises(kld.KldTypeError, match="with connection=None.* connect again where it is unpickled"):
        pickle.dumps(model)
    model["loss"].connection = None
    again = pickle.loads(pickle.dumps(model))["loss"]
    assert again.connection is None and float(again(q, p)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("old", [{"size_average": True}, {"size_average": False}, {"reduce": False},
                                 {"reduce": True}, {"size_average": False, "reduce": False},
                                 {"size_average": 0}, {"reduce": 0}])
def test_deprecated_arguments(connection, old):
    q, p = data((6, 11))
    with pytest.warns(UserWarning, match="deprecated"):
        theirs = F.kl_div(q, p, **old)
    with pytest.warns(UserWarning, match="deprecated"):
        mine = functional.kl_div(q, p, **old, connection=connection)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_what_pytorch_still_takes(connection):
    q, p = data((6, 11))
    with pytest.warns(UserWarning, match="elementwise_mean.* is deprecated"):
        theirs = F.kl_div(q, p, reduction="elementwise_mean")
    for _ in range(2):  # a call like one before it says it, too
        with pytest.warns(UserWarning, match="elementwise_mean.* is deprecated"):
            mine = functional.kl_div(q, p, reduction="elementwise_mean", connection=connection)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    p = p.detach().log()
    assert functional.kl_div(q, p, log_target=np.bool_(True), connection=connection) == functional.kl_div(
        q, p, log_target=True, connection=connection)
    with kld.connect("local:cpu", threads=np.int64(1), cache_bytes_max=np.uint32(1 << 20)) as other:
        assert functional.kl_div(q, p, log_target=True, connection=other) > 0


def test_mixed_dtypes_promote_as_in_pytorch(connection):
    q, p = data((6, 11))
    loss = functional.kl_div(q, p.detach().double(), reduction="sum", connection=connection)
    assert loss.dtype == F.kl_div(q, p.detach().double(), reduction="sum").dtype == torch.float64
    loss.backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("arguments, error, text", [
    ({"reduction": "average"}, ValueError, "unknown reduction 'average'"),
    ({"target": torch.ones(4, 5)}, ValueError, "nothing is broadcast"),
    ({"target": torch.ones(1, 4)}, ValueError, "nothing is broadcast"),  # which PyTorch's does
    ({"input": torch.ones(1, 4)}, ValueError, "nothing is broadcast"),
    ({"target": torch.ones(4)}, ValueError, "nothing is broadcast"),
    ({"input": torch.ones(3, 4, dtype=torch.int64)}, TypeError, "input has dtype torch.int64"),
    ({"target": [1.0]}, TypeError, "target is a tensor, not list"),
    ({"input": torch.ones(3, 4).to_sparse()}, NotImplementedError, "strided tensors on the CPU"),
    ({"target": torch.ones(3, 4, device="meta")}, NotImplementedError, "on meta"),
    ({"log_target": True, "target_form": "logits"}, ValueError, "contradict"),
    ({"row_mask": torch.ones(3)}, TypeError, "it is bool or uint8"),
    ({"row_mask": "abc"}, TypeError, "row_mask is a str that PyTorch makes no tensor of"),
    ({"row_weights": "abc"}, TypeError, "row_weights is a str that PyTorch makes no tensor of"),
    ({"row_weights": [[1.0], [1.0, 2.0]]}, ValueError, "row_weights is a list that PyTorch makes no tensor of"),
    ({"row_weights": torch.ones(4)}, ValueError, r"row_weights has shape \(4,\); expected \(3,\)"),
    ({"input": torch.ones(0, 4), "target": torch.ones(0, 4)}, ValueError, "dimension 0 of the shape is 0")])
def test_errors(connection, arguments, error, text):
    with pytest.raises(error, match=text) as raised:
        functional.kl_div(**{"input": torch.ones(3, 4), "target": torch.ones(3, 4), "connection": connection,
                             **arguments})
    assert isinstance(raised.value, kld.KldError)


# What PyTorch raises, and what kld does there.
REFUSED_BY_BOTH = {
    "reduction": ({"reduction": "average"}, ValueError, kld.KldValueError),
    "no reduction": ({"reduction": None}, ValueError, kld.KldTypeError),
    "classes": ({"target": torch.ones(3, 5)}, RuntimeError, kld.KldValueError),
    "rows": ({"target": torch.ones(2, 4)}, RuntimeError, kld.KldValueError),
    "list": ({"target": [1.0]}, TypeError, kld.KldTypeError),
    "list of inputs": ({"input": [1.0]}, TypeError, kld.KldTypeError),
    "nothing": ({"target": None}, TypeError, kld.KldTypeError),
    "array": ({"target": np.ones((3, 4))}, TypeError, kld.KldTypeError),
    "integers": ({"input": torch.ones(3, 4, dtype=torch.int64)}, RuntimeError, kld.KldTypeError),
    "integer targets": ({"target": torch.ones(3, 4, dtype=torch.int32)}, RuntimeError, kld.KldTypeError),
    "booleans": ({"input": torch.ones(3, 4, dtype=torch.bool)}, RuntimeError, kld.KldTypeError),
    "complex": ({"input": torch.ones(3, 4, dtype=torch.complex64)}, RuntimeError, kld.KldTypeError),
    "log_target": ({"log_target": "yes"}, TypeError, kld.KldTypeError),
    "two devices": ({"target": torch.ones(3, 4, device="meta")}, RuntimeError, kld.KldUnsupportedError),
    "unknown": ({"axis": 1}, TypeError, TypeError)}


@pytest.mark.parametrize("name", REFUSED_BY_BOTH)
def test_parity_of_errors(connection, name):
    arguments, theirs, mine = REFUSED_BY_BOTH[name]
    given = {"input": torch.ones(3, 4), "target": torch.ones(3, 4), **arguments}
    with pytest.raises(theirs):
        F.kl_div(**given)
    with pytest.raises(mine) as raised:
        functional.kl_div(**given, connection=connection)
    assert str(raised.value)


def test_zeros_and_infinities(connection):
    """As documented: a class without mass adds 0, where PyTorch has NaN once a logarithm is infinite."""
    ninf = -np.inf
    q = torch.tensor([[0.0, ninf], [0.0, ninf], [ninf, 0.0]])
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]])
    theirs = F.kl_div(q, p, reduction="none").sum(-1)
    mine = functional.kl_div(q, p, reduction="row", connection=connection)
    assert mine.tolist() == [0, np.inf, np.inf] and theirs[0].isnan()
    logs = functional.kl_div(q, p.log(), reduction="row", log_target=True, connection=connection)
    assert logs.tolist() == [0, np.inf, np.inf]
    assert F.kl_div(q, p.log(), reduction="none", log_target=True).sum(-1)[0].isnan()
    masked = torch.tensor([[0.0, ninf, 1.0]], requires_grad=True)  # a class that logits rule out
    loss = functional.kl_div(masked, torch.tensor([[0.5, ninf, 0.25]]), reduction="sum", input_form="logits",
                             target_form="logits", connection=connection)
    loss.backward()
    assert loss.isfinite() and masked.grad.isfinite().all() and masked.grad[0, 1] == 0


# ---- Autograd

FORMS = [(a, b) for a in ("probs", "logprobs", "logits") for b in ("probs", "logprobs", "logits")]


def in_form(form, shape, seed):
    z = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"probs": z.softmax(-1), "logprobs": z.log_softmax(-1), "logits": z}[form].requires_grad_()


@pytest.mark.parametrize("forms", FORMS, ids="-".join)
@pytest.mark.parametrize("reduction", ["none", "row", "batchmean", "rowmean"])
def test_gradcheck(connection, reduction, forms):
    more = {"temperature": 2.0} if "logits" in forms else {}

    def loss(q, p):
        return functional.kl_div(q, p, reduction=reduction, input_form=forms[0], target_form=forms[1],
                                 divergence="jeffreys", scale=1.5, connection=connection, **more)

    q, p = in_form(forms[0], (3, 4), 1), in_form(forms[1], (3, 4), 2)
    assert torch.autograd.gradcheck(loss, (q, p))


@pytest.mark.parametrize("more", [{}, {"divergence": "js", "beta": 0.2}, {"divergence": "skew_kl", "skew": 0.1},
                                  {"divergence": "mixed_kl", "weight": 0.3}, {"normalizer": 5.0}], ids=str)
def test_gradcheck_of_parameters(connection, more):
    mask, weights = torch.tensor([True, False, True]), torch.tensor([0.5, 1.0, 2.0])

    def loss(q, p):
        return functional.kl_div(q, p, reduction="rowmean", row_mask=mask, row_weights=weights,
                                 connection=connection, **more)

    assert torch.autograd.gradcheck(loss, (in_form("logprobs", (3, 4), 1), in_form("probs", (3, 4), 2)))


def test_a_second_derivative_is_refused(connection):
    def loss(q, p):
        return functional.kl_div(q, p, connection=connection)

    inputs = in_form("logprobs", (3, 4), 1), in_form("probs", (3, 4), 2)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.gradgradcheck(loss, inputs)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(loss(*inputs), inputs, create_graph=True)


def test_one_request_gives_loss_and_gradient(connection):
    q, p = data((6, 11))
    before = connection.stats()["requests_total"]
    loss = functional.kl_div(q, p.detach(), reduction="batchmean", connection=connection)
    (3 * loss).backward(retain_graph=True)
    once = q.grad.clone()
    (3 * loss).backward()
    again = kld._autograd.keeps_graph is None  # PyTorch 1.13: the second pass asks for the gradient once more
    assert connection.stats()["requests_total"] == before + 1 + again
    torch.testing.assert_close(q.grad, 2 * once)
    torch.testing.assert_close(once, -3 / 6 * p.detach())
    assert p.grad is None
    with torch.no_grad():
        assert not functional.kl_div(q, p, connection=connection).requires_grad


@pytest.mark.parametrize("factor", [1, 3])
def test_a_gradient_with_a_retained_graph_is_the_callers(connection, factor):
    q, p = data((6, 11))
    loss = factor * functional.kl_div(q, p, reduction="sum", connection=connection)
    first = torch.autograd.grad(loss, (q, p), retain_graph=True)
    kept = [one.clone() for one in first]
    for one in first:
        one.zero_()
    for mine, right in zip(torch.autograd.grad(loss, (q, p)), kept):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("forms", [("logprobs", "probs"), ("logits", "logits")], ids="-".join)
@pytest.mark.parametrize("reduction", ["none", "row", "sum", "mean"])
def test_rows_that_are_left_out_get_no_gradient_whatever_backward_brings(connection, reduction, forms):
    """sqrt() of a distance of 0 brings inf."""
    q, p = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    mask = torch.tensor([[1, 1], [0, 1]], dtype=torch.uint8)
    for factor in (float("inf"), float("nan"), 2.0):
        loss = functional.kl_div(q.reshape(2, 2, 6), p.reshape(2, 2, 6), reduction=reduction, input_form=forms[0],
                                 target_form=forms[1], row_mask=mask, connection=connection)
        for gradient in torch.autograd.grad(loss, (q, p), torch.full_like(loss, factor)):
            assert torch.equal(gradient[2], torch.zeros(6))
            assert forms[1] == "probs" or gradient[0].isfinite().any() == (factor == 2)
    if reduction == "row":
        distance = functional.kl_div(q, p, reduction="row", divergence="js", input_form="logits", target_form="logits",
                                     row_mask=mask.flatten(), connection=connection).sqrt().sum()
        assert torch.autograd.grad(distance, q)[0].isfinite().all()


def test_parameters_where_no_gradient_is_asked_for(connection):
    q, p = (one.detach() for one in data((6, 11)))
    two, weights = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.ones(6))
    more = {"input_form": "logits", "connection": connection}
    with torch.no_grad():
        assert functional.kl_div(q, p, temperature=two, row_weights=weights, **more) == functional.kl_div(
            q, p, temperature=2.0, **more)
        assert connection.kl_div(torch.nn.Parameter(p), p).loss == 0


def test_a_temperature_that_is_changed_in_place(connection):
    q, p = (one.detach() for one in data((6, 11)))
    temperature, more = torch.tensor(1.0), {"input_form": "logits", "connection": connection}
    for value in (1.0, 2.0, 4.0, 2.0):
        temperature.fill_(value)
        assert functional.kl_div(q, p, temperature=temperature, **more) == functional.kl_div(
            q, p, temperature=value, **more)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_nothing_to_compute_is_said(connection, shape):
    for reduction in ("mean", "none", "row"):
        for wanted in (False, True):
            with pytest.raises(kld.KldValueError, match="dimension [01] of the shape is 0"):
                functional.kl_div(torch.ones(shape, requires_grad=wanted), torch.ones(shape), reduction=reduction,
                                  connection=connection)


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum", "none"])
def test_without_dimensions(connection, reduction):
    q, p = torch.tensor(-0.5, requires_grad=True), torch.tensor(0.5)
    found = functional.kl_div(q, p, reduction=reduction, connection=connection)
    right = torch.nn.functional.kl_div(q, p, reduction=reduction)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(torch.autograd.grad(found, q), torch.autograd.grad(right, q))


def test_what_is_no_connection(server):
    for call in (lambda: functional.kl_div(torch.ones(2, 3), torch.ones(2, 3), connection=server.url_unix),
                 lambda: functional.empty(3, connection=server.url_unix)):
        with pytest.raises(kld.KldTypeError, match="connection is what kld.connect.. gives, not str"):
            call()


def test_what_gets_no_gradient_is_refused(connection):
    q, p = data((6, 11))
    for name, value in (("temperature", torch.tensor(2.0)), ("row_weights", torch.ones(6))):
        more = {"input_form": "logits", "connection": connection}
        with pytest.raises(kld.KldValueError, match=f"{name} requires grad"):
            functional.kl_div(q, p, **{name: value.clone().requires_grad_()}, **more)
        assert functional.kl_div(q, p, **{name: value}, **more) > 0
    with pytest.raises(kld.KldValueError, match="predictions requires grad"):
        connection.kl_div(q, p.detach())
    with pytest.raises(kld.KldValueError, match="requires grad"):
        connection.publish("test/grad", p)


def test_bfloat16_tensors_in_the_place_of_arrays(connection):
    needs("ml_dtypes")
    q, p = (tensor.detach() for tensor in data((6, 11), torch.bfloat16))
    result = connection.kl_div(q, p, predictions_form="logprobs", reduction="sum")
    assert result.loss == float(functional.kl_div(q, p, reduction="sum", connection=connection))
    turned = connection.kl_div(q.t().contiguous().t(), p, predictions_form="logprobs", reduction="sum")
    assert turned.loss == result.loss
    with connection.publish("test/bfloat16", p) as published:
        assert published.dtype == "bfloat16"


def test_tensors_in_shared_memory_are_not_copied(server):
    with kld.connect(server.url_unix, staging_bytes_max=4096) as connection:
        shape = (64, 1000)
        q, p = data(shape)
        with pytest.raises(kld.KldError, match="staging_bytes_max"):
            functional.kl_div(q, p, connection=connection)
        mine = functional.empty(shape, connection=connection).copy_(q.detach()).requires_grad_()
        targets = functional.empty(*shape, connection=connection).copy_(p.detach())
        loss = functional.kl_div(mine, targets, reduction="sum", connection=connection)
        loss.backward()
        assert connection.copied_bytes == 0
        torch.testing.assert_close(mine.grad, -p.detach())
        # Laid out another way: copied once, straight into shared memory.
        turned = functional.kl_div(q.detach().t().contiguous().t(), targets, reduction="sum",
                                   connection=connection)
        assert turned == loss and connection.copied_bytes == q.numel() * 4
    mine.grad.mul_(2)  # outlives the connection
    torch.testing.assert_close(mine.grad, -2 * p.detach())
    for dtype in DTYPES.values():
        made = functional.empty(3, 5, dtype=dtype, requires_grad=True)
        assert made.shape == (3, 5) and made.dtype == dtype and made.requires_grad
    with pytest.raises(TypeError, match="dtype torch.int32"):
        functional.empty(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="at least 1"):
        functional.empty(3, 0)


def test_autocast(connection):
    q, p = data((6, 11))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = torch.nn.Linear(11, 11)(q.detach())
        assert logits.dtype == torch.bfloat16
        logits.retain_grad()
        loss = functional.kl_div(logits, p, reduction="batchmean", input_form="logits", connection=connection)
    assert loss.dtype == torch.float32
    loss.backward()
    upcast = logits.detach().double().requires_grad_()
    expected = F.kl_div(upcast.log_softmax(-1), p.detach().double(), reduction="batchmean")
    expected.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.grad.double(), upcast.grad, rtol=2**-8, atol=1e-7)


def test_a_training_run_is_pytorchs(server):
    """Same seed, same data: the two curves agree, over a server and in this process."""
    def train(distance):
        torch.manual_seed(5)
        teacher = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 10))
        student = torch.nn.Linear(20, 10)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
        curve = []
        for _ in range(60):
            x = torch.randn(64, 20)
            with torch.no_grad():
                targets = (teacher(x) / 2).softmax(-1)
            optimizer.zero_grad()
            loss = distance((student(x) / 2).log_softmax(-1), targets)
            loss.backward()
            optimizer.step()
            curve.append(float(loss))
        return curve

    theirs = train(lambda q, p: F.kl_div(q, p, reduction="batchmean"))
    assert theirs[-1] < 0.5 * theirs[0]
    for url in (server.url_unix, f"local:{server.backend}"):
        with kld.connect(url) as connection:
            assert train(nn.KLDivLoss(reduction="batchmean", connection=connection)) == pytest.approx(
                theirs, abs=1e-5)


@pytest.mark.parametrize("shape", [(4, 6), (64, 1000), (2, 64, 500)], ids=str)
def test_a_loss_by_element_may_be_written_to(connection, shape):
    """Wherever its memory is; as PyTorch's may."""
    logits, targets = torch.randn(shape), torch.randn(shape).softmax(-1)
    gradients = []
    for ours in (True, False):
        leaf = logits.clone().requires_grad_()
        loss = (functional.kl_div(leaf, targets, reduction="none", input_form="logits", connection=connection) if ours
                else F.kl_div(leaf.log_softmax(-1), targets, reduction="none"))
        assert not loss._is_view()
        loss.mul_(2)
        loss[0] = 0
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        gradients.append(gradient.clone())
        gradient.mul_(torch.ones((), requires_grad=True))
    torch.testing.assert_close(*gradients)


def test_losses_where_no_more_can_be_shared(make_server):
    logits, targets = torch.randn(64, 1000), torch.randn(64, 1000).softmax(-1)
    with kld.connect(make_server(client_regions_max=8).url_unix) as connection:
        held = [functional.kl_div(logits.clone().requires_grad_(), targets, input_form="logits", reduction="none",
                                  connection=connection) for _ in range(12)]
        assert all(torch.equal(loss, held[0]) for loss in held)


def test_threads(connection):
    q, p = data((32, 200))
    expected, right = reference(q, p, reduction="sum")[0], []

    def work():
        mine = q.detach().clone().requires_grad_()
        for _ in range(10):
            loss = functional.kl_div(mine, p.detach(), reduction="sum", connection=connection)
            loss.backward()
            right.append(abs(float(loss) - float(expected)) < 1e-4)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(right) == 40 and all(right)
