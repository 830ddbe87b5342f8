"""Make synthetic traces for tests, benchmarks and documentation."""

from __future__ import annotations

from rekindle._types import ValueId
from rekindle.trace._builder import TraceBuilder
from rekindle.trace._model import Trace


def chain(length: int, *, nbytes: int = 1, cost: int = 1, early: bool = False) -> Trace:
    """Make the trace of a linear network, forward and backward, with equal sizes and costs.

    The backward step of layer i reads the input of layer i and the gradient of its output, as in
    DTR (Kirisame et al., ICLR 2021), appendix A. The gradient of the loss has no inputs.

    Args:
        length: The number of layers.
        nbytes: The bytes of each value.
        cost: The cost (ns) of each operator.
        early: Release the output of a layer before the layer's backward step, which does not read
            the output. The code of the paper's authors does so. Default: release the output after
            that step.
    """
    builder = TraceBuilder(f"chain-{length}")
    forward: list[ValueId] = []
    for layer in range(length):
        inputs = forward[-1:]
        forward += builder.call(f"forward{layer}", cost, inputs, [nbytes])
    builder.release(forward[-1])
    (gradient,) = builder.call(f"backward{length - 1}", cost, (), [nbytes], is_backward=True)
    for layer in reversed(range(length - 1)):
        if early:
            builder.release(forward[layer])
        inputs = [forward[layer - 1], gradient] if layer else [gradient]
        (new,) = builder.call(f"backward{layer}", cost, inputs, [nbytes], is_backward=True)
        if not early:
            builder.release(forward[layer])
        builder.release(gradient)
        gradient = new
    return builder.build()
