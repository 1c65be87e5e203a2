"""kld from PyTorch's CUDA tensors and from arrays of other libraries on a GPU: by handle over a server's
socket, on the current stream over local:. Values and gradients, what is copied and registered, who waits for
what, allocators, what is refused. (Compiled: test_python_compiled.py.) On the
CUDA back end with a torch that has one; elsewhere skipped."""
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from conftest import needs, wait_until
from pythonlib import environment, import_kld, import_torch, needs_card

kld = import_kld()
torch = import_torch()
from kld import functional, nn  # noqa: E402

F = torch.nn.functional
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1.6e-2, "float16": 2e-3}
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def card(backend):
    needs_card(backend, torch)


@pytest.fixture(scope="module", params=["unix", "local"])
def connection(request, server):
    with kld.connect(server.url_unix if request.param == "unix" else "local:cuda") as made:
        yield made


def data(shape, dtype=torch.float32, log_target=False, seed=1):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(-1)
    p = torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(-1)
    p = p if log_target else p.exp()
    return q.to(GPU, dtype).requires_grad_(), p.to(GPU, dtype).requires_grad_()


def reference(q, p, weigh=None, **arguments):
    q, p = (x.detach().double().requires_grad_() for x in (q, p))
    loss = F.kl_div(q, p, **arguments)
    loss.backward(weigh if weigh is None else weigh.double())
    return loss.detach(), q.grad, p.grad


def spin(milliseconds=200):
    """Keeps the current stream busy."""
    torch.cuda._sleep(int(milliseconds * 1e-3 * 1.5e9))


# ---- What it computes

@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4, 17), (64, 300), (33, 5000)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("log_target", [False, True], ids=["probs", "logprobs"])
@pytest.mark.parametrize("reduction", ["none", "mean", "batchmean", "sum"])
@pytest.mark.filterwarnings("ignore:reduction")
def test_parity(connection, reduction, log_target, dtype, shape):
    q, p = data(shape, DTYPES[dtype], log_target)
    weigh = torch.rand(shape, device=GPU, dtype=torch.float64) if reduction == "none" else None
    expected = reference(q, p, weigh, reduction=reduction, log_target=log_target)
    loss = functional.kl_div(q, p, reduction=reduction, log_target=log_target, connection=connection)
    assert loss.shape == expected[0].shape and loss.device == GPU
    assert loss.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    loss.backward(None if weigh is None else weigh.to(loss.dtype))
    exact = TOLERANCE["float64" if dtype == "float64" else "float32"]
    terms = float((p.detach().double().exp() if log_target else p.detach().double()).max())
    torch.testing.assert_close(loss.detach().double(), expected[0], rtol=exact, atol=exact * terms * 10)
    for mine, theirs, tensor in ((q.grad, expected[1], q), (p.grad, expected[2], p)):
        assert mine.dtype == tensor.dtype and mine.device == GPU
        floor = float(theirs.abs().max()) * (1e-14 if dtype == "float64" else 3e-7)
        torch.testing.assert_close(mine.double(), theirs, rtol=TOLERANCE[dtype],
                                   atol=max(floor, 6e-8 if dtype == "float16" else 0))


@pytest.mark.parametrize("forms", [("probs", "logits"), ("logits", "probs"), ("logits", "logits")], ids="-".join)
@pytest.mark.parametrize("reduction", ["none", "row", "rowmean"])
def test_gradcheck(connection, reduction, forms):
    def in_form(form, seed):
        z = torch.randn((3, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(GPU)
        return (z if form == "logits" else z.softmax(-1)).requires_grad_()

    mask = torch.tensor([True, False, True], device=GPU)
    weights = torch.tensor([0.5, 1.0, 2.0], device=GPU)

    def loss(q, p):
        return functional.kl_div(q, p, reduction=reduction, input_form=forms[0], target_form=forms[1],
                                 divergence="jeffreys", temperature=2.0, scale=1.5, row_mask=mask,
                                 row_weights=weights, connection=connection)

    assert torch.autograd.gradcheck(loss, (in_form(forms[0], 1), in_form(forms[1], 2)))


def test_strided_and_gathered(connection):
    q, p = data((64, 96))
    expected = float(reference(q, p, reduction="sum")[0])
    wide = torch.zeros(64, 200, device=GPU)
    wide[:, 50:146] = q.detach()
    turned = p.detach().t().contiguous().t()
    for first, second in ((wide[:, 50:146], p.detach()), (q.detach(), turned)):
        first = first.requires_grad_()
        loss = functional.kl_div(first, second, reduction="sum", connection=connection)
        loss.backward()
        assert float(loss) == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(first.grad, -p.detach())
        first.grad = None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (129, 1000)], ids=str)
def test_what_backward_begins_with(connection, dtype, shape):
    """Multiplied in place, on the device; vectors, and the elements that fill none."""
    q, p = data(shape, DTYPES[dtype])
    gradients = []
    for factor in (1.0, 3.0, -0.5):
        q.grad = None
        loss = functional.kl_div(q, p.detach(), reduction="sum", connection=connection)
        (loss if factor == 1 else factor * loss).backward()
        gradients.append(q.grad)
    torch.testing.assert_close(gradients[0], -p.detach())
    torch.testing.assert_close(gradients[1], 3 * gradients[0], rtol=TOLERANCE[dtype], atol=0)
    torch.testing.assert_close(gradients[2], -0.5 * gradients[0], rtol=TOLERANCE[dtype], atol=0)


def test_a_factor_of_another_dtype(connection):
    q, p = data((6, 11))
    loss = functional.kl_div(q, p.detach().double(), reduction="sum", connection=connection)
    (2 * loss).backward()
    assert loss.dtype == torch.float64 and q.grad.dtype == torch.float32
    torch.testing.assert_close(q.grad, -2 * p.detach())


def test_twice_through_a_graph(connection):
    q, p = data((6, 11))
    loss = functional.kl_div(q, p.detach(), reduction="batchmean", connection=connection)
    (3 * loss).backward(retain_graph=True)
    once = q.grad.clone()
    (3 * loss).backward()
    torch.testing.assert_close(q.grad, 2 * once)
    torch.testing.assert_close(once, -3 / 6 * p.detach())
    half = q.detach().half().requires_grad_()  # times a number beyond float16's
    narrow = functional.kl_div(half, p.detach(), scale=1e-6, reduction="sum", connection=connection)
    (2.0**17 * narrow).backward(retain_graph=True)
    torch.testing.assert_close(half.grad.float(), -p.detach() * 2.0**17 * 1e-6, rtol=0.1, atol=0.02)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(functional.kl_div(q, p, connection=connection), q, create_graph=True)


# ---- Calls like one before them

def is_repeated(loss):
    return type(loss.grad_fn).__name__ == "KlDivKnownBackward"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("wanted", [True, False], ids=["gradient", "loss"])
def test_a_call_like_one_before_it(connection, dtype, wanted):
    """The same as the first, of other numbers, wherever they lie."""
    held = []
    for seed in range(1, 6):
        q, p = data((33, 5000), DTYPES[dtype], seed=seed)
        if seed == 4:
            torch.cuda.empty_cache()
        expected = reference(q, p, reduction="batchmean")
        loss = functional.kl_div(q if wanted else q.detach(), p.detach(), reduction="batchmean", connection=connection)
        assert is_repeated(loss) == (wanted and seed > 1) and loss.device == GPU
        held.append((loss, expected[0]))
        if wanted:
            (3 * loss).backward(retain_graph=True)
            once = q.grad.clone()
            loss.backward()
            floor = 3e-7 * float(expected[1].abs().max())
            torch.testing.assert_close(once.double(), 3 * expected[1], rtol=TOLERANCE[dtype], atol=3 * floor)
            torch.testing.assert_close(q.grad.double(), 4 * expected[1], rtol=2 * TOLERANCE[dtype], atol=4 * floor)
            with pytest.raises(RuntimeError, match="a second time"):
                loss.backward()
    for loss, right in held:  # none was written over by a later one
        assert float(loss) == pytest.approx(float(right), rel=TOLERANCE["float32"] if dtype != "float64" else 1e-12)
    assert connection.copied_bytes == 0


def test_a_call_that_is_not_quite_like_one_before_it(connection):
    """Each takes the long way, and what is wrong is said as before."""
    q, p = data((64, 3000))
    right = float(reference(q, p, reduction="sum")[0])

    def ask(first, second, **more):
        return functional.kl_div(first, second, **{"reduction": "sum", "connection": connection, **more})

    for _ in range(2):
        loss = ask(q, p.detach())
    assert is_repeated(loss)
    assert not is_repeated(ask(q, p)) and not is_repeated(ask(q, p.detach(), reduction="mean"))
    turned = p.detach().t().contiguous().t()
    assert float(ask(q, turned)) == pytest.approx(right, rel=1e-5) and not is_repeated(ask(q, turned))
    with pytest.raises(ValueError, match="input is on cuda:0 and target on cpu"):
        ask(q, p.detach().cpu())
    with pytest.raises(ValueError, match="must be the same"):
        ask(q, p.detach()[:32])
    loss = ask(q, p.detach())
    assert is_repeated(loss) and float(loss) == pytest.approx(right, rel=1e-5)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(loss, q, create_graph=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        spin(20)
        late = (q.detach() + 0).requires_grad_()
        loss = ask(late, p.detach())
        loss.backward()
    torch.cuda.current_stream().wait_stream(stream)
    assert float(loss) == pytest.approx(right, rel=1e-5)
    torch.testing.assert_close(late.grad, -p.detach())
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(NotImplementedError, match="captured into a CUDA graph"), torch.cuda.graph(graph):
        ask(q, p.detach())
    assert float(ask(q, p.detach())) == pytest.approx(right, rel=1e-5)


# ---- What it costs

def test_nothing_is_copied_and_a_segment_is_registered_once(connection):
    devices = connection._devices()
    kept = [data((1000, 2000), seed=seed) for seed in range(3)]
    counts = []
    for _ in range(20):
        losses = [functional.kl_div(q, p.detach(), connection=connection) for q, p in kept]
        counts.append(devices.counts())
    assert connection.copied_bytes == 0
    assert counts[-1] == counts[3]  # those that new tensors went to are known by now
    segments = counts[-1]
    assert segments[1] <= torch.cuda.memory_reserved()
    assert (segments[0] > 0) == (not devices.is_local)
    assert len({float(loss) for loss in losses}) == 3


def test_no_host_waits(connection):
    """Behind 200 ms of other work: loss and gradient are asked for, and used, at once."""
    q, p = data((512, 1000))
    weights = torch.linspace(0.5, 1, 512, device=GPU)
    expected = reference(q, p, reduction="batchmean")
    step = nn.KLDivLoss(reduction="batchmean", connection=connection)
    (2 * step(q, p.detach())).backward()  # everything is loaded
    step(q, p.detach(), row_weights=weights)
    late = torch.empty_like(q).requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        spin()
        late.data.copy_(q.detach())  # comes later than the request is made
        loss = step(late, p.detach())
        (2 * loss).backward()
        gradient = late.grad.sum(-1)
        late.data.zero_()
        weighed = step(q, p.detach(), row_weights=weights)
        busy = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert busy
    assert float(loss) == pytest.approx(float(expected[0]), rel=1e-5)
    torch.testing.assert_close(gradient, 2 * expected[1].sum(-1).float())
    assert 0 < float(weighed) < float(loss)


def test_streams_have_their_order_each(connection):
    q, p = data((64, 3000))
    expected = float(reference(q, p, reduction="sum")[0])
    main, streams, found = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in range(6)], []
    torch.cuda.synchronize()
    for number, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            spin(20 * (number % 2))
            mine = (q.detach() + 0).requires_grad_()
            loss = functional.kl_div(mine, p.detach(), reduction="sum", connection=connection)
            loss.backward()
            found.append((loss, mine.grad + 0))
    for stream in streams:
        main.wait_stream(stream)
    for loss, gradient in found:
        assert float(loss) == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(gradient, -p.detach())


def test_memory_is_the_gradients(connection):
    """The gradient that the forward pass wrote is the one that backward() gives."""
    q, p = data((4096, 4096))
    size = q.numel() * 4
    for _ in range(2):
        functional.kl_div(q, p.detach(), connection=connection).backward()
        q.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    functional.kl_div(q, p.detach(), connection=connection).backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= size + (1 << 20)
    assert free - torch.cuda.mem_get_info()[0] <= size + (32 << 20)


# ---- Allocators

def test_memory_that_was_freed_and_is_another(connection):
    devices = connection._devices()
    for seed in range(4):
        q, p = data((2000, 3000), seed=seed)
        expected = float(reference(q, p, reduction="sum")[0])
        loss = functional.kl_div(q, p.detach(), reduction="sum", connection=connection)
        assert float(loss) == pytest.approx(expected, rel=1e-5)
        del q, p, loss
        torch.cuda.empty_cache()
    if devices.is_local:
        return
    q, p = data((2, 3))
    wait_until(lambda: functional.kl_div(q, p, connection=connection) is not None
               and devices.counts()[1] <= torch.cuda.memory_reserved(), what="freed memory let go of")


ALLOCATOR = """
import sys, torch, kld
from kld.functional import kl_div
torch.manual_seed(1)
with kld.connect(sys.argv[1]) as connection:
    for shape in ((64, 1000), (3000, 4000)):
        for _ in range(3):
            q = torch.randn(shape, device="cuda").log_softmax(-1).requires_grad_()
            p = torch.randn(shape, device="cuda").softmax(-1)
            right = torch.nn.functional.kl_div(q.detach().double(), p.double(), reduction="sum")
            for _ in range(2):
                loss, q.grad = kl_div(q, p, reduction="sum", connection=connection), None
                (2 * loss).backward()
                assert abs(float(loss) / float(right) - 1) < 1e-5, (float(loss), float(right))
                torch.testing.assert_close(q.grad, -2 * p)
            del q, p, loss
            torch.cuda.empty_cache()
        print(shape[0], connection.copied_bytes)
"""


@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators(connection, allocator):
    """What has no handle is copied on the device, over a socket; over local: never. What has several is not."""
    result = subprocess.run([sys.executable, "-W", "ignore::RuntimeWarning", "-c", ALLOCATOR, connection.url],
                            capture_output=True, text=True, timeout=200,
                            env=environment(PYTORCH_CUDA_ALLOC_CONF=allocator, PYTORCH_ALLOC_CONF=allocator))
    assert result.returncode == 0, result.stderr
    copied = dict(map(int, line.split()) for line in result.stdout.splitlines())
    if connection._devices().is_local or "expandable" in allocator:
        assert copied == {64: 0, 3000: 0}
    else:  # every tensor of every request
        assert copied[64] >= 6 * 3 * 4 * 64 * 1000 and copied[3000] >= 6 * 3 * 4 * 3000 * 4000


# ---- Arrays of other libraries

class Interface:
    """Nothing but __cuda_array_interface__."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.__cuda_array_interface__ = dict(tensor.__cuda_array_interface__,
                                             stream=torch.cuda.current_stream().cuda_stream or 1)


class Dlpack:
    """Nothing but DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, stream=None, **more):
        return self.tensor.__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("wrap", [Interface, Dlpack])
def test_interfaces(connection, wrap):
    q, p = (x.detach() for x in data((33, 70)))
    expected = reference(q, p, reduction="batchmean")
    weights = torch.rand(33, device=GPU)
    spin(50)
    given = wrap(q + 0), wrap(p + 0)
    result = connection.kl_div(*given, predictions_form="logprobs")
    assert result.loss == pytest.approx(float(expected[0]), rel=1e-5)
    for got in (torch.from_dlpack(result.grad_predictions), torch.as_tensor(result.grad_predictions, device=GPU),
                torch.as_tensor(result.grad_predictions.numpy()).to(GPU)):
        torch.testing.assert_close(got.double(), expected[1], rtol=1e-6, atol=0)
    kept = torch.from_dlpack(result.grad_predictions)
    del result
    torch.testing.assert_close(kept.double(), expected[1], rtol=1e-6, atol=0)
    rows = connection.kl_div(*given, predictions_form="logprobs", reduction="row", row_weights=wrap(weights),
                             row_mask=np.arange(33) % 2 == 0, grad=False)
    right = F.kl_div(q, p, reduction="none").sum(-1) * weights * (torch.arange(33, device=GPU) % 2 == 0)
    torch.testing.assert_close(torch.from_dlpack(rows.loss), right, rtol=1e-5, atol=1e-7)
    into = torch.empty_like(q)
    connection.kl_div(*given, predictions_form="logprobs", out={"grad_predictions": into})
    torch.testing.assert_close(into.double(), expected[1], rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match=r"out\['grad_predictions'\] is float64"):
        connection.kl_div(*given, predictions_form="logprobs", out={"grad_predictions": into.double()})
    with pytest.raises(TypeError, match="'<i8'|type 0 of 64 bits"):
        connection.kl_div(wrap(q.long()), given[1])


def test_bfloat16_by_dlpack(connection):
    needs("ml_dtypes")
    q, p = (x.detach() for x in data((33, 70), torch.bfloat16))
    result = connection.kl_div(q, p, predictions_form="logprobs")
    assert result.loss == pytest.approx(float(reference(q, p, reduction="batchmean")[0]), rel=1e-4)
    torch.testing.assert_close(torch.from_dlpack(result.grad_predictions), -p / 33, rtol=1e-2, atol=0)
    with pytest.raises(AttributeError, match="DLPack does"):
        result.grad_predictions.__cuda_array_interface__


def test_cupy(connection):
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(1)
    q, p = (rng.dirichlet(np.ones(200), 50).astype(np.float32) + np.float32(1e-6) for _ in range(2))
    right = connection.kl_div(q, p)
    with cupy.cuda.Stream():
        result = connection.kl_div(cupy.asarray(q), cupy.asarray(p))
    assert result.loss == pytest.approx(right.loss, rel=1e-6)
    np.testing.assert_allclose(cupy.asnumpy(cupy.asarray(result.grad_predictions)), right.grad_predictions, rtol=1e-6)


JAX = """
import sys, numpy as np, jax, jax.numpy as jnp, kld
q = jax.nn.softmax(jax.random.normal(jax.random.key(1), (50, 200)))
p = jax.nn.softmax(jax.random.normal(jax.random.key(2), (50, 200)))
with kld.connect(sys.argv[1]) as connection:
    result = connection.kl_div(q, p)
    right = float(jnp.sum(p * (jnp.log(p) - jnp.log(q))) / 50)
    assert abs(result.loss / right - 1) < 1e-5, (result.loss, right)
    gradient = jax.dlpack.from_dlpack(result.grad_predictions)
    np.testing.assert_allclose(np.asarray(gradient), np.asarray(-p / q / 50), rtol=1e-5)
"""


def test_jax(connection):
    pytest.importorskip("jax")
    result = subprocess.run([sys.executable, "-X", "faulthandler", "-c", JAX, connection.url], capture_output=True,
                            text=True, timeout=200,
                            env=environment(XLA_PYTHON_CLIENT_PREALLOCATE="false"))
    assert result.returncode == 0, result.stderr


# ---- PyTorch's surroundings

def test_autocast_and_gradscaler(connection):
    """kl_div is of the list that autocast computes in FP32: a float16 gradient is what GradScaler's factor makes of
    the float32 one, whatever backward() has to ask for."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(64, 5000).to(GPU)
    x, t = torch.randn(256, 64, device=GPU), torch.randn(256, 5000, device=GPU) * 3
    with torch.autocast("cuda", dtype=torch.float16):
        z = layer(x)
        assert z.dtype == torch.float16
        loss = functional.kl_div(z, t, reduction="batchmean", input_form="logits", target_form="logits",
                                 connection=connection)
        theirs = F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="batchmean")
    assert loss.dtype == theirs.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(theirs.detach()), rel=1e-4)
    scaler = torch.amp.GradScaler("cuda", init_scale=65536.0)
    factor = scaler.get_scale()
    weights = torch.linspace(1, 2, 256, device=GPU)
    for more in ({}, {"reduction": "mean"}, {"reduction": "row"}, {"scale": factor}, {"row_weights": weights}):
        exact = z.detach().double().requires_grad_()
        rows = F.kl_div(exact.log_softmax(-1), t.double().softmax(-1), reduction="none").sum(-1)
        (rows * more.get("row_weights", 1)).mean().backward()
        divisor = more.get("scale", 1.0) * (1 if more.get("reduction") != "mean" else 1 / 5000)
        leaf = z.detach().requires_grad_()
        loss = functional.kl_div(leaf, t, **{"reduction": "batchmean", **more}, input_form="logits",
                                 target_form="logits", connection=connection).mean()
        scaler.scale(loss / more.get("scale", 1.0)).backward()
        right = exact.grad * (factor * divisor / more.get("scale", 1.0))
        rounded = float((right.half().double() - right).abs().sum())  # much where it is below 6e-5, float16's least normal number
        assert float((leaf.grad.double() - right).abs().sum()) < 1.5 * rounded + 2e-4 * float(right.abs().sum()), more


# ---- What is refused

def test_errors(connection, server):
    q, p = data((4, 8))
    with pytest.raises(ValueError, match="input is on cuda:0 and target on cpu"):
        functional.kl_div(q, p.cpu(), connection=connection)
    with pytest.raises(ValueError, match="row_mask is on cpu and input on cuda:0"):
        functional.kl_div(q, p, row_mask=torch.ones(4, dtype=torch.bool), connection=connection)
    with pytest.raises(ValueError, match="unknown reduction"):
        functional.kl_div(q, p, reduction="average", connection=connection)
    with kld.connect("local:cpu") as other:
        with pytest.raises(NotImplementedError, match="computes on a CPU"):
            functional.kl_div(q, p, connection=other)
    with kld.connect(server.http) as other:
        with pytest.raises(NotImplementedError, match="not over http:"):
            functional.kl_div(q, p, connection=other)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(NotImplementedError, match="captured into a CUDA graph"):
        with torch.cuda.graph(graph):
            functional.kl_div(q, p, connection=connection)
    torch.cuda.synchronize()
    assert float(functional.kl_div(q, p, reduction="sum", connection=connection)) == pytest.approx(
        float(reference(q, p, reduction="sum")[0]), rel=1e-5)


def test_the_default_connection_is_on_the_tensors_device():
    q, p = data((4, 8))
    assert float(functional.kl_div(q, p, reduction="sum")) == pytest.approx(
        float(reference(q, p, reduction="sum")[0]), rel=1e-5)
    assert kld.default_connection(0).url == "local:cuda:0"


def test_a_worker_that_was_replaced_between_requests(make_server):
    server = make_server()
    q, p = data((64, 1000))
    with kld.connect(server.url_unix) as connection:
        first = functional.kl_div(q, p.detach(), connection=connection)
        torch.cuda.synchronize()
        server.kill_child("worker")
        second = functional.kl_div(q, p.detach(), connection=connection)
        second.backward()
        assert float(first) == float(second)
        torch.testing.assert_close(q.grad, -p.detach() / q.numel())


# ---- Teacher and students

STUDENT = """
import sys, torch, kld
from kld.functional import kl_div
with kld.connect(sys.argv[1]) as connection, connection.attach("test/cuda", timeout=20) as teacher:
    z = torch.zeros(teacher.shape, device="cuda", requires_grad=True)
    loss = kl_div(z, teacher, reduction="batchmean", input_form="logits", temperature=2.0)
    loss.backward()
    print(teacher.dtype, teacher.form, float(loss), float(z.grad.abs().sum()))
"""


@pytest.mark.parametrize("lost", [False, True], ids=["first", "successor"])
def test_a_first_job_of_its_kind_waits_for_nobody(make_server, lost):
    """The driver loads no kernel while the card has work that waits, for two seconds here: all are loaded at the start, or
    after a worker was lost, while nothing is asked for."""
    server = make_server()
    if lost:
        server.kill_child("worker")
        server.child("worker")
        time.sleep(3)
    with kld.connect(server.url_unix) as late, kld.connect(server.url_unix) as other:
        q, p = (tensor.detach() for tensor in data((64, 500)))
        for connection in (late, other):
            float(functional.kl_div(q, p, reduction="sum", connection=connection))
        torch.cuda.synchronize()
        spin(2000)
        loss = functional.kl_div(q, p, reduction="sum", connection=late)
        stream, took = torch.cuda.Stream(), []
        for more in ({}, {"divergence": "js"}, {"divergence": "tv", "target_form": "logits"}):
            with torch.cuda.stream(stream):
                start = time.monotonic()
                functional.kl_div(q, p, reduction="sum", connection=other, **more)
                stream.synchronize()
                took.append(time.monotonic() - start)
        assert not torch.cuda.current_stream().query()
        assert max(took) < 0.7, took
        assert float(loss) == pytest.approx(float(reference(q, p, reduction="sum")[0]), rel=1e-5)


def test_published_logits(server):
    logits = torch.randn(50, 300, device=GPU)
    z = torch.zeros_like(logits).requires_grad_()
    right = F.kl_div((z / 2).log_softmax(-1), (logits / 2).softmax(-1), reduction="batchmean")
    right.backward()
    with kld.connect(server.url_unix) as connection:
        with connection.publish("test/cuda", logits, "logits") as published:
            assert published.array is logits and connection.copied_bytes == 0
            result = subprocess.run([sys.executable, "-c", STUDENT, server.url_unix], capture_output=True,
                                    text=True, timeout=200, env=environment())
    assert result.returncode == 0, result.stderr
    found = re.fullmatch(r"float32 logits (\S+) (\S+)\n", result.stdout)
    assert float(found[1]) == pytest.approx(float(right), rel=1e-5)
    assert float(found[2]) == pytest.approx(float(z.grad.abs().sum()), rel=1e-5)
