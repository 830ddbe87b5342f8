"""Pin the results that a selective checkpoint of the program must save.

If a checkpoint policy answers MUST_SAVE for an operator, the operator must run only once. But to
Rekindle, the checkpoint's reference to the result looks like a variable of the program. Without
this file, the result could be evicted, and the operator would run again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from rekindle.pytorch.online._handed_out import replace
from rekindle.pytorch.operators import is_plain, tensors_in


@contextmanager
def must_saves_seen(keep: Callable[[Tensor], object]) -> Iterator[None]:
    """Inside the block, call `keep` with each result that a selective checkpoint must save."""
    # PyTorch's dispatch mode for selective checkpoints has no public name.
    mode: Any = getattr(checkpoint, "_CachingTorchDispatchMode", None)
    with ExitStack() as stack:
        if mode is not None:
            replace(stack, mode, "__torch_dispatch__", functools.partial(_keeping, keep))
        yield


def _keeping(keep: Callable[[Tensor], object], dispatch: Any) -> Any:
    """Return `dispatch`, the method of the selective checkpoint mode, extended by a call of `keep`.

    `keep` gets each result that the user's policy says must be saved.
    """

    @functools.wraps(dispatch)
    def seen(mode: Any, *args: Any, **kwargs: Any) -> Any:
        asked, answers = mode.policy_fn, list[Any]()

        def noted(*args: Any, **kwargs: Any) -> Any:
            answers.append(asked(*args, **kwargs))
            return answers[-1]

        mode.policy_fn = noted
        try:
            result = dispatch(mode, *args, **kwargs)
        finally:
            mode.policy_fn = asked
        if any(_must_save(answer) for answer in answers):
            for tensor in tensors_in(result):
                if is_plain(type(tensor)) and tensor.layout is torch.strided:
                    keep(tensor)
        return result

    return seen


def _must_save(answer: Any) -> bool:
    """Return True if the policy's answer demands that the checkpoint saves the result."""
    return answer is True or answer is checkpoint.CheckpointPolicy.MUST_SAVE
