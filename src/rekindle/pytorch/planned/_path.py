"""Make `torch.compiler.is_compiling()` return False while Rekindle traces a model.

Many models run other code when they are compiled: a scan in place of a loop, or all experts in
place of the chosen ones. The results of this code can differ in the last bits from those of eager
PyTorch.
"""

from __future__ import annotations

import threading
from typing import Literal, final

import torch
from torch import _utils
from torch._dynamo import external_utils
from torch._dynamo.variables.torch import tracing_state_functions

Path = Literal["eager", "compiled"]
_QUESTIONS = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    _utils.is_compiling,
    external_utils.is_compiling,
)


@final
class _AsIfEager:
    """Context manager: inside, `is_compiling()` returns False in traced programs of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            self._tell(compiling=False)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._tell(compiling=True)

    @staticmethod
    def _tell(*, compiling: bool) -> None:
        tracing_state_functions().update(dict.fromkeys(_QUESTIONS, compiling))


as_if_eager = _AsIfEager()
