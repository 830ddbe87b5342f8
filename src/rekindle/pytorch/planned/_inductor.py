"""Hands a partition to Inductor in place of its own, and asks it what memory its order takes.

Inductor fuses the operators of each pass and puts them in an order of its own, which may take more
memory than the planned one. So it is kept from fusing what is far apart; and what it takes is known
before any code is compiled: the scheduler's own estimate for the order it ends with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config, memory
from torch._inductor.choices import InductorChoices
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.virtualized import V

from rekindle._types import Bytes

NEAR = 4  #: operators between two that are still fused side by side

Accept = Callable[[Bytes], bool]


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


@final
class _Near(InductorChoices):
    """Fuses consumers of the same value only where they are near each other.

    Fused operators run where the first of them would, and everything that the others need is there
    by then: recomputed at once, not one by one where it was planned.
    """

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        ends = (node1.min_order, node1.max_order, node2.min_order, node2.max_order)
        near = max(ends) - min(ends) <= NEAR
        return near and InductorChoices.can_fuse_horizontal(
            scheduler, node1, node2, shared_data_score
        )


class _Refused(Exception):
    """The order of a graph takes more memory than is accepted."""


def compile_by_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], partition: Callable[..., Any], accept: Accept
) -> Callable[..., Any] | None:
    """What Inductor makes of `module` with `partition` for its joint graph.

    `accept` is asked of each pass, with the bytes at its peak beside the inputs of the whole; None
    is returned where it says no, and nothing more is compiled. Graphs are not looked up in a cache:
    for one that is found nothing is scheduled. Their kernels are.
    """
    with (
        _asking(accept) as refused,
        V.set_choices_handler(_Near()),
        config.patch(
            custom_partitioner_fn=_Partitioner(partition),
            fx_graph_cache=False,
            reorder_for_peak_memory=True,
        ),
        functorch_config.patch(
            enable_autograd_cache=False,
            functionalize_rng_ops=False,
            force_non_lazy_backward_lowering=True,  # else nothing of it is known here
        ),
    ):
        try:
            return compile_fx(module, list(inputs))  # type: ignore[return-value]
        except Exception:
            if refused:  # by whatever name Inductor and AOTAutograd passed it on
                return None
            raise


@contextmanager
def _asking(accept: Accept) -> Iterator[list[Bytes]]:
    """Yields the peaks that were refused; the first ends the compilation."""
    reorder = memory.reorder_for_peak_memory
    refused: list[Bytes] = []

    def ask(nodes: Any, buffers: Any, fused: Any, inputs: Any, outputs: Any) -> Any:
        ordered = reorder(nodes, buffers, fused, inputs, outputs)
        peak, _ = memory.prepare_planning_info(ordered, buffers, fused, inputs, outputs)
        # With one thread the code was seen to hold one buffer more than the order says.
        made = (buffer for node in ordered for buffer in node.get_outputs())
        peak += max((buffer.mpi_buffer.size_alloc for buffer in made), default=0)
        if not accept(peak):
            refused.append(peak)
            raise _Refused
        return ordered

    memory.reorder_for_peak_memory = ask
    try:
        yield refused
    finally:
        memory.reorder_for_peak_memory = reorder
