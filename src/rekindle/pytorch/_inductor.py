"""Hands a partition to Inductor in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn


@final
class _Partitioner(CustomPartitionerFn):
    def __init__(self, partition: Callable[..., Any]) -> None:
        self._partition = partition

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        return self._partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "rekindle"

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.uuid(),)  # a part of keys of caches, where only its results count


def compile_by_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], partition: Callable[..., Any]
) -> Callable[..., Any]:
    """What Inductor makes of `module` with `partition` for its joint graph.

    The whole is not looked up in a cache, for plans of the same graph differ; the forward and the
    backward graph, once planned, may be.
    """
    with (
        config.patch(custom_partitioner_fn=_Partitioner(partition)),
        functorch_config.patch(enable_autograd_cache=False, functionalize_rng_ops=False),
    ):
        return compile_fx(module, list(inputs))  # type: ignore[return-value]
