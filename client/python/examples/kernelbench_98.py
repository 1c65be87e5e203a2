#!/usr/bin/env python3
"""KernelBench's level 1, problem 98 (forward KL of 16384 x 16384 probabilities, FP32), through kld: ModelNew takes
Model's place. Model, get_inputs() and get_init_inputs() are the task's own.

  kernelbench_98.py [ROWS]      compares both, values and gradients, also on inputs of structure

The environment's KLD_SERVER names a server, unix:PATH, that computes in its own process; without it kld computes
in this one, on PyTorch's current stream."""
import sys

import torch
import torch.nn as nn

import kld.nn


# ---- The task ----------------------------------------------------------------------------------------

class Model(nn.Module):
    """
    A model that computes Kullback-Leibler Divergence for comparing two distributions.
    """
    def __init__(self):
        super(Model, self).__init__()

    def forward(self, predictions, targets):
        return torch.nn.functional.kl_div(torch.log(predictions), targets, reduction='batchmean')


batch_size = 8192 * 2
input_shape = (8192 * 2,)
dim = 1


def get_inputs():
    scale = torch.rand(())
    return [(torch.rand(batch_size, *input_shape)*scale).softmax(dim=-1), torch.rand(batch_size, *input_shape).softmax(dim=-1)]


def get_init_inputs():
    return []


# ---- The answer --------------------------------------------------------------------------------------

class ModelNew(nn.Module):
    """No logarithm is stored: kld takes probabilities as they are."""

    def __init__(self, connection=None):
        super().__init__()
        self.distance = kld.nn.KLDivLoss(reduction="batchmean", input_form="probs", connection=connection)

    def forward(self, predictions, targets):
        return self.distance(predictions, targets)


# ---- Are they the same? ------------------------------------------------------------------------------

def structured(rows, classes, device):
    """(what, predictions, targets)"""
    one_hot = torch.zeros(rows, classes, device=device)
    one_hot[torch.arange(rows), torch.arange(rows) * 7 % classes] = 1
    even = torch.full((rows, classes), 1 / classes, device=device)
    noise = torch.rand(rows, classes, device=device)
    steps = torch.linspace(0.1, 30, rows, device=device).unsqueeze(-1)
    yield "one-hot targets", noise.softmax(-1), one_hot
    yield "peaked predictions", (noise * 30).softmax(-1), even
    yield "peaked targets", even, (noise * 30).softmax(-1)
    yield "rows that differ", (noise * steps).softmax(-1), (noise.flip(-1) * steps.flip(0)).softmax(-1)


def compare(mine, theirs, predictions, targets, tolerance=1e-4):
    """Raises where loss or gradient differ: the loss by KernelBench's measure; the gradient, whose elements are products
    and quotients of a few numbers, each by its own size. Absolutely by what is no normal FP32 number any more."""
    found = []
    for model in (mine, theirs):
        leaf = predictions.detach().requires_grad_()
        loss = model(leaf, targets)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(*(loss for loss, _ in found), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(*(gradient for _, gradient in found), rtol=tolerance,
                               atol=torch.finfo(torch.float32).tiny)
    return float(found[0][0])


def main():
    global batch_size, input_shape
    if len(sys.argv) > 1:
        batch_size, input_shape = int(sys.argv[1]), (int(sys.argv[1]),)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    mine, theirs = ModelNew(*get_init_inputs()).to(device), Model(*get_init_inputs()).to(device)
    inputs = [tensor.to(device) for tensor in get_inputs()]
    print(f"the task's inputs: loss {compare(mine, theirs, *inputs):.6g}")
    for what, *tensors in structured(batch_size, *input_shape, device):
        print(f"{what}: loss {compare(mine, theirs, *tensors):.6g}")


if __name__ == "__main__":
    main()
