"""kld under torch.compile() and torch.export(), on the CPU: one graph, its values and gradients are those of a call
outside; so are the errors; a number that changes makes no graph of its own (a float: PyTorch 2.6 or newer).
PyTorch 2.4 or newer; with an older one skipped. (Those at the end compile for a GPU.)"""
import gc
import re
import subprocess
import sys

import numpy as np
import pytest

from pythonlib import environment, import_kld, import_torch

kld = import_kld()
torch = import_torch()
from kld import _compiled, _surroundings, functional, nn  # noqa: E402

F = torch.nn.functional
pytestmark = pytest.mark.skipif(not _surroundings.HAS_OPERATORS, reason="torch.compile: PyTorch 2.4 or newer")
LOGITS = {"reduction": "batchmean", "input_form": "logits"}


@pytest.fixture(scope="module")
def connection(server):
    with kld.connect(server.url_unix) as made:
        yield made


def compiled(function, backend="aot_eager", fullgraph=True):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, fullgraph=fullgraph, backend=backend)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def makes_a_graph_for_each_number():
    """PyTorch 2.4 and 2.5: for each value of a float, and (2.4) for a first int of 1."""
    return torch._dynamo.config.specialize_float


def pair(*shape):
    return torch.randn(*shape), torch.randn(*shape).softmax(-1)


@pytest.mark.parametrize("forms", [("logprobs", "probs"), ("logits", "logits")], ids="-".join)
@pytest.mark.parametrize("reduction", ["batchmean", "row", "none"])
def test_compiled(connection, reduction, forms):
    """One graph, forward and backward: values, both gradients, masks, parameters."""
    def step(q, p, mask, weights):
        more = {"temperature": 2.0} if forms[0] == "logits" else {}
        return 2 * functional.kl_div(q * 1.5, p, reduction=reduction, input_form=forms[0], target_form=forms[1],
                                     row_mask=mask, row_weights=weights, scale=0.5, connection=connection,
                                     **more).sum()

    z, t = torch.randn(9, 30), torch.randn(9, 30)
    found = []
    for function in (step, compiled(step)):
        q = (z if forms[0] == "logits" else z.log_softmax(-1)).clone().requires_grad_()
        p = (t if forms[1] == "logits" else t.softmax(-1)).clone().requires_grad_()
        loss = function(q, p, torch.arange(9) % 3 > 0, torch.linspace(0.5, 2, 9))
        loss.backward()
        found.append((loss.detach(), q.grad, p.grad))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("more", [{"reduction": "mean"}, {"reduction": "row"}, {"divergence": "reverse_kl"},
                                  {"divergence": "js", "beta": 0.3}, {"reduction": "none"},
                                  {"reduction": "rowmean", "row_weights": torch.ones(9)}, {"temperature": 2.0}], ids=str)
def test_compiled_in_half_precision(connection, more):
    """What backward() brings comes before the gradient is rounded to float16."""
    def step(z, t):
        return 65536.0 * functional.kl_div(z, t, **{"reduction": "batchmean", **more}, input_form="logits",
                                           target_form="logits", connection=connection).mean()

    z, t = torch.randn(9, 3000), torch.randn(9, 3000)
    exact, found = z.half().float().requires_grad_(), []
    step(exact, t).backward()
    for function in (step, compiled(step)):
        leaf = z.half().requires_grad_()
        loss = function(leaf, t)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1])
    assert graphs() == 1
    torch.testing.assert_close(found[1][1].float(), exact.grad, rtol=2**-10, atol=2**-24)


@pytest.mark.parametrize("reduction", ["row", "sum"])
def test_rows_that_are_left_out_get_no_gradient_whatever_backward_brings(connection, reduction):
    z, t = pair(4, 6)
    z.requires_grad_()
    loss = compiled(lambda q, mask: functional.kl_div(q, t, reduction=reduction, input_form="logits", row_mask=mask,
                                                      connection=connection))(z, torch.tensor([True, True, False, True]))
    loss.backward(torch.full_like(loss, float("inf")))
    assert torch.equal(z.grad[2], torch.zeros(6)) and not z.grad[0].isfinite().any()


def test_compiled_modules_and_errors(connection, server):
    module = nn.KLDivLoss(reduction="batchmean", input_form="logits", connection=connection)
    model = torch.compile(torch.nn.Linear(8, 20), backend="aot_eager")
    step = torch.compile(lambda x, t: module(model(x), t), fullgraph=True, backend="aot_eager")
    x, t = torch.randn(6, 8), torch.randn(6, 20).softmax(-1)
    before = connection.stats()["requests_total"]
    torch.testing.assert_close(step(x, t), module(model(x), t))
    assert connection.stats()["requests_total"] == before + 2
    with torch.no_grad():
        assert not step(x, t).requires_grad
    with pytest.raises(kld.KldValueError, match="must be the same"):
        step(x, t[1:])
    default = torch.compile(lambda q, p: functional.kl_div(q, p, reduction="sum"), fullgraph=True,
                            backend="aot_eager")
    q = torch.randn(3, 4).log_softmax(-1)
    torch.testing.assert_close(default(q, t[:3, :4]), F.kl_div(q, t[:3, :4], reduction="sum"))


@pytest.mark.parametrize("name, values", [
    ("temperature", [4.0 - index / 10 for index in range(20)]), ("temperature", list(range(1, 21))),
    ("temperature", [torch.tensor(1.0 + index) for index in range(20)]),
    ("scale", [65536.0 / 2**index for index in range(20)]), ("normalizer", [1000.5 + index for index in range(20)]),
    ("beta", [index / 20 for index in range(20)]), ("timeout", [10.0 + index for index in range(20)])],
    ids=lambda value: value if isinstance(value, str) else type(value[0]).__name__)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_number_that_changes_at_each_step_makes_no_graphs(connection, reduction, name, values):
    """(Dynamo makes one for the first value, and one for any.)"""
    def step(z, t, value):
        more = {"beta": {"divergence": "js"}}.get(name, {})
        return functional.kl_div(z, t, reduction=reduction, input_form="logits", connection=connection, **{name: value},
                                 **more).sum()

    if name == "normalizer" and reduction == "none":
        pytest.skip("no divisor to replace")
    if isinstance(values[0], float) and makes_a_graph_for_each_number():
        pytest.skip("a graph for each value of a float, of this PyTorch: it takes a tensor")
    graph, t = compiled(step), pair(4, 6)[1]
    for value in values:
        found = []
        for function in (step, graph):
            z = torch.linspace(-1, 1, 24).reshape(4, 6).requires_grad_()
            loss = function(z, t, value)
            loss.backward()
            found.append((loss.detach(), z.grad))
        torch.testing.assert_close(found[0], found[1])
    assert 1 <= graphs() <= 2 + (isinstance(values[0], int) and makes_a_graph_for_each_number())


@pytest.mark.parametrize("value", [2.0, 3, torch.tensor(2.0)], ids=lambda value: type(value).__name__)
def test_numbers_are_nothing_to_compile(connection, value):
    """(Inductor would call a C++ compiler for what it computes on a CPU, for CUDA tensors, too.)"""
    from torch._inductor.utils import run_and_get_code

    def loss(z, t, value):
        return functional.kl_div(z, t, temperature=value, scale=value, connection=connection, **LOGITS)

    (z, t), graph = pair(4, 6), compiled(loss, "inductor")

    def steps():
        return [graph(z, t, value + index) == loss(z, t, value + index) for index in range(4)]

    right, code = run_and_get_code(steps)
    assert all(right) and code and not any("cpp_fused" in one for one in code), code


def test_a_batch_size_that_changes_makes_no_graphs(connection):
    def step(z, t, mask):
        return functional.kl_div(z * 2, t, row_mask=mask, connection=connection, **LOGITS)

    graph = compiled(step)
    for rows in range(3, 12):
        (z, t), found = pair(rows, 7), []
        for function in (step, graph):
            leaf = z.clone().requires_grad_()
            loss = function(leaf, t, torch.arange(rows) % 3 > 0)
            loss.backward()
            found.append((loss.detach(), leaf.grad))
        torch.testing.assert_close(found[0], found[1])
    assert graphs() == 2


def test_an_annealed_module_makes_no_graphs(connection):
    as_tensor = makes_a_graph_for_each_number()
    loss = nn.KLDivLoss(temperature=torch.tensor(4.0) if as_tensor else 4.0, connection=connection, **LOGITS)
    graph, (z, t) = compiled(loss), pair(4, 6)
    for index in range(15):
        temperature = 4.0 - index / 5
        if as_tensor:
            loss.options["temperature"].fill_(temperature)
        else:
            loss.options["temperature"] = temperature
        torch.testing.assert_close(graph(z, t), loss(z, t))
    assert 1 <= graphs() <= 2


# ---- What is refused is what is refused outside of a graph, in the same words

GRAD = {"requires_grad": True}
WRONG = {
    "log_target": {"log_target": "probs"},
    "contradiction": {"log_target": True, "target_form": "logits"}, "reduction": {"reduction": "average"},
    "text": {"divergence": 3}, "divergence": {"divergence": "x"}, "number": {"temperature": "2.0"},
    "range": {"temperature": -1.0}, "temperature": {"temperature": torch.tensor(2.0, **GRAD)},
    "needless temperature": {"input_form": "logprobs", "temperature": 2.0},
    "weights": {"row_weights": torch.ones(4, **GRAD)}, "weights' shape": {"row_weights": torch.ones(5)},
    "weights' device": {"row_weights": torch.ones(4, device="meta")}, "mask": {"row_mask": torch.ones(4)},
    "timeout": {"timeout": -1.0}, "timeout's type": {"timeout": "long"}, "shape": {"target": torch.ones(3, 6)},
    "dtype": {"target": torch.ones(4, 6, dtype=torch.int64)},
    "empty": {"input": torch.ones(0, 6), "target": torch.ones(0, 6)},
    "device": {"target": torch.ones(4, 6, device="meta")},
    "no dimension": {"input": torch.ones(()), "target": torch.ones(()), "reduction": "row"},
    "meta": {"input": torch.ones(4, 6, device="meta"), "target": torch.ones(4, 6, device="meta")}}


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", WRONG)
def test_errors_are_those_outside_of_a_graph(connection, name, compiler):
    z, t = pair(4, 6)
    given = {"input": z, "target": t, **LOGITS, **WRONG[name], "connection": connection}
    with pytest.raises(kld.KldError) as right:
        functional.kl_div(**given)
    with pytest.raises(type(right.value), match=re.escape(str(right.value))) as raised:
        compiled(functional.kl_div, compiler)(**given)
    assert type(raised.value) is type(right.value)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_dimension_is_one_class(connection, reduction):
    z, t = torch.tensor(-0.7), torch.tensor(0.5)
    right = functional.kl_div(z, t, reduction=reduction, connection=connection)
    assert right.shape == () and float(right) == pytest.approx(float(F.kl_div(z, t, reduction=reduction)), rel=1e-6)
    assert compiled(functional.kl_div)(z, t, reduction=reduction, connection=connection) == right


@pytest.mark.parametrize("reduction", ["batchmean", "row", "none"])
def test_more_dimensions_than_libkld_takes(connection, reduction):
    z, t = pair(2, 1, 3, 1, 2, 1, 2, 1, 3, 5)
    graph = compiled(functional.kl_div)
    for one in (z, z.clone().requires_grad_()):
        found = graph(one, t, reduction=reduction, connection=connection)
        torch.testing.assert_close(found, functional.kl_div(one, t, reduction=reduction, connection=connection))


@pytest.mark.parametrize("value", [torch.tensor(2.0), torch.tensor(2, dtype=torch.int64), np.float32(2), np.float64(2),
                                   True], ids=lambda value: type(value).__name__)
def test_what_is_a_number(connection, value):
    z, t = pair(4, 6)
    right = functional.kl_div(z, t, temperature=float(value), connection=connection, **LOGITS)
    assert functional.kl_div(z, t, temperature=value, connection=connection, **LOGITS) == right
    assert compiled(functional.kl_div)(z, t, temperature=value, connection=connection, **LOGITS) == right


@pytest.mark.parametrize("value", [2.0, 3, torch.tensor(2.0), torch.tensor(2, dtype=torch.int64)], ids=repr)
def test_a_default_device_is_not_that_of_numbers(connection, value):
    """A tensor went there: with meta the graph computed with what lay in the memory. Arrays are PyTorch's own to move."""
    z, t = pair(4, 6)

    def step(q, p):
        return functional.kl_div(q, p, temperature=value, row_weights=[1.0, 2.0, 0.5, 1.0], connection=connection, **LOGITS)
    right = step(z, t)
    with torch.device("meta"):
        assert torch.equal(compiled(step)(z, t), right)


def test_lists_are_vectors(connection):
    z, t = pair(4, 6)
    more = {"row_weights": [1.0, 2.0, 0.5, 1.0], "row_mask": [True, False, True, True], "connection": connection,
            **LOGITS}
    assert compiled(functional.kl_div)(z, t, **more) == functional.kl_div(z, t, **more)


@pytest.mark.parametrize("made", [torch.Tensor.tolist, torch.Tensor.numpy, lambda rows: rows.reshape(-1).tolist()],
                         ids=["nested", "array", "flat"])
def test_lists_of_more_dimensions_than_libkld_takes(connection, made):
    z, t = pair(2, 1, 3, 1, 2, 1, 2, 1, 3, 5)
    rows = torch.arange(72.0).reshape(z.shape[:-1])
    more = {"row_weights": made(rows), "row_mask": made(rows % 5 > 0), "connection": connection, **LOGITS}
    assert compiled(functional.kl_div)(z, t, **more) == functional.kl_div(z, t, **more)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("more", [LOGITS, {"reduction": "row"}, {"reduction": "none"}], ids=str)
def test_a_second_derivative_is_refused(connection, more, compiler):
    z, t = pair(4, 6)
    z.requires_grad_()
    graph = compiled(lambda z: functional.kl_div(z, t, connection=connection, **more).sum(), compiler)
    if compiler == "eager":
        with pytest.raises(kld.KldUnsupportedError, match="no second derivative"):
            torch.autograd.grad(graph(z), z, create_graph=True)
    with pytest.raises((kld.KldUnsupportedError, RuntimeError), match="no second derivative|support double backward"):
        gradient, = torch.autograd.grad(graph(z), z, create_graph=True)  # refused by newer PyTorch, and later
        (z.sum() + gradient.sum()).backward()
    torch.autograd.grad(graph(z), z)
    late = compiled(lambda z: functional.kl_div(z, t, reduction="none", input_form="logits").sum(), compiler)
    with pytest.raises((kld.KldUnsupportedError, RuntimeError), match="second derivative|support double backward"):
        gradient, = torch.autograd.grad(late(z), z, create_graph=True)
        gradient.sum().backward()


@pytest.mark.parametrize("name", ["vmap", "grad", "jvp"])
def test_transforms_are_refused(name):
    z, t = pair(4, 6)

    def loss(z, t):
        return functional.kl_div(z, t, reduction="sum", input_form="logits")

    def transformed(z, t):
        transform = getattr(torch.func, name)
        return transform(loss, (z, t), (z, t)) if name == "jvp" else transform(loss)(z, t)

    with pytest.raises(Exception, match="transform of torch.func.*expected a call outside of it"):
        compiled(transformed)(z, t)
    with pytest.raises(kld.KldUnsupportedError, match="expected a call outside of it"):
        compiled(transformed, fullgraph=False)(z, t)


# ---- Around it

def test_a_graph_ends_at_an_attached_tensor(server, connection):
    z, t = pair(4, 6)
    z.requires_grad_()
    with kld.connect(server.url_unix) as teacher, teacher.publish("test/compiled", t.numpy()), connection.attach(
            "test/compiled") as attached:
        graph = compiled(lambda z: 2 * functional.kl_div(3 * z, attached, **LOGITS), fullgraph=False)
        graph(z).backward()
        found, z.grad = z.grad, None
        (2 * functional.kl_div(3 * z, attached, **LOGITS)).backward()
        torch.testing.assert_close(found, z.grad)
        with pytest.raises(Exception, match="no tensor"):
            compiled(lambda z: functional.kl_div(z, attached, **LOGITS))(z)


def test_importing_kld_does_not_import_the_compiler():
    subprocess.run([sys.executable, "-c", "import sys, kld.nn; assert 'torch._dynamo' not in sys.modules"], check=True,
                   env=environment())


def test_exported(connection):
    z, t = pair(4, 6)
    program = torch.export.export(nn.KLDivLoss(connection=connection, **LOGITS), (z, t))
    assert "kld.loss" in str(program.graph)
    other, t = pair(4, 6)
    assert program.module()(other, t) == functional.kl_div(other, t, connection=connection, **LOGITS)


def test_the_connection_of_a_graph_may_be_gone():
    z, t = pair(4, 6)
    one = kld.connect("local:cpu")
    program = torch.export.export(nn.KLDivLoss(connection=one, **LOGITS), (z, t)).module()
    assert program(z, t) > 0
    one.close()
    with pytest.raises(kld.KldConnectionError, match="closed"):
        program(z, t)
    del one
    gc.collect()
    with pytest.raises(kld.KldConnectionError, match="gone"):
        program(z, t)


def test_the_operators_are_as_pytorch_wants_them(connection):
    z, t = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    texts, names = ["forward_kl", "batchmean", "logits", "logits"], ["temperature", "scale"]
    given = torch.ones(5, dtype=torch.bool), torch.tensor([2.0, 3.0], dtype=torch.float64), texts, names
    torch.library.opcheck(_compiled._loss_op, (z, t, None, *given, [True, True], connection.number))
    half = z.detach().half().requires_grad_()
    torch.library.opcheck(_compiled._loss_op, (half, t.detach(), None, *given, [True, False], connection.number))
    torch.library.opcheck(_compiled._late_op, (z.detach(), t.detach(), torch.ones(()), None, *given, [True, False],
                                               connection.number))
    with torch.no_grad():
        torch.library.opcheck(_compiled._once_op, (torch.ones(3),))


# ---- On a GPU

@pytest.fixture(params=["unix", "local"])
def on_card(request, backend, server):
    """-> a connection for CUDA tensors"""
    if backend != "cuda" or not torch.cuda.is_available():
        pytest.skip("needs the CUDA back end and a torch with CUDA")
    with kld.connect(server.url_unix if request.param == "unix" else "local:cuda") as made:
        yield made


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_steps_on_a_gpu(on_card, mode):
    """One graph for an annealed temperature; with CUDA graphs around the operator, and not of it."""
    def step(z, t, temperature, mask):
        return 2 * functional.kl_div(z * 1.5, t, temperature=temperature, row_mask=mask, connection=on_card, **LOGITS)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graph = torch.compile(step, fullgraph=True, mode=mode)
    t, mask = torch.randn(64, 500, device="cuda").softmax(-1), torch.arange(64, device="cuda") % 3 > 0
    for index in range(8):
        found = []
        for function in (step, graph):
            z = torch.linspace(-2, 2, 64 * 500, device="cuda").reshape(64, 500).requires_grad_()
            loss = function(z, t, 4.0 - index / 3, mask)
            loss.backward()
            found.append((loss.detach().clone(), z.grad.clone()))
        torch.testing.assert_close(found[0], found[1])
    assert 1 <= graphs() <= 2


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_errors_on_a_gpu(on_card, compiler):
    z, t = torch.randn(4, 6, device="cuda"), torch.rand(4, 6).softmax(-1)
    for more in ({"target": t}, {"target": t.cuda(), "row_mask": torch.ones(4, dtype=torch.bool)}):
        given = {"input": z, **LOGITS, "connection": on_card, **more}
        with pytest.raises(kld.KldValueError) as right:
            functional.kl_div(**given)
        with pytest.raises(kld.KldValueError, match=re.escape(str(right.value))):
            compiled(functional.kl_div, compiler)(**given)


def test_batched_gradients_on_a_gpu(on_card):
    z, t = torch.randn(3, 5, device="cuda", requires_grad=True), torch.rand(3, 5, device="cuda").softmax(-1)
    for reduction in ("sum", "row"):
        loss = functional.kl_div(z, t, reduction=reduction, input_form="logits", connection=on_card)
        weigh = torch.randn(7, *loss.shape, device="cuda")
        found = torch.autograd.grad(loss, z, weigh, retain_graph=True, is_grads_batched=True)[0]
        right = torch.stack([torch.autograd.grad(loss, z, one, retain_graph=True)[0] for one in weigh])
        torch.testing.assert_close(found, right)
