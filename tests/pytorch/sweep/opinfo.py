"""`op_db`: some 700 operators and their sample inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests.pytorch.sweep._sample import Program, Sample, copy_leaves
from tests.pytorch.sweep._verdict import SEED, Case, Entries, drawn

DTYPES = (torch.float64, torch.float32, torch.complex128, torch.complex64)
OTHERS = (torch.int64, torch.bool)  #: other dtypes, for operators that support none of these


def entries() -> Entries:
    """Yield the cases of each operator, with at most `few` samples of each dtype."""
    return {_name(op): lambda few, op=op: _cases(op, few) for op in op_db}


def _name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def dtypes_of(op: OpInfo) -> list[torch.dtype]:
    supported = op.supported_dtypes("cpu")
    found = [dtype for dtype in DTYPES if dtype in supported]
    return found or [dtype for dtype in OTHERS if dtype in supported] or list(supported)


def _cases(op: OpInfo, few: int | None) -> Iterator[Case]:
    for dtype in dtypes_of(op):
        differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        torch.manual_seed(SEED)
        samples = op.sample_inputs("cpu", dtype, requires_grad=differentiable)
        again = differentiable and op.supports_gradgrad  # for the first sample only
        for index, sample in drawn(samples, few, _name(op), dtype):
            name = f"{dtype} sample {index}".removeprefix("torch.")
            yield Sample(_name(op), name, _built(op.op, sample))
            if again:
                yield Sample(_name(op), f"{name} twice", _built(op.op, sample), twice=True)
                again = False
            if op.inplace_variant is not None and not sample.broadcasts_input:
                yield Sample(_name(op), f"{name} in place", _built(op.inplace_variant, sample))


def _built(function: Callable[..., Any], sample: SampleInput) -> Callable[[], Program]:
    def call(argument: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return sample.output_process_fn_grad(function(argument, *args, **kwargs))

    return lambda: Program(call, copy_leaves((sample.input, sample.args, sample.kwargs)))
