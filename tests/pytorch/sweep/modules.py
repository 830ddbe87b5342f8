"""`module_db`: the modules of `torch.nn`, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

from tests.pytorch.sweep._sample import Program, Sample, copy_leaves
from tests.pytorch.sweep._verdict import SEED, Case, Entries, drawn

DTYPES = (torch.float64, torch.float32, torch.complex128)


def entries() -> Entries:
    """Yield the cases of each module, with at most `few` inputs of each dtype and mode."""
    return {info.name: lambda few, info=info: _cases(info, few) for info in module_db}


def _cases(info: ModuleInfo, few: int | None) -> Iterator[Case]:
    for dtype in DTYPES:
        if dtype not in info.dtypes:
            continue
        for training in (True, False):
            torch.manual_seed(SEED)
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=dtype, requires_grad=True, training=training
            )
            again = training and info.supports_gradgrad  # for the first input only
            for index, given in drawn(inputs, few, info.name, dtype, training):
                mode = "training" if training else "evaluation"
                name = f"{dtype} {mode} input {index}".removeprefix("torch.")
                build = _built(info, given, dtype, training)
                yield Sample(info.name, name, build)
                if again:
                    yield Sample(info.name, f"{name} twice", build, twice=True)
                    again = False


def _built(
    info: ModuleInfo, given: ModuleInput, dtype: torch.dtype, training: bool
) -> Callable[[], Program]:
    def build() -> Program:
        made = given.constructor_input
        module = info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return module(*args, **kwargs)

        return Program(
            call, copy_leaves((given.forward_input.args, given.forward_input.kwargs)), module
        )

    return build
