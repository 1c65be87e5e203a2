"""Requests like one before them, of which only the addresses are new: PyTorch's tensors on the CPU, wherever they lie. Calls
like one before them (_repeated.py). And the second backward pass of one graph."""
import gc
import weakref

import numpy as np
import pytest

from pythonlib import import_kld, import_torch

kld = import_kld()
torch = import_torch()
from kld import _autograd, _repeated, _request, functional  # noqa: E402


@pytest.fixture(params=["unix", "local:cpu"])
def url(request, server):
    return server.url_unix if request.param == "unix" else request.param


@pytest.fixture
def connection(url):
    with kld.connect(url) as made:
        yield made


def tensors(shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).softmax(-1).to(dtype) for _ in range(2)]


def shared(tensor, connection):
    return functional.empty(tensor.shape, dtype=tensor.dtype, connection=connection).copy_(tensor)


def askew(tensor, connection):
    """At an address that is no multiple of an element's size."""
    size = tensor.numel() * tensor.element_size()
    block = torch.zeros(size + 1, dtype=torch.uint8)
    moved = torch.frombuffer(memoryview(block.numpy()), dtype=tensor.dtype, count=tensor.numel(), offset=1)
    return moved.view(tensor.shape).copy_(tensor)


PLACES = {"plain": lambda tensor, connection: tensor.clone(), "shared": shared, "askew": askew}


@pytest.mark.parametrize("shape", [(6, 11), (64, 1000)], ids=str)  # whose gradients are not shared, and are
@pytest.mark.parametrize("more", [{}, {"row_mask": True}, {"row_weights": True, "reduction": "row"},
                                  {"reduction": "none"}], ids=str)
def test_only_addresses_are_new(url, connection, shape, more):
    more = {"reduction": "batchmean", "input_form": "probs", **more}
    for name in {"row_mask", "row_weights"} & set(more):
        more[name] = torch.arange(shape[0]) % 3 > 0 if name == "row_mask" else torch.arange(float(shape[0]))
    seed, kept = 0, []
    for places in (("plain", "plain"), ("shared", "shared"), ("plain", "shared"), ("askew", "plain"),
                   ("shared", "askew"), ("plain", "plain"), ("shared", "plain")):
        for wanted in ((True, False), (True, True), (False, False)):
            seed += 1
            given = tensors(shape, seed)
            q, p = (PLACES[place](tensor, connection).requires_grad_(want)
                    for place, tensor, want in zip(places, given, wanted))
            loss = functional.kl_div(q, p, connection=connection, **more)
            with kld.connect(url) as other:  # which never saw a request like it
                right = [tensor.requires_grad_(want) for tensor, want in zip(given, wanted)]
                expected = functional.kl_div(*right, connection=other, **more)
            assert torch.equal(loss, expected)
            if any(wanted):
                loss.sum().backward()
                expected.sum().backward()
            for mine, its in zip((q, p), right):
                assert (mine.grad is None) == (its.grad is None) and (its.grad is None or torch.equal(mine.grad, its.grad))
            kept.append((q.grad, None if q.grad is None else right[0].grad))
    for mine, its in kept:  # no later request wrote to them
        assert mine is None or torch.equal(mine, its)
    assert 1 <= len(connection._known) <= 3


def test_memory_that_is_gone_is_not_remembered(server):
    """The address comes again, as another kind of memory."""
    with kld.connect(server.url_unix) as connection:
        q, p = tensors((64, 1000), 1)
        for turn in range(4):
            mine = shared(q, connection) if turn % 2 else q.clone()
            before = connection.copied_bytes
            assert float(functional.kl_div(mine, p, input_form="probs", connection=connection)) > 0
            assert connection.copied_bytes - before == q.nelement() * 4 * (1 if turn % 2 else 2)
            del mine
            gc.collect()
            connection._memory.collect()
            connection._memory.forget_cached()


def test_the_counters_and_the_loss_are_those_of_the_first(connection):
    q, p = tensors((16, 256), 1)
    found = []
    for _ in range(3):
        before = connection.copied_bytes
        leaf = q.clone().requires_grad_()
        loss = functional.kl_div(leaf, p, input_form="probs", connection=connection)
        assert loss.dtype == torch.float32 and loss.shape == () and loss.is_cpu
        found.append((float(loss), connection.copied_bytes - before))
    assert len(set(found)) == 1
    assert found[0][1] == (0 if connection.url == "local:cpu" else 3 * q.nelement() * 4)


def test_a_loss_of_float64(connection):
    q, p = tensors((16, 256), 1, torch.float64)
    for _ in range(2):
        found = functional.kl_div(q, p, input_form="probs", reduction="sum", connection=connection)
        assert found.dtype == torch.float64
        assert float(found) == connection.kl_div(q.numpy(), p.numpy(), reduction="sum", grad=False).loss


def test_a_refused_request_is_not_remembered(connection):
    q, p = tensors((4, 5), 1)
    for _ in range(2):
        with pytest.raises(kld.KldError):
            functional.kl_div(q, p, temperature=-1.0, connection=connection)
    assert not connection._known


def test_a_request_on_a_gpu_and_one_on_the_host_share_nothing(connection):
    """What is on a GPU is answered early, and waits for events: _device.py writes that to the request."""
    plans = []
    for where in (None, object()):
        call = _request.Call(connection, _request.Parameters(), (4, 5), None, where)
        for slot in ("predictions", "targets"):
            array = np.full((4, 5), 0.2, np.float32)
            call.input(slot, _request.View(array.ctypes.data, "float32", (4, 5), None, array))
        plans.append(call._plan())
    assert plans[0] is not plans[1] and plans[0].request is not plans[1].request


@pytest.mark.parametrize("calls", [1, 2], ids=["first", "known"])
def test_a_second_backward_pass(connection, calls):
    """PyTorch 1.13 does not say whether a graph is kept: there the second pass asks again, of the tensors of the first."""
    for call in range(calls):
        q, p = tensors((6, 11), 1 + call)
        leaf = q.requires_grad_()
        loss = functional.kl_div(leaf, p, reduction="sum", input_form="probs", connection=connection)
    first = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    kept = first.clone()
    torch.testing.assert_close(kept, -p / q)
    first.zero_()
    assert torch.equal(torch.autograd.grad(2 * loss, leaf, retain_graph=True)[0], 2 * kept)
    loss.backward()
    assert torch.equal(leaf.grad, kept)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("calls", [1, 2], ids=["first", "known"])
def test_the_first_backward_pass_has_its_gradient(connection, calls):
    """Whatever was written to the tensors since."""
    for call in range(calls):
        q, p = tensors((6, 11), 1 + call)
        leaf = q.clone().requires_grad_()
        loss = functional.kl_div(leaf, p, reduction="sum", input_form="probs", connection=connection)
    with torch.no_grad():
        leaf.zero_()
    found = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    torch.testing.assert_close(found, -p / q)
    if _autograd.keeps_graph is None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, leaf)
    else:
        assert torch.equal(torch.autograd.grad(loss, leaf)[0], found)


@pytest.mark.parametrize("name, more", [("row_mask", {"reduction": "row"}), ("row_mask", {"reduction": "batchmean"}),
                                        ("row_mask", {"reduction": "none", "target_form": "logits"}),
                                        ("row_weights", {"reduction": "none", "target_form": "logits"})], ids=str)
def test_rows_that_are_written_to_before_backward(connection, name, more):
    """A gradient of other rows than the loss's would be wrong, and nobody would know."""
    q, p = tensors((6, 11), 3)
    rows = torch.ones(6, dtype=torch.bool) if name == "row_mask" else torch.ones(6)
    more = {"input_form": "logits", **more}
    for written in (False, True):
        leaf = q.clone().requires_grad_()
        loss = functional.kl_div(leaf, p, connection=connection, **{name: rows}, **more)
        if written:
            rows.zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.sum().backward()
        else:
            loss.sum().backward()
            assert leaf.grad.abs().sum() > 0


@pytest.mark.parametrize("reduction", ["row", "none"])
@pytest.mark.parametrize("name", ["row_mask", "row_weights"])
def test_arrays_of_rows_that_are_written_to_before_backward(connection, name, reduction):
    """NumPy does not count who writes to them: they are copied."""
    q, p = tensors((6, 11), 3)
    rows = np.ones(6, bool if name == "row_mask" else np.float32)
    gradients = []
    for written in (False, True):
        leaf = q.clone().requires_grad_()
        loss = functional.kl_div(leaf, p, connection=connection, reduction=reduction, input_form="logits", **{name: rows})
        if written:
            rows[:] = 0
        loss.sum().backward()
        gradients.append(leaf.grad)
    assert gradients[0].abs().sum() > 0 and torch.equal(*gradients)


@pytest.mark.parametrize("reduction", ["none", "row", "sum"])
def test_what_is_saved_is_unpacked_once(connection, reduction):
    """As checkpoint() without reentrance wants it (PyTorch 2)."""
    def unpack(handle):
        return handle.pop()  # of an empty list: it was unpacked before

    q, p = tensors((6, 11), 3)
    leaf = q.clone().requires_grad_()
    mask = torch.tensor([True, False] * 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: [tensor], unpack):
        loss = functional.kl_div(leaf, p, connection=connection, input_form="logits", row_mask=mask,
                                 reduction=reduction)
    loss.sum().backward()
    assert leaf.grad[0].abs().sum() > 0 and not leaf.grad[1].any()


def is_known(loss):
    """Computed as a call like one before it."""
    return type(loss.grad_fn).__name__ == "KlDivKnownBackward"


def of_kl_div(q, p, connection, **more):
    """A leaf, and its loss."""
    leaf = q.clone().requires_grad_()
    return leaf, functional.kl_div(leaf, p, connection=connection, **{"input_form": "probs", **more})


KINDS = [{}, {"reduction": "mean"}, {"reduction": "sum", "scale": 0.25}, {"reduction": "rowmean", "timeout": 20.0},
         {"input_form": "logits", "target_form": "logits", "temperature": 2.0}, {"divergence": "js", "beta": 0.25},
         {"log_target": True}]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float64, torch.float32),
                                    (torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str)
@pytest.mark.parametrize("shape", [(11,), (6, 11), (3, 21, 320)], ids=str)  # the last one's gradient is shared memory
def test_a_known_call_is_the_first_one(url, connection, backend, shape, dtypes):
    """To the last bit, with the factor of its backward pass, without gradients and in float64 losses. (On a card a loss
    alone has a kernel of its own, and so have rows of 257 to 512 logits on a CPU.)"""
    kept, other_bits = [], backend == "cuda" and url.startswith("unix") or shape[-1] > 256
    for turn in range(3):
        for number, more in enumerate(KINDS):
            more = {"input_form": "probs", "reduction": "batchmean", **more}
            q, p = (tensor.to(dtype) for tensor, dtype in zip(tensors(shape, 10 * turn + number), dtypes))
            p = p.log() if "log_target" in more else p
            mine = of_kl_div(q, p, connection, **more)
            with kld.connect(url) as other:
                right = of_kl_div(q, p, other, **more)
            assert is_known(mine[1]) == (turn > 0) and not is_known(right[1])
            for leaf, loss in (mine, right):
                (loss if turn < 2 else 3 * loss).backward()
            assert mine[1].dtype == right[1].dtype and torch.equal(mine[1], right[1])
            assert mine[0].grad.dtype == q.dtype and torch.equal(mine[0].grad, right[0].grad)
            alone = functional.kl_div(q, p, connection=connection, **more)
            torch.testing.assert_close(alone, mine[1].detach(), rtol=2e-6 if other_bits else 0, atol=0)
            assert not alone.requires_grad
            with torch.no_grad():
                assert not functional.kl_div(mine[0], p, connection=connection, **more).requires_grad
            kept.append((mine[0].grad, mine[0].grad.clone()))
    assert all(torch.equal(one, copy) for one, copy in kept)  # no later request wrote to them
    assert len(connection._calls) == 2 * len(KINDS)


def test_gradcheck_of_known_calls(connection):
    q, p = tensors((3, 7), 1, torch.float64)
    for reduction in ("mean", "batchmean", "sum", "rowmean"):
        for _ in range(2):
            assert torch.autograd.gradcheck(lambda x: functional.kl_div(
                x, p, reduction=reduction, input_form="logits", connection=connection), q.log().requires_grad_())


def test_what_differs_from_a_known_call_is_seen(connection):
    """Each is computed, or refused, as if none had been before it."""
    q, p = tensors((6, 11), 1)
    for _ in range(2):
        leaf, loss = of_kl_div(q, p, connection)
    assert is_known(loss)
    right = float(loss)

    def found(input, target, **more):
        return functional.kl_div(input, target, input_form="probs", connection=connection, **more)

    askew_q = askew(q, connection)
    turned = q.t().contiguous().t()
    negative = (-q)._neg_view()
    assert negative.is_contiguous() and negative.is_neg()
    for other in (turned, askew_q, negative, torch.nn.Parameter(q.clone())):
        assert float(found(other, p)) == right == float(found(q, p.t().contiguous().t()))
    assert float(found(q, (-p)._neg_view())) == float(found(q, askew(p, connection))) == right
    both = q.clone().requires_grad_(), p.clone().requires_grad_()
    found(*both).backward()
    assert both[1].grad is not None
    mask = torch.arange(6) > 2
    assert float(found(q, p, row_mask=mask)) != right
    for wrong, error in ((q.to_sparse(), kld.KldUnsupportedError), (q[:5], kld.KldValueError), (q.int(), kld.KldTypeError),
                         (q.numpy(), kld.KldTypeError)):
        with pytest.raises(error):
            found(wrong, p)
        with pytest.raises(error):
            found(q, wrong)
    with pytest.raises(kld.KldTypeError, match="log_target is a bool"):
        found(q, p, log_target=0)
    with pytest.raises(kld.KldTypeError, match="temperature is a number"):
        found(q, p, temperature=[1.0])
    with pytest.raises(kld.KldTypeError, match="connection is what"):
        functional.kl_div(q, p, input_form="probs", connection="unix:")
    leaf, loss = of_kl_div(q, p, connection)
    assert is_known(loss)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(loss, leaf, create_graph=True)
    connection.close()
    with pytest.raises(kld.KldConnectionError, match="closed"):
        found(leaf, p)


def test_of_the_default_connection(server, monkeypatch):
    """Which the environment may name at any time."""
    q, p = tensors((6, 11), 1)
    for where in (server.url_unix, None, server.url_unix):
        monkeypatch.setenv("KLD_SERVER", where) if where else monkeypatch.delenv("KLD_SERVER", raising=False)
        for turn in range(2):
            loss = of_kl_div(q, p, None)[1]
        assert is_known(loss)
    kld.default_connection().close()  # of KLD_SERVER
    from kld import _default
    _default.for_cpu_tensors(torch.get_num_threads()).close()
    assert [is_known(of_kl_div(q, p, None)[1]) for _ in range(2)] == [False, True]


def test_what_ends_a_known_call_early(connection, monkeypatch):
    """Between the request and its answer."""
    q, p = tensors((64, 1000), 1)
    expected = [of_kl_div(q, p, connection) for _ in range(2)][0]
    expected[1].backward()

    class Broken(_repeated.KlDivKnown):
        @staticmethod
        def forward(ctx, input, target, made):
            spoiled.append(any(span.spoiled for span in connection._memory._live.values()))
            raise KeyboardInterrupt

    spoiled = []
    for _ in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(_repeated, "KlDivKnown", Broken)
            with pytest.raises(KeyboardInterrupt):
                of_kl_div(q, p, connection)
        assert connection._held is None and not connection._pending[0].value
        leaf, loss = of_kl_div(q, p, connection)
        loss.backward()
        assert is_known(loss) and torch.equal(loss, expected[1]) and torch.equal(leaf.grad, expected[0].grad)
    assert spoiled == 3 * [connection.url.startswith("unix:")]  # memory that may be written late


def test_a_known_call_copies_and_keeps_nothing(connection):
    q, p = tensors((6, 11), 1)
    of_kl_div(q, p, connection)
    leaf, loss = of_kl_div(q, p, connection)
    made = loss.grad_fn.made[2].data_ptr()
    target = weakref.ref(p)
    del p
    if _autograd.keeps_graph is not None:  # PyTorch 1.13: until the backward pass
        assert target() is None
    loss.backward()
    assert leaf.grad.data_ptr() == made and loss.grad_fn.made[2] is None
