"""Backward operators whose result may take over the memory of the gradient that they read.

Autograd's formula of each node calls one of them at last: with the gradient that the node was
given, and with the one tensor that the node saved. Where nothing else refers to the gradient it
dies with the node, and the operator's twin, which writes to a tensor that it is given, writes
there. It is the same kernel, which allows its output to be an input (`assert_no_partial_overlap`):
a pointwise one reads an element before it writes it, and a softmax's sums up a row before it writes
any of it. So the bits are the same, and no memory is taken for the result. Complex gradients stay:
quotients of those differ.

Operators whose twin PyTorch generates (`native_dropout_backward.out`, `hardswish_backward.out`) are
not among them: such a twin makes a new result, and copies it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor


class InPlace(NamedTuple):
    """One overload of an operator whose result may take over its first argument."""

    name: str
    overload: str
    #: The overload that writes to a tensor which it is given, its last argument.
    twin: str
    #: Nodes of autograd whose formula for their one input is this operator.
    nodes: tuple[str, ...]


def _pointwise(name: str, *nodes: str) -> InPlace:
    return InPlace(f"aten::{name}_backward", "", "grad_input", nodes)


IN_PLACE: Final = (
    InPlace(
        "aten::_softmax_backward_data", "", "out", ("SoftmaxBackward0", "SafeSoftmaxBackward0")
    ),
    InPlace("aten::_log_softmax_backward_data", "", "out", ("LogSoftmaxBackward0",)),
    _pointwise("elu", "EluBackward0", "CeluBackward0"),
    _pointwise("gelu", "GeluBackward0"),
    _pointwise("hardshrink", "HardshrinkBackward0"),
    _pointwise("hardsigmoid", "HardsigmoidBackward0"),
    _pointwise("hardtanh", "HardtanhBackward0"),
    _pointwise("leaky_relu", "LeakyReluBackward0"),
    _pointwise("logit", "LogitBackward0"),
    _pointwise("sigmoid", "SigmoidBackward0"),
    _pointwise("silu", "SiluBackward0"),
    _pointwise("softplus", "SoftplusBackward0"),
    _pointwise("softshrink", "SoftshrinkBackward0"),
    _pointwise("tanh", "TanhBackward0"),
    _pointwise("threshold", "ReluBackward0", "ThresholdBackward0"),
    # By a number, or by what dropout on a CPU keeps: the only input that has a gradient.
    InPlace("aten::mul", "Tensor", "out", ("MulBackward0",)),
    InPlace("aten::div", "Tensor", "out", ("DivBackward0",)),
)

_ENTRIES: Final = {(entry.name, entry.overload): entry for entry in IN_PLACE}


def may_take_over(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Return True if a call that autograd makes may write its result over its first argument.

    Only if that dies with the node, which a trace tells. Twin of `may_take_over` in
    native/dispatch/in_place.cpp, but for who else may read the gradient.

    Args:
        func: An overload.
        args: Its arguments by position.
        result: What it returned.
    """
    entry = _ENTRIES.get((func._schema.name, func._schema.overload_name))
    node: Any = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    if entry is None or node is None or torch.is_grad_enabled() or node.name() not in entry.nodes:
        return False
    gradient = args[0]
    leads_on = [edge is not None for edge, _ in node.next_functions]
    return (
        leads_on.index(True) == 0
        and leads_on.count(True) == 1
        and gradient.is_floating_point()
        and gradient.is_contiguous()
        and gradient.dtype == result.dtype
        and gradient.nbytes == gradient.untyped_storage().nbytes()
        and all(_lies_beside(each, gradient) for each in args[1:] if isinstance(each, Tensor))
    )


def _lies_beside(tensor: Tensor, gradient: Tensor) -> bool:
    same = tensor.size() == gradient.size() and tensor.stride() == gradient.stride()
    number = tensor.dim() == 0 and not tensor.is_complex()
    return number or (same and tensor.dtype == gradient.dtype)
