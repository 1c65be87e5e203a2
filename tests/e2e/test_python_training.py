"""kld inside PyTorch's surroundings, on the CPU: torch.compile, DistributedDataParallel, half precision with a
scale, checkpoints. (test_python_cuda.py has them on a GPU.)"""
import subprocess
import sys

import pytest

from pythonlib import environment, import_kld, import_torch

kld = import_kld()
torch = import_torch()
from kld import _compiled, functional, nn  # noqa: E402

F = torch.nn.functional
compiles = pytest.mark.skipif(not _compiled.IS_SUPPORTED, reason="torch.compile: PyTorch 2.4 or newer")


@pytest.fixture(scope="module")
def connection(server):
    with kld.connect(server.url_unix) as made:
        yield made


DATA_PARALLEL = """
import os, sys, torch, torch.distributed as dist
import kld.nn
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3])
rank = int(sys.argv[2])
dist.init_process_group("gloo", rank=rank, world_size=2)
torch.manual_seed(3)
model = torch.nn.Linear(8, 20)
x, targets = torch.randn(12, 8), torch.randn(12, 20)
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


def test_distributed_data_parallel(server):
    port = free_port()
    ranks = [subprocess.Popen([sys.executable, "-c", DATA_PARALLEL, server.url_unix, str(rank), port],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=environment(OMP_NUM_THREADS="1")) for rank in range(2)]
    said = [one.communicate(timeout=120) for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], said
    assert said[0][0] == "the gradients of both halves are those of all\n"


def test_a_scale_saves_half_precision(connection):
    """The README's advice: gradients that float16 rounds away come through."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(64, 5000, generator=generator).half()
    t = torch.randn(64, 5000, generator=generator) * 3
    exact = z.double().requires_grad_()
    F.kl_div(exact.log_softmax(-1), t.double().softmax(-1), reduction="batchmean").backward()
    lost, factor = {}, 65536.0
    for name, scale in (("plain", 1.0), ("as advised", factor)):
        leaf = z.clone().requires_grad_()
        loss = functional.kl_div(leaf, t, reduction="batchmean", input_form="logits", target_form="logits",
                                 scale=scale, connection=connection) / scale
        (loss * factor).backward()  # scaler.scale(loss).backward()
        lost[name] = float((leaf.grad.double() / factor - exact.grad).abs().sum() / exact.grad.abs().sum())
    assert lost["as advised"] < 1e-3 and lost["plain"] > 5 * lost["as advised"], lost


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


# ---- torch.compile

@compiles
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
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        q = (z if forms[0] == "logits" else z.log_softmax(-1)).clone().requires_grad_()
        p = (t if forms[1] == "logits" else t.softmax(-1)).clone().requires_grad_()
        loss = function(q, p, torch.arange(9) % 3 > 0, torch.linspace(0.5, 2, 9))
        loss.backward()
        found.append((loss.detach(), q.grad, p.grad))
    torch.testing.assert_close(found[0], found[1])


@compiles
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
    with pytest.raises(Exception, match="must be the same"):
        step(x, t[1:])
    default = torch.compile(lambda q, p: functional.kl_div(q, p, reduction="sum"), fullgraph=True,
                            backend="aot_eager")
    q = torch.randn(3, 4).log_softmax(-1)
    torch.testing.assert_close(default(q, t[:3, :4]), F.kl_div(q, t[:3, :4], reduction="sum"))


@compiles
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_a_number_that_changes_at_each_step_is_one_graph(connection, reduction):
    """More steps than Dynamo makes graphs."""
    def step(z, t, scale, normalizer):
        more = {"normalizer": normalizer} if reduction == "mean" else {}
        return functional.kl_div(z, t, reduction=reduction, input_form="logits", scale=scale, connection=connection,
                                 **more).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    t = torch.randn(4, 6).softmax(-1)
    for index in range(12):
        found = []
        for function in (step, compiled):
            z = torch.linspace(-1, 1, 24).reshape(4, 6).requires_grad_()
            loss = function(z, t, 65536.0 / 2**index, 1000.5 + index)
            loss.backward()
            found.append((loss.detach(), z.grad))
        torch.testing.assert_close(found[0], found[1])


@compiles
def test_the_operators_are_as_pytorch_wants_them(connection):
    z, t = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    texts, numbers = ["forward_kl", "batchmean", "logits", "logits"], [2.0] + [float("nan")] * 6
    torch.library.opcheck(_compiled._loss_op, (z, t, None, torch.ones(5, dtype=torch.bool), None,
                                               torch.tensor(3.0, dtype=torch.float64), texts, numbers,
                                               [True, True], connection.number, -1.0))
    torch.library.opcheck(_compiled._late_op, (z.detach(), t.detach(), torch.ones(()), None, None, None, None, texts, numbers,
                                               [True, False], connection.number, 60.0))
