"""Gradients in float16 and bfloat16, on the CPU: what backward() brings reaches them before they are rounded, so that a
run in mixed precision learns what it does with PyTorch, which computes them in float32. Errors are held against the
rounding of the exact gradient. (Compiled: test_python_compiled.py; on a GPU: test_python_cuda.py.)"""
import itertools

import pytest

from pythonlib import import_kld, import_torch

kld = import_kld()
torch = import_torch()
from kld import functional  # noqa: E402

F = torch.nn.functional
SCALER = 65536.0  # GradScaler's first
HALF_ULP = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # is at most this part of a number
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def connection(server):
    with kld.connect(server.url_unix) as made:
        yield made


def tensors(shape=(32, 5000), dtype="float16", seed=1, forms=("logits", "logits")):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for form, width in zip(forms, (1, 3)):
        z = torch.randn(shape, generator=generator) * width
        made.append({"logits": z, "logprobs": z.log_softmax(-1), "probs": z.softmax(-1)}[form])
    return made[0].to(DTYPES[dtype]), made[1]


def exact(z, t, forms, distance):
    """The loss and the gradient in float64, by PyTorch: distance(ln q, p), with q given as `forms` says."""
    z = z.detach().double().requires_grad_()
    q = {"logits": lambda: z.log_softmax(-1), "logprobs": lambda: z, "probs": z.log}[forms[0]]()
    p = {"logits": lambda: t.double().softmax(-1), "logprobs": lambda: t.double().exp(), "probs": t.double}[forms[1]]()
    loss = distance(q, p)
    loss.backward()
    return loss.detach(), z.grad


def assert_rounded_once(mine, right, dtype="float16", roundings=1):
    """Of float16: numbers below the normal ones are multiples of 2^-24, those beyond the largest are inf."""
    assert mine.dtype == DTYPES[dtype]
    error, fits = (mine.double() - right).abs(), right.abs() < 65504
    allowed = right.abs() * HALF_ULP[dtype] + (2.0**-25 if dtype == "float16" else 0)
    assert bool((error <= 1.01 * roundings * allowed + 1e-7 * right.abs().max())[fits].all()), float(
        (error / allowed)[fits].max())
    assert bool((mine[right.abs() > 65536].isinf()).all())


def times(reduction, factor, weights=None):
    def distance(q, p):
        each = F.kl_div(q, p, reduction="none").sum(-1)
        each = each if weights is None else each * weights.double()
        return factor * (each.sum() / {"mean": q.numel(), "batchmean": q.shape[0], "rowmean": (
            q.shape[0] if weights is None else weights.double().sum()), "sum": 1, "row": 1, "none": 1}[reduction])
    return distance


@pytest.mark.parametrize("factor", [1.0, SCALER, 3.0, 1 / 16])
@pytest.mark.parametrize("forms", [("logits", "logits"), ("logprobs", "probs"), ("logprobs", "logprobs")], ids="-".join)
@pytest.mark.parametrize("reduction", ["mean", "batchmean", "rowmean", "row"])
def test_a_gradient_is_that_of_float32_rounded(connection, reduction, forms, factor):
    """Bounded: written by the forward pass, times a power of two: so rounded twice where `factor` is none."""
    z, t = tensors(forms=forms)
    loss, right = exact(z, t, forms, times(reduction, factor if reduction != "row" else factor / len(z)))
    leaf, before = z.clone().requires_grad_(), connection.stats()["requests_total"]
    mine = functional.kl_div(leaf, t, reduction=reduction, input_form=forms[0], target_form=forms[1],
                             connection=connection)
    mine = mine.mean() if reduction == "row" else mine
    assert float(mine) * factor == pytest.approx(float(loss), rel=1e-6)
    (mine * factor).backward()
    assert_rounded_once(leaf.grad, right, roundings=2)
    assert connection.stats()["requests_total"] == before + 1


def test_half_precision_learns_what_pytorch_does(connection):
    """The defaults of F.kl_div under GradScaler's factor."""
    z, t = tensors(forms=("logprobs", "probs"))
    upcast = z.clone().requires_grad_()
    with pytest.warns(UserWarning, match="mean"):
        theirs = F.kl_div(upcast.float(), t)
    (theirs * SCALER).backward()
    leaf = z.clone().requires_grad_()
    (functional.kl_div(leaf, t, connection=connection) * SCALER).backward()
    counts = [int(one.grad.count_nonzero()) for one in (leaf, upcast)]
    assert counts[0] == pytest.approx(counts[1], rel=1e-3) and counts[1] > 100_000
    apart = (leaf.grad.double() - upcast.grad.double()).abs()
    assert float(apart.sum() / upcast.grad.double().abs().sum()) < 1e-3
    assert bool((apart <= torch.clamp(upcast.grad.double().abs() * 2.0**-10, min=2.0**-24)).all())


@pytest.mark.parametrize("name, more", [("scale", {"scale": SCALER}), ("small scale", {"scale": 1e-6}),
                                        ("temperature", {"temperature": 0.25}), ("normalizer", {"normalizer": 7.0}),
                                        ("mask", {"row_mask": torch.arange(32) % 3 > 0})])
def test_parameters_that_change_its_size(connection, name, more):
    z, t = tensors()
    scale, temperature = more.get("scale", 1.0), more.get("temperature", 1.0)
    mask = more.get("row_mask", torch.ones(32, dtype=torch.bool))
    divisor = more.get("normalizer", 32.0)

    def distance(q, p):
        return SCALER * scale / divisor * (F.kl_div(q, p, reduction="none").sum(-1) * mask).sum() / SCALER * factor

    z64 = z.double().requires_grad_()
    factor = SCALER / scale
    distance((z64 / temperature).log_softmax(-1), (t.double() / temperature).softmax(-1)).backward()
    leaf = z.clone().requires_grad_()
    loss = functional.kl_div(leaf, t, reduction="batchmean", input_form="logits", target_form="logits",
                             connection=connection, **more)
    (loss * factor).backward()
    assert_rounded_once(leaf.grad, z64.grad, roundings=2)


UNBOUNDED = {
    "probs": (("probs", "probs"), {"reduction": "batchmean"}), "none": (("logits", "logits"), {"reduction": "none"}),
    "none of logprobs": (("logprobs", "probs"), {"reduction": "none"}),
    "weights": (("logits", "logits"), {"reduction": "batchmean", "row_weights": torch.linspace(0, 1000, 32)}),
    "rowmean of weights": (("logprobs", "probs"), {"reduction": "rowmean", "row_weights": torch.linspace(1, 2, 32)})}


@pytest.mark.parametrize("factor", [1.0, SCALER])
@pytest.mark.parametrize("name", UNBOUNDED)
def test_without_a_bound_the_backward_pass_asks(connection, name, factor):
    forms, more = UNBOUNDED[name]
    z, t = tensors(forms=forms)
    if name == "probs":
        z[0, :5] = 0.25  # larger ones, and the smallest that there are
        z[1, :5] = 6e-8
    loss, right = exact(z, t, forms, times(more["reduction"], factor, more.get("row_weights")))
    leaf = z.clone().requires_grad_()
    mine = functional.kl_div(leaf, t, input_form=forms[0], target_form=forms[1], connection=connection, **more).sum()
    assert float(mine) * factor == pytest.approx(float(loss), rel=1e-5)
    (mine * factor).backward()
    assert_rounded_once(leaf.grad, right)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jeffreys", "js", "skew_kl", "skew_reverse_kl", "tv",
                                        "cross_entropy", "mixed_kl"])
@pytest.mark.parametrize("reduction", ["mean", "row", "rowmean"])
def test_every_divergence_and_both_gradients(connection, reduction, divergence):
    """As from float32 tensors of the same numbers, which are not what is rounded here."""
    more = {"skew": 0.1} if "skew" in divergence else {"weight": 0.3} if divergence == "mixed_kl" else {}
    z, t = tensors((6, 300))
    t = t.half()
    for wants in ((True, False), (True, True), (False, True)):
        found = []
        for kind in (torch.float16, torch.float32):
            q, p = (one.to(kind, copy=True).requires_grad_(want) for one, want in zip((z, t), wants))
            loss = functional.kl_div(q, p, reduction=reduction, input_form="logits", target_form="logits",
                                     divergence=divergence, connection=connection, **more)
            (loss.sum() * SCALER).backward()
            found.append((loss, q.grad, p.grad))
        torch.testing.assert_close(found[0][0], found[1][0])
        for mine, right in zip(found[0][1:], found[1][1:]):
            assert (mine is None) == (right is None)
            if mine is not None:
                assert_rounded_once(mine, right.double(), roundings=2)


def test_masses_that_are_masked_by_the_least_number(connection):
    """A gradient of ln(p/q) has no bound: those of reverse_kl here are thousands."""
    z, t = torch.zeros(4, 6).half(), torch.zeros(4, 6)
    t[:, 3:] = -65504.0
    leaf = z.clone().requires_grad_()
    functional.kl_div(leaf, t, reduction="sum", divergence="reverse_kl", input_form="logits", target_form="logits",
                      connection=connection).backward()
    assert leaf.grad.isfinite().all() and float(leaf.grad.max()) == pytest.approx(65504 / 12, rel=1e-3)


@pytest.mark.parametrize("more", [{}, {"divergence": "reverse_kl"}, {"reduction": "row"}], ids=str)
def test_a_gradient_with_a_retained_graph(connection, more):
    z, t = tensors((4, 300))
    leaf = z.clone().requires_grad_()
    loss = SCALER * functional.kl_div(leaf, t, **{"reduction": "mean", **more}, input_form="logits",
                                      target_form="logits", connection=connection).sum()
    first = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    kept = first.clone()
    first.zero_()
    assert torch.equal(torch.autograd.grad(loss, leaf, retain_graph=True)[0], kept) and kept.count_nonzero() > 1000
    loss.backward()
    assert torch.equal(leaf.grad, kept)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_bfloat16_has_the_range(connection):
    """Written as it is, and multiplied."""
    for forms, reduction, factor in itertools.product((("logits", "logits"), ("logprobs", "probs")),
                                                      ("mean", "batchmean", "row"), (1.0, SCALER, 3.0)):
        z, t = tensors((8, 500), "bfloat16", forms=forms)
        _, right = exact(z, t, forms, times(reduction, factor))
        leaf = z.clone().requires_grad_()
        loss = functional.kl_div(leaf, t, reduction=reduction, input_form=forms[0], target_form=forms[1],
                                 connection=connection).sum()
        (loss * factor).backward()
        assert_rounded_once(leaf.grad, right, "bfloat16", roundings=2)


@pytest.mark.parametrize("more", [{"reduction": "mean"}, {"reduction": "mean", "divergence": "reverse_kl"},
                                  {"reduction": "row"}], ids=str)
def test_left_out_rows_and_bad_factors(connection, more):
    z, t = tensors((4, 300))
    leaf = z.clone().requires_grad_()
    for factor in (float("inf"), float("nan")):
        loss = functional.kl_div(leaf, t, input_form="logits", target_form="logits", connection=connection,
                                 row_mask=torch.tensor([True, False, True, True]), **more)
        gradient, = torch.autograd.grad(loss, leaf, torch.full_like(loss, factor))
        assert torch.equal(gradient[1], torch.zeros(300).half()) and not gradient[0].isfinite().any()


@pytest.mark.parametrize("more", [{}, {"divergence": "reverse_kl"}, {"reduction": "row"}], ids=str)
def test_an_attached_target(server, connection, more):
    z, t = tensors((16, 300))
    with kld.connect(server.url_unix) as teacher, teacher.publish("test/half", t.numpy(), "logits"), connection.attach(
            "test/half") as attached:
        found = []
        for target in (attached, t):
            leaf = z.clone().requires_grad_()
            loss = functional.kl_div(leaf, target, **{"reduction": "mean", **more}, input_form="logits",
                                     target_form="logits", connection=connection)
            (SCALER * loss.sum()).backward()
            found.append(leaf.grad)
        assert torch.equal(*found) and found[0].count_nonzero() > 1000


def test_over_several_servers_and_in_this_process(make_server):
    """The same bits."""
    servers = [make_server() for _ in range(2)]
    z, t = tensors((16, 300))
    found = []
    for url, more in ((servers[0].url_unix, {}), ("local:" + servers[0].backend, {}),
                      ([one.http for one in servers], {"part_bytes_max": 8192})):
        with kld.connect(url, **more) as connection:
            for divergence, reduction in itertools.product(("forward_kl", "reverse_kl"), ("mean", "row")):
                leaf = z.clone().requires_grad_()
                loss = functional.kl_div(leaf, t, reduction=reduction, divergence=divergence, input_form="logits",
                                         target_form="logits", connection=connection)
                (SCALER * loss.sum()).backward()
                found.append(leaf.grad)
    for index, gradient in enumerate(found[4:]):
        assert torch.equal(gradient, found[index % 4])
