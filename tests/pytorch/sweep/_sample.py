"""Run a call in plain PyTorch and with everything recomputed, and compare the results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle import Run
from tests.differ.modes import Evict
from tests.pytorch import cores
from tests.pytorch.bits import differing
from tests.pytorch.sweep._everything import everything_recomputed, evict_all
from tests.pytorch.sweep._exceptions import filled
from tests.pytorch.sweep._verdict import SEED, Case, Verdict, copies, in_words, versions


class _Nothing(TorchDispatchMode):
    """A dispatch mode that does nothing, because an active mode changes code paths of PyTorch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Program:
    """The callable of one run, and the module whose state it uses, if any."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]  #: arguments: tensors in any nesting
    module: nn.Module | None = None


@final
@dataclass(frozen=True)
class Sample(Case):
    """A case that compares plain PyTorch with a run that recomputes everything."""

    build: Callable[[], Program]
    twice: bool = False  #: True if the sample is differentiated twice

    def judge(self, evict: Evict = "saved") -> Verdict:
        with warnings.catch_warnings(action="ignore"), filled(self.entry):
            return self._judge(evict)

    def _judge(self, evict: Evict) -> Verdict:
        try:
            wanted = self.outcome(None)
        except Exception as error:  # PyTorch's own error
            return Verdict("refused", in_words(error))
        try:
            with everything_recomputed(evict) as run:
                got = self.outcome(run)
                run._driver.engine.check()
            again = cores.recomputed(run._driver)
        except Exception as error:
            return Verdict(self._unless_in_any_mode(error, []), in_words(error))
        wrong = differing(got, wanted)
        if not wrong:
            return Verdict("same", "", again)
        undetermined = differing(self.outcome(None), wanted)
        if set(wrong) <= set(undetermined):
            return Verdict("undetermined", ", ".join(undetermined), again)
        return Verdict(self._unless_in_any_mode(got, undetermined), ", ".join(wrong), again)

    def _unless_in_any_mode(self, got: dict[str, Any] | Exception, aside: list[str]) -> str:
        """Return the verdict "as in any mode" if `got` equals a run in a mode that does nothing."""
        try:
            with _Nothing():
                wanted = self.outcome(None)
        except Exception as error:
            return "as in any mode" if repr(error) == repr(got) else "different"
        if isinstance(got, Exception):
            return "different"
        wrong = [name for name in differing(got, wanted) if name not in aside]
        return "different" if wrong else "as in any mode"

    def outcome(self, run: Run | None) -> dict[str, Any]:
        """Return copies of all results of a run, by name. If `run` is None, it is plain PyTorch.

        Arguments are made by an operator, so that they are evicted as well. Results are multiplied
        with weights, so that the backward pass reads every one of them.
        """
        torch.manual_seed(SEED)
        program = self.build()
        torch.manual_seed(SEED)
        leaves, spec = pytree.tree_flatten(program.arguments)
        given = [_made_by_an_operator(leaf) for leaf in leaves]
        results = program.call(*pytree.tree_unflatten(given, spec))
        results = [each for each in pytree.tree_leaves(results) if isinstance(each, Tensor)]
        found = copies("result", results) | copies("argument", given) | versions("argument", given)
        draw = torch.Generator().manual_seed(SEED)
        weights = [_weight(each, draw) for each in results]
        ends = [_weighed(*pair) for pair in zip(results, weights, strict=True)]
        del given, results
        state = [*program.module.parameters(), *program.module.buffers()] if program.module else []
        sources = [x for x in [*leaves, *state, *weights] if _is_source(x)]
        found |= self._gradients(ends, sources, draw, run)
        found |= copies("leaf", leaves) | versions("leaf", leaves)
        found |= copies("state", state) | versions("state", state)
        return found | {"generator": torch.get_rng_state()}

    def _gradients(
        self, ends: list[Tensor], sources: list[Tensor], draw: torch.Generator, run: Run | None
    ) -> dict[str, Any]:
        first = _gradients(ends, sources, draw, self.twice, run)
        ends.clear()
        found = copies("gradient", first)
        if self.twice:
            ends += [x for x in first if x is not None and x.requires_grad]
            del first
            found |= copies("second gradient", _gradients(ends, sources, draw, False, run))
        return found


def copy_leaves(values: Any) -> Any:
    """Return `values` with a copy of each tensor, as a leaf in its own memory."""
    return pytree.tree_map_only(Tensor, _copy, values)


def _copy(tensor: Tensor) -> Tensor:
    """Copy `tensor` with its strides, even if it has gaps or is expanded."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        copy = tensor.detach().clone()
    else:
        copy = torch.empty(0, dtype=tensor.dtype)
        memory = tensor.detach().untyped_storage().clone()
        copy.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    return copy.requires_grad_(tensor.requires_grad)


def _made_by_an_operator(leaf: Any) -> Any:
    """Return a clone; if `leaf` has gaps or is expanded, the clone has the same strides."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
        return leaf
    if leaf.layout is not torch.strided or torch.ops.aten.is_non_overlapping_and_dense(leaf):
        return leaf.clone()
    once = leaf[tuple(slice(0, 1 if stride == 0 else None) for stride in leaf.stride())]
    reach = 1 + sum((n - 1) * s for n, s in zip(once.shape, once.stride(), strict=True))
    memory = torch.zeros(reach, dtype=leaf.dtype).as_strided(once.shape, once.stride())
    return memory.copy_(once).expand(leaf.shape)


def _is_source(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _weight(result: Tensor, draw: torch.Generator) -> Tensor | None:
    if result.layout is not torch.strided or result.is_quantized:
        return None
    known = result.is_floating_point() or result.is_complex()
    dtype = result.dtype if known and result.dtype.itemsize > 1 else torch.float64
    return torch.rand(result.shape, dtype=dtype, generator=draw).requires_grad_()


def _weighed(result: Tensor, weight: Tensor | None) -> Tensor:
    return result if weight is None else result.to(weight.dtype) * weight


def _gradients(
    ends: list[Tensor],
    sources: list[Tensor],
    draw: torch.Generator,
    create_graph: bool,
    run: Run | None,
) -> list[Tensor | None]:
    ends = [end for end in ends if end.requires_grad]
    if not ends:
        return []
    if run is not None:
        evict_all(run)
    directions = [_direction(end, draw) for end in ends]
    return list(
        torch.autograd.grad(ends, sources, directions, allow_unused=True, create_graph=create_graph)
    )


def _direction(end: Tensor, draw: torch.Generator) -> Tensor:
    if end.layout is not torch.strided:
        return torch.ones_like(end)
    return torch.rand(end.shape, dtype=end.dtype, generator=draw)
