"""Whether a call of kl_div() is an ordinary one, of tensors with memory that is read when it is made, or one that
other parts of PyTorch come between: traced, transformed, of tensors that stand for others. No lock.
"""
from __future__ import annotations

from typing import Any, Callable

import torch
from torch.autograd import forward_ad

from ._errors import KldUnsupportedError, Status

HAS_OPERATORS = hasattr(torch, "library") and hasattr(torch.library, "custom_op")
PLAIN = (torch.Tensor, torch.nn.Parameter)  # asked first
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


def _asked(name: str, otherwise: Callable[[], Any]) -> Callable[[], Any]:
    found: Callable[[], Any] = getattr(torch._C, name, otherwise)
    return found


modes = _asked("_len_torch_dispatch_stack", lambda: 0)
transforms = _asked("_are_functorch_transforms_active", lambda: False)
trace = _asked("_get_tracing_state", lambda: None)


TRANSFORMED = ("kl_div() of kld is inside a transform of torch.func (vmap, grad, jvp, ...), which cannot look into it; "
               "expected a call outside of it. For vmap: one call with all leading dimensions and reduction=\"row\"; "
               "for grad: torch.autograd.grad()")


def is_special(tensor: Any) -> bool:
    """A tensor whose class has a say in each operator: FakeTensor, DTensor."""
    return getattr(type(tensor), "__torch_dispatch__", _PLAIN_DISPATCH) is not _PLAIN_DISPATCH


def are_transformed() -> bool:
    """Dynamo, which traces transforms inside of them, asks this then."""
    return bool(transforms())


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, left to the interpreter where Dynamo traces: a graph ends there."""
    def left(*arguments: Any, **more: Any) -> Any:
        return torch.compiler.disable(function)(*arguments, **more)

    why = "kl_div() of kld with what is no tensor (an attached one, say) ends a graph; or: " + TRANSFORMED
    _mark(left, _torchdynamo_disable=True, _torchdynamo_disable_msg=why)
    left.__qualname__ = why  # all that PyTorch 2.4 says of a function where a graph may not end
    return left


def name_of(kind: type) -> str:
    """(PyTorch 2.4 cannot trace type(value).__name__ into a text.)"""
    return kind.__name__


def _mark(function: Callable[..., Any], **more: Any) -> None:
    """As torch.compiler's disable() and assume_constant_result() mark it, which take seconds to import."""
    for name, value in more.items():
        setattr(function, name, value)


for _constant in (are_transformed, name_of):
    _mark(_constant, _dynamo_marked_constant=True)


def are_ordinary(input: Any, target: Any) -> bool:
    """False: for an operator that PyTorch dispatches (_compiled.py). Where that would not do, it is refused."""
    if transforms():
        raise KldUnsupportedError(Status.UNIMPLEMENTED, TRANSFORMED)
    if trace() is not None:
        raise KldUnsupportedError(Status.UNIMPLEMENTED, "kl_div() of kld is inside torch.jit.trace(), which would keep "
                                  "its result as a constant; expected a call outside of it, or torch.compile()")
    if forward_ad._current_level >= 0:
        _refuse_tangents(input, target)
    if not modes() and (type(input) in PLAIN or not is_special(input)) and (type(target) in PLAIN
                                                                              or not is_special(target)):
        return True
    if HAS_OPERATORS and isinstance(input, torch.Tensor) and isinstance(target, torch.Tensor):
        return False
    refuse_special(input, target)
    if not HAS_OPERATORS:
        raise KldUnsupportedError(Status.UNIMPLEMENTED, "kl_div() of kld is inside a dispatch mode (make_fx(), "
                                  "FakeTensorMode), which would not see it; expected a call outside of it, or PyTorch "
                                  "2.4 or newer")
    return True


def _refuse_tangents(*tensors: Any) -> None:
    """(They would be lost.)"""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise KldUnsupportedError(Status.UNIMPLEMENTED, "kl_div() of kld has no forward-mode derivative, and a "
                                      "tensor has a tangent; expected backward() or torch.autograd.grad()")


def refuse_special(*tensors: Any) -> None:
    for tensor in tensors:
        if is_special(tensor):
            raise KldUnsupportedError(Status.UNIMPLEMENTED, f"a tensor is a {type(tensor).__name__}, whose memory kld "
                                      "cannot read; expected a plain one")


__all__ = ["HAS_OPERATORS", "PLAIN", "TRANSFORMED", "are_ordinary", "are_transformed", "is_special", "name_of",
           "refuse_special"]
