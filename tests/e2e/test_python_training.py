"""kld inside PyTorch's surroundings, on the CPU: DistributedDataParallel (on two cards as well), half precision with a scale, checkpoints;
what PyTorch puts between a call and its tensors goes on as it should, or is refused. (torch.compile:
test_python_compiled.py; on a GPU: test_python_cuda.py.)"""
import importlib
import subprocess
import sys
import warnings

import numpy as np
import pytest

from pythonlib import environment, import_kld, import_torch

kld = import_kld()
torch = import_torch()
from kld import _surroundings, functional  # noqa: E402

F = torch.nn.functional
has_operators = pytest.mark.skipif(not _surroundings.HAS_OPERATORS, reason="custom operators: PyTorch 2.4 or newer")


@pytest.fixture(scope="module")
def connection(server):
    with kld.connect(server.url_unix) as made:
        yield made


DATA_PARALLEL = """
import os, sys, torch, torch.distributed as dist
import kld.nn
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3])
rank = int(sys.argv[2])
device = torch.device("cpu") if sys.argv[4] == "cpu" else torch.device("cuda", rank)
dist.init_process_group("gloo" if device.type == "cpu" else "nccl", rank=rank, world_size=2)
torch.manual_seed(3)
model = torch.nn.Linear(8, 20).to(device)
x, targets = torch.randn(12, 8).to(device), torch.randn(12, 20).to(device)
if rank == 0:
    logits = model(x)
    torch.nn.functional.kl_div(logits.log_softmax(-1), targets.softmax(-1), reduction="batchmean").backward()
    right = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
parallel = torch.nn.parallel.DistributedDataParallel(model)
with kld.connect(sys.argv[1]) as connection:
    distance = kld.nn.KLDivLoss(reduction="batchmean", input_form="logits", target_form="logits",
                                connection=connection)
    for _ in range(3):
        model.zero_grad()
        distance(parallel(x[rank::2]), targets[rank::2]).backward()
    assert device.type == "cpu" or connection.copied_bytes == 0
if rank == 0:
    for mine, theirs in zip(model.parameters(), right):
        torch.testing.assert_close(mine.grad, theirs, rtol=1e-4, atol=1e-6)
    print("the gradients of both halves are those of all")
dist.destroy_process_group()
"""


def free_port():
    import socket
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@pytest.mark.parametrize("where", ["cpu", "two cards"])
def test_distributed_data_parallel(make_server, backend, where):
    """Each rank's tensors go to the device that they lie on."""
    if where != "cpu" and (backend != "cuda" or torch.cuda.device_count() < 2):
        pytest.skip("needs two GPUs and a torch with CUDA")
    server = make_server(http="", **({} if where == "cpu" else {"device": "all"}))
    port = free_port()
    ranks = [subprocess.Popen([sys.executable, "-c", DATA_PARALLEL, server.url_unix, str(rank), port, where],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=environment(OMP_NUM_THREADS="1", NCCL_NVLS_ENABLE="0")) for rank in range(2)]
    said = [one.communicate(timeout=120) for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], said
    assert said[0][0] == "the gradients of both halves are those of all\n"


THREADS = """
import os, torch, kld
from kld import _default, functional
z, t = torch.randn(64, 30000, generator=torch.Generator().manual_seed(1)), torch.ones(64, 30000) / 30000
found, counts = [], []
for threads in (1, 3, 1, 2, 4, 5, 6):
    torch.set_num_threads(threads)
    torch.ones(100000).exp()  # PyTorch's own threads are there
    assert torch.get_num_threads() == threads
    before = set(os.listdir("/proc/self/task"))  # of which those of PyTorch's that were too many may be ending
    leaf = z.clone().requires_grad_()
    connection = _default.for_cpu_tensors(threads)
    counts.append(len(set(os.listdir("/proc/self/task")) - before))
    loss = functional.kl_div(leaf, t, reduction="sum", input_form="logits")
    loss.backward()
    found.append((loss.detach(), leaf.grad))
    assert connection.stats()["requests_total"] >= 1 and connection.url == "local:cpu"
    del connection
assert counts[:4] == [1, 3, 0, 2], counts
assert all(torch.equal(loss, found[0][0]) and torch.equal(gradient, found[0][1]) for loss, gradient in found)
assert len(_default._made) == _default.COUNTS_MAX
assert kld.default_connection().url == "local:"
print("as many")
"""


def test_as_many_threads_as_pytorch():
    """By default CPU tensors are computed with on the CPU, whatever else is there; the bits are those of any number."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=100,
                          env=environment())
    assert done.stdout == "as many\n", done.stderr


def test_half_precision_learns_with_gradscalers_factor(connection):
    """As with PyTorch, and as well with the factor in `scale`, which was the only way before."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(64, 5000, generator=generator).half()
    t = torch.randn(64, 5000, generator=generator) * 3
    exact = z.double().requires_grad_()
    F.kl_div(exact.log_softmax(-1), t.double().softmax(-1), reduction="batchmean").backward()
    factor = 65536.0
    for scale in (1.0, factor):
        leaf = z.clone().requires_grad_()
        loss = functional.kl_div(leaf, t, reduction="batchmean", input_form="logits", target_form="logits",
                                 scale=scale, connection=connection) / scale
        (loss * factor).backward()  # scaler.scale(loss).backward()
        assert float((leaf.grad.double() / factor - exact.grad).abs().sum() / exact.grad.abs().sum()) < 3e-4


def test_checkpointed(connection):
    """The forward pass runs twice."""
    from torch.utils.checkpoint import checkpoint
    layer, x = torch.nn.Linear(8, 20), torch.randn(6, 8, requires_grad=True)
    targets = torch.randn(6, 20).softmax(-1)

    def loss(x):
        return functional.kl_div(layer(x), targets, reduction="batchmean", input_form="logits",
                                 connection=connection)

    loss(x).backward()
    once, x.grad = x.grad, None
    checkpoint(loss, x).backward()
    torch.testing.assert_close(x.grad, once)


# ---- What PyTorch puts in between

def step(z, t):
    return functional.kl_div(z, t, reduction="sum", input_form="logits")


def numbers(*shape):
    return torch.randn(*shape), torch.randn(*shape).softmax(-1)


def transforms():
    if hasattr(torch, "func"):
        return torch.func
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("functorch")


@pytest.mark.parametrize("name", ["vmap", "grad", "vjp", "jvp", "jacrev"])
def test_transforms_are_refused(name):
    z, t = numbers(4, 6)
    transform = getattr(transforms(), name)
    with pytest.raises(kld.KldUnsupportedError, match="inside a transform of torch.func.*expected a call outside"):
        {"vjp": lambda: transform(step, z, t), "jvp": lambda: transform(step, (z, t), (z, t))}.get(
            name, lambda: transform(step)(z, t))()
    assert step(z, t) > 0


def test_forward_mode_is_refused():
    z, t = numbers(4, 6)
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        assert step(z, t) > 0
        with pytest.raises(kld.KldUnsupportedError, match="no forward-mode derivative"):
            step(forward.make_dual(z, z), t)


def test_jit_trace_is_refused():
    """It would keep the loss of the example as a constant."""
    for z in (torch.randn(4, 6), torch.randn(4, 6, requires_grad=True)):
        with pytest.raises(kld.KldUnsupportedError, match="inside torch.jit.trace"):
            torch.jit.trace(step, (z, torch.randn(4, 6).softmax(-1)))


def test_tensors_without_memory_of_their_own(connection):
    from torch._subclasses.fake_tensor import FakeTensorMode
    z, t = numbers(4, 6)
    mode = FakeTensorMode()
    fake, fake_t = mode.from_tensor(z.clone().requires_grad_()), mode.from_tensor(t)
    if _surroundings.HAS_OPERATORS:  # they say what would come out
        loss = step(fake, fake_t)
        loss.backward()
        assert type(loss) is type(fake) and loss.shape == () and fake.grad.shape == (4, 6)
    else:
        with pytest.raises(kld.KldUnsupportedError, match="a tensor is a FakeTensor, whose memory"):
            step(fake, fake_t)
    with pytest.raises(kld.KldUnsupportedError, match="a tensor is a FakeTensor, whose memory"):
        functional.kl_div(z, t, row_weights=mode.from_tensor(torch.ones(4)))
    with pytest.raises(kld.KldUnsupportedError, match="input is a torch.strided tensor on meta; kld takes"):
        step(z.to("meta"), t.to("meta"))
    nested = torch.nested.nested_tensor if hasattr(torch, "nested") else torch.nested_tensor
    with pytest.raises(kld.KldUnsupportedError, match="input is a nested tensor"):
        step(nested([z, z]), nested([t, t]))


def test_tensors_in_the_place_of_arrays(connection):
    """Of connection.kl_div(), which dispatches nothing: those without numbers of their own are refused."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    z, t = (tensor.softmax(-1) for tensor in numbers(4, 6))
    fake = FakeTensorMode().from_tensor(t)
    for predictions, targets, more, text in (
            (z.to("meta"), t, {}, "predictions is a torch.strided tensor on meta"),
            (z.to_sparse(), t, {}, "predictions is a torch.sparse_coo tensor"),
            (z, fake, {}, "a tensor is a FakeTensor"),
            (z, t, {"row_weights": FakeTensorMode().from_tensor(torch.ones(4))}, "a tensor is a FakeTensor")):
        with pytest.raises(kld.KldUnsupportedError, match=text):
            connection.kl_div(predictions, targets, **more)
    with pytest.raises(kld.KldUnsupportedError, match="inside a transform"):
        transforms().vmap(lambda one: connection.kl_div(one, one))(z)
    turned = torch.complex(torch.zeros(4, 6), -t).conj().imag
    assert connection.kl_div(z, turned).loss == connection.kl_div(z, t).loss


def test_make_fx_sees_an_operator():
    """And not the loss of the example as a constant."""
    if _surroundings.HAS_OPERATORS:
        from torch.fx.experimental.proxy_tensor import make_fx
        z, t = numbers(4, 6)
        traced = make_fx(step)(*numbers(4, 6))
        assert torch.equal(traced(z, t), step(z, t))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from functorch import make_fx
    with pytest.raises(kld.KldUnsupportedError, match="inside a dispatch mode"):
        make_fx(step)(*numbers(4, 6))


@has_operators
def test_dispatch_modes_see_an_operator():
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), more=None):
            seen.append(str(function))
            return function(*arguments, **(more or {}))

    z, t = numbers(4, 6)
    z.requires_grad_()
    with Watch():
        step(z, t).backward()
    right, z.grad = z.grad, None
    step(z, t).backward()
    assert "kld.loss.default" in seen
    torch.testing.assert_close(right, z.grad)


class _MetaDevice(torch.overrides.TorchFunctionMode):
    """What torch.device("meta") is as a context, which it is since PyTorch 2.0."""

    def __torch_function__(self, function, types, arguments=(), more=None):
        more = dict(more or {})
        if function in (torch.as_tensor, torch.tensor, torch.empty, torch.full, torch.ones, torch.zeros):
            more.setdefault("device", "meta")
        return function(*arguments, **more)


def default_device_meta():
    return torch.device("meta") if hasattr(torch, "set_default_device") else _MetaDevice()


def test_a_default_device_is_not_that_of_the_loss():
    zeros, ones = torch.zeros(4, 6), torch.ones(4, 6) / 6
    with default_device_meta():
        assert torch.empty(1).device.type == "meta"
        loss = step(zeros, ones)
    assert loss.device.type == "cpu" and float(loss) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", [list, np.array])
def test_a_default_device_is_not_that_of_masks_and_weights(connection, kind):
    """Those that are no tensors belong where the input is."""
    z, t = numbers(4, 6)
    more = {"row_mask": kind([True, False, True, True]), "row_weights": kind([1.0, 2.0, 0.5, 1.0]), "connection": connection}
    right = functional.kl_div(z, t, reduction="row", input_form="logits", **more)
    with default_device_meta():
        found = functional.kl_div(z, t, reduction="row", input_form="logits", **more)
    assert torch.equal(found, right) and right[1] == 0


def test_views_that_negate(connection):
    """The imaginary part of a conj() has its sign elsewhere than in its memory."""
    z, t = numbers(4, 6)
    turned = torch.complex(torch.zeros(4, 6), -t).conj().imag
    assert turned.is_neg() and step(z, turned) == step(z, t)
    more = {"reduction": "sum", "input_form": "logits", "connection": connection}
    weights = torch.complex(torch.zeros(1), torch.tensor([-2.0])).conj().imag  # of one row: contiguous
    assert weights.is_neg() and weights.is_contiguous()
    assert functional.kl_div(z[:1], t[:1], row_weights=weights, **more) == functional.kl_div(
        z[:1], t[:1], row_weights=[2.0], **more)
    with pytest.raises(TypeError, match="row_weights has dtype torch.complex64; it holds real numbers"):
        functional.kl_div(z, t, row_weights=torch.ones(4, dtype=torch.complex64), **more)
    one = torch.randn(1, 1, requires_grad=True)  # asks again in the backward pass, with what that brings
    late = functional.kl_div(one, torch.full((1, 1), 0.7), **{**more, "reduction": "none", "divergence": "tv"})
    weigh = torch.complex(torch.zeros(1, 1), torch.ones(1, 1)).conj().imag
    for found in (torch.autograd.grad(late, one, weigh, retain_graph=True),):
        assert torch.equal(found[0], torch.autograd.grad(late, one, torch.full((1, 1), -1.0))[0])
    leaf = z.clone().requires_grad_()
    step(torch.complex(torch.zeros(4, 6), -leaf).conj().imag, t).backward()
    other = z.clone().requires_grad_()
    step(other, t).backward()
    assert torch.equal(leaf.grad, other.grad)


@pytest.mark.parametrize("name", ["predictions", "targets", "row_weights", "row_mask", "grad_output"])
def test_complex_numbers_are_refused_as_conjugates_too(connection, name):
    """Whose memory holds others: PyTorch itself makes no array of it."""
    given = {"predictions": torch.ones(4, 6), "targets": torch.ones(4, 6), "reduction": "row"}
    turned = torch.ones((4, 6) if name in given else 4, dtype=torch.complex64).conj()
    assert turned.is_conj()
    with pytest.raises(kld.KldTypeError, match=f"{name} has dtype complex64"):
        connection.kl_div(**{**given, name: turned})


def test_batched_gradients(connection):
    z, t = numbers(3, 5)
    z.requires_grad_()
    for reduction in ("sum", "row"):
        loss = functional.kl_div(z, t, reduction=reduction, input_form="logits", connection=connection)
        weigh = torch.randn(7, *loss.shape)
        found = torch.autograd.grad(loss, z, weigh, retain_graph=True, is_grads_batched=True)[0]
        right = torch.stack([torch.autograd.grad(loss, z, one, retain_graph=True)[0] for one in weigh])
        torch.testing.assert_close(found, right)
    loss = functional.kl_div(z, t, reduction="none", input_form="logits", connection=connection)
    with pytest.raises(kld.KldUnsupportedError, match="expected one at a time"):
        torch.autograd.grad(loss, z, torch.ones(2, 3, 5), is_grads_batched=True)
