"""kld.functional.kl_div held against torch.nn.functional.kl_div of the torch at hand, on the CPU, where the tensors are
odd: laid out another way than row by row, with masses of 0, with NaN; and what backward() brings to a reduced loss.
(The table of shapes, types and reductions: test_python_torch.py; float16: test_python_half.py.)"""
import math

import pytest

from pythonlib import import_kld, import_torch

kld = import_kld()
torch = import_torch()
from kld import functional  # noqa: E402

F = torch.nn.functional
REDUCTIONS = ("none", "mean", "batchmean", "sum")
NAN, INF = math.nan, math.inf
pytestmark = pytest.mark.filterwarnings("ignore:reduction")  # "mean" divides by more than the batch


@pytest.fixture(scope="module")
def connection(server):
    with kld.connect(server.url_unix) as made:
        yield made


# ---- Layouts. Each makes a view of shape [4, 6, 10] of a leaf, into whose memory the gradient has to find.

LAYOUTS = {
    "dense": ((4, 6, 10), lambda x: x),
    "turned": ((10, 6, 4), lambda x: x.permute(2, 1, 0)),
    "rows turned": ((6, 4, 10), lambda x: x.transpose(0, 1)),
    "every other row": ((4, 12, 10), lambda x: x[:, ::2]),
    "part of a row": ((4, 6, 25), lambda x: x[..., 3:13]),
    "every other class": ((4, 6, 20), lambda x: x[..., 1::2]),
    "one row for all": ((10,), lambda x: x.expand(4, 6, 10)),
    "one row for some": ((4, 1, 10), lambda x: x.expand(4, 6, 10)),
    "one class for all": ((4, 6, 1), lambda x: x.expand(4, 6, 10)),
    "windows": ((24 + 9,), lambda x: x.as_strided((4, 6, 10), (6, 1, 1)))}


def leaf(name, seed, log):
    shape, view = LAYOUTS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).abs()
    return (-1 - x if log else x / 10).requires_grad_(), view


@pytest.mark.parametrize("layouts", [(name, "dense") for name in LAYOUTS] + [("dense", name) for name in LAYOUTS]
                         + [(name, name) for name in LAYOUTS], ids="-".join)
@pytest.mark.parametrize("log_target", [False, True], ids=["probs", "logprobs"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_layouts(connection, reduction, log_target, layouts):
    found = []
    for function, kind in ((functional.kl_div, torch.float32), (F.kl_div, torch.float64)):
        (q, of_q), (p, of_p) = leaf(layouts[0], 1, True), leaf(layouts[1], 2, log_target)
        q, p = (one.detach().to(kind).requires_grad_() for one in (q, p))
        more = {"connection": connection} if function is functional.kl_div else {}
        loss = function(of_q(q), of_p(p), reduction=reduction, log_target=log_target, **more)
        weigh = torch.rand(loss.shape, generator=torch.Generator().manual_seed(3)) + 0.5
        if loss.dim() == 3:  # what backward brings may be laid out another way, too
            weigh = weigh.transpose(0, 2).contiguous().transpose(0, 2)
        loss.backward(weigh.to(kind))
        found.append((loss.detach(), q.grad, p.grad))
    for mine, right in zip(*found):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), right, rtol=2e-6, atol=2e-7 * float(right.abs().max()))


@pytest.mark.parametrize("forms", [("logits", "logits"), ("logprobs", "probs")], ids="-".join)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_logits_and_of_rows(connection, layout, forms):
    """As of a dense copy."""
    for reduction in ("row", "rowmean", "none"):
        found = []
        for dense in (False, True):
            q, of = leaf(layout, 1, True)
            p, _ = leaf(layout, 2, False)
            q_, p_ = (of(one).contiguous() if dense else of(one) for one in (q, p))
            loss = functional.kl_div(q_, p_, reduction=reduction, input_form=forms[0], target_form=forms[1],
                                     connection=connection)
            loss.backward(torch.ones(loss.shape))
            found.append((loss.detach(), q.grad, p.grad))
        for mine, right in zip(*found):
            assert torch.equal(mine, right)


# ---- What backward() brings

@pytest.mark.parametrize("factor", [2.5, -1.0, 0.0, 1e-30, 1e30])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum"])
@pytest.mark.parametrize("log_target", [False, True], ids=["probs", "logprobs"])
def test_a_factor_of_a_reduced_loss(connection, log_target, reduction, kind, factor):
    found = []
    for function, more in ((functional.kl_div, {"connection": connection}), (F.kl_div, {})):
        q, p = (leaf("dense", seed, log)[0].detach().to(kind).requires_grad_()
                for seed, log in ((1, True), (2, log_target)))
        loss = function(q, p, reduction=reduction, log_target=log_target, **more)
        loss.backward(torch.tensor(factor, dtype=kind))
        found.append((q.grad, p.grad))
    for mine, right in zip(*found):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=3e-7 * float(right.abs().max()))


# ---- Masses of 0, infinite ones, and NaN. One row each: ln q, p (or ln p); what PyTorch has where kld has another
# number, which is what the README's table says: of the loss, and of the gradients of both sides. The class that is
# looked at is the first.

SAME = object()
ODD = {  # ln q, p, log_target: kld's loss of the class, its gradients, and PyTorch's
    "no mass": ((-1.0, 0.0, False), (0.0, 0.0, 0.0), (SAME, SAME, NAN)),
    "no mass on both sides": ((-INF, 0.0, False), (0.0, 0.0, 0.0), (NAN, SAME, NAN)),
    "mass over none": ((-INF, 0.5, False), (INF, -0.5, INF), (SAME, SAME, SAME)),
    "no mass by its logarithm": ((-1.0, -INF, True), (0.0, 0.0, 0.0), (NAN, SAME, NAN)),
    "no mass on both sides by it": ((-INF, -INF, True), (0.0, 0.0, 0.0), (NAN, SAME, NAN)),
    "mass over none by it": ((-INF, math.log(0.5), True), (INF, -0.5, INF), (SAME, SAME, SAME)),
    "NaN in the input": ((NAN, 0.5, False), (NAN, NAN, NAN), (SAME, -0.5, SAME)),
    "NaN over no mass": ((NAN, 0.0, False), (NAN, NAN, NAN), (SAME, 0.0, SAME)),
    "NaN in the input by it": ((NAN, math.log(0.5), True), (NAN, NAN, NAN), (SAME, -0.5, SAME)),
    "NaN in the target": ((-1.0, NAN, False), (NAN, NAN, NAN), (SAME, SAME, SAME)),
    "NaN in its logarithm": ((-1.0, NAN, True), (NAN, NAN, NAN), (SAME, SAME, SAME)),
    "a negative mass": ((-1.0, -0.25, False), (NAN, NAN, NAN), (SAME, 0.25, SAME)),
    "an infinite mass": ((-1.0, INF, False), (NAN, NAN, NAN), (INF, -INF, SAME)),
    "an infinite mass over one": ((0.0, INF, False), (NAN, NAN, NAN), (SAME, -INF, SAME)),
    "an infinite mass over none": ((-INF, INF, False), (NAN, NAN, NAN), (INF, -INF, SAME)),
    "an infinite mass by its logarithm": ((-1.0, INF, True), (NAN, NAN, NAN), (INF, -INF, INF))}


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ODD)
def test_masses_of_zero_and_nan(connection, name, kind):
    (first_q, first_p, log_target), mine, theirs = ODD[name]
    others = ((-0.5, math.log(0.75) if log_target else 0.75), (-0.5, -0.5 if log_target else 0.5))
    for function, right in ((functional.kl_div, mine),
                            (F.kl_div, [a if b is SAME else b for a, b in zip(mine, theirs)])):
        if function is F.kl_div and kind == torch.bfloat16:
            continue
        q = torch.tensor([[first_q, others[0][0]], [others[1][0]] * 2], dtype=kind, requires_grad=True)
        p = torch.tensor([[first_p, others[0][1]], [others[1][1]] * 2], dtype=kind, requires_grad=True)
        more = {"log_target": log_target, **({"connection": connection} if function is functional.kl_div else {})}
        each, total = (function(q, p, reduction=reduction, **more) for reduction in ("none", "sum"))
        found = each[0, 0], *(one[0, 0] for one in torch.autograd.grad(total, (q, p)))
        for value, expected in zip(found, right):
            torch.testing.assert_close(value.double(), torch.tensor(expected, dtype=torch.float64), equal_nan=True,
                                       rtol=1e-6 if kind != torch.bfloat16 else 2**-8, atol=1e-7)
        assert math.isfinite(right[0]) == bool(total.isfinite())
        assert bool(total.isnan()) == math.isnan(right[0])
        if function is functional.kl_div:  # the rest of the row, and the other one, have their own
            rows = function(q, p, reduction="row", **more)
            assert bool(rows[0].isnan()) == math.isnan(mine[0]) and rows[1].isfinite()
            q2, p2 = (one.detach().requires_grad_() for one in (q, p))
            function(q2, p2, reduction="sum", **more).backward()
            assert q2.grad.flatten()[1:].isfinite().all() and p2.grad.flatten()[1:].isfinite().all()


@pytest.mark.parametrize("side", ["predictions", "targets"])
def test_nan_in_logits_is_its_row(connection, side):
    """Of which each class has a part; the other rows have none."""
    q, p = (torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    (q if side == "predictions" else p)[1, 2] = NAN
    q, p = q.requires_grad_(), p.requires_grad_()
    more = {"input_form": "logits", "target_form": "logits", "connection": connection}
    rows = functional.kl_div(q, p, reduction="row", **more)
    rows.sum().backward()
    a, b = (one.detach().requires_grad_() for one in (q, p))
    theirs = F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="none").sum(-1)
    theirs.sum().backward()
    assert rows.isnan().tolist() == theirs.isnan().tolist() == [False, True, False]
    for mine, right in ((q, a), (p, b)):
        assert mine.grad.isnan().any(-1).tolist() == right.grad.isnan().any(-1).tolist() == [False, True, False]
        torch.testing.assert_close(mine.grad[::2], right.grad[::2], rtol=1e-5, atol=1e-6)
