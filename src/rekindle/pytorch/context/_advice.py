"""Write the advice in a report: sentences on how the user can save memory or time.

The advice depends only on the figures of the run. `context/_report.py` calls these functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rekindle._types import Bytes
from rekindle._units import format_bytes, format_ns
from rekindle.pytorch.devices import accelerator, is_accelerator
from rekindle.pytorch.native import Kept, Sliced
from rekindle.pytorch.online import FOR_KEPT, KEPT, OPTIMIZER, PROGRAM

#: Fraction of the peak of memory. A category of memory above it gets a sentence of advice.
_MUCH = 0.2


def advice_on(
    peak: Bytes, categories: Mapping[str, Bytes], device: torch.device
) -> tuple[str, ...]:
    """Return sentences of advice on the memory at the peak, the largest category first.

    Args:
        peak: Memory (bytes) in use at the peak.
        categories: Bytes in use at the peak, by category.
        device: Device of the budget. On CUDA, figures of PyTorch's allocator add advice.
    """
    found = list(_on_categories(peak, categories))
    if is_accelerator(device):
        found += _on_allocator(accelerator.allocator_figures(device))
    return tuple(sentence for _, sentence in sorted(found, key=lambda pair: -pair[0]))


def on_excess(peak: Bytes, budget: Bytes | None) -> tuple[str, ...]:
    """Return a sentence if the peak was above the budget, else nothing."""
    if budget is None or peak <= budget:
        return ()
    sentence = (
        f"The peak was {format_bytes(peak - budget)} above the budget, because the workspace of "
        "an operator (the memory that it uses internally) is not known before its first run. "
        "From its second run on the workspace fits."
    )
    return (sentence,)


def on_shortfall(times: int, budget: Bytes) -> tuple[str, ...]:
    """Return a sentence if the device ran out of memory below the budget, else nothing.

    Args:
        times: How often the device ran out of memory while the budget still had room.
        budget: The budget (bytes) that Rekindle lowered itself to.
    """
    if not times:
        return ()
    sentence = (
        f"The device ran out of memory {times} time{'s' * (times != 1)} before the budget was "
        "used up. Rekindle evicted values to go on, and lowered the budget to "
        f'{format_bytes(budget)}. Write a smaller budget, or rekindle.budget("auto"), which '
        "measures the free memory of the device."
    )
    return (sentence,)


def on_lost_key(times: int) -> tuple[str, ...]:
    """Return a sentence if other code hid operators of the program from Rekindle, else nothing.

    Args:
        times: How often other code switched Rekindle's dispatch key off.
    """
    if not times:
        return ()
    sentence = (
        f"{times} time{'s' * (times != 1)}, other code switched off the dispatch key that Rekindle "
        "uses, as PyTorch's FakeTensor mode may do when it ends (torch.compile uses it). Rekindle "
        "switched the key on again. What operators made meanwhile counts against the budget, but "
        "is never evicted."
    )
    return (sentence,)


def on_kept(operators: Sequence[Kept], functions: Mapping[str, str]) -> tuple[str, ...]:
    """Return sentences on results that are kept in memory because recomputing them is not safe.

    Args:
        operators: Operators that are not recomputed, each with the reason and the bytes kept.
        functions: Name of a custom `autograd.Function` -> why results of it are kept.
    """
    sentences = [
        f"{each.operator} is not recomputed: {each.why} ({each.calls} call"
        f"{'s' * (each.calls != 1)}, {format_bytes(each.nbytes)} of results so far)."
        for each in sorted(operators, key=lambda each: -each.nbytes)
    ]
    sentences += [
        f"Results of the function {name} are kept in memory: {why}."
        for name, why in functions.items()
    ]
    return tuple(sentences)


def on_sliced(operators: Sequence[Sliced]) -> tuple[str, ...]:
    """Return a sentence on the operators that ran in slices, because they had no room."""
    if not operators:
        return ()
    shown = ", ".join(
        f"{each.operator} ({each.calls} call{'s' * (each.calls != 1)} in up to {each.slices} "
        f"slice{'s' * (each.slices != 1)}, {format_ns(each.time)})"
        for each in sorted(operators, key=lambda each: -each.time)
    )
    return (
        (
            f"Operators that had no room as a whole ran in slices: {shown}. With more memory they "
            "take less time."
        ),
    )


def on_unknown_threads(modules: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence if a thread kept the program's own tensors in memory, else nothing.

    Args:
        modules: The Python modules that started threads before the budget.
    """
    if not modules:
        return ()
    return (
        (
            "While a thread ran that started before the budget, tensors that your variables hold "
            f"were not evicted: start it inside the budget (started by {', '.join(modules)})."
        ),
    )


def _on_categories(peak: Bytes, held: Mapping[str, Bytes]) -> Iterator[tuple[Bytes, str]]:
    program, kept, state = (held.get(name, 0) for name in (PROGRAM, KEPT, OPTIMIZER))
    if program > _MUCH * peak:
        yield (
            program,
            (
                f"At the peak your program's variables hold {format_bytes(program)}, which is "
                "evicted only when nothing else is left to evict: delete lists of activations "
                "and skip connections early."
            ),
        )
    if kept > _MUCH * peak:
        yield (
            kept,
            (
                f"{format_bytes(kept)} at the peak cannot be recomputed: results of custom "
                "autograd.Functions, of collectives, or of kernels that PyTorch does not see. "
                f"{FOR_KEPT}."
            ),
        )
    others = max((nbytes for name, nbytes in held.items() if name != OPTIMIZER), default=0)
    if state > 2 * _MUCH * peak or state > max(_MUCH * peak, others):
        yield (
            state,
            (
                f"{format_bytes(state)} at the peak are optimizer state: an optimizer with less "
                "state, or with state of fewer bits, saves memory that recomputation cannot save. "
                'With evict="anything" and swap=, state moves to the host.'
            ),
        )


def _on_allocator(stats: Mapping[str, Any]) -> Iterator[tuple[Bytes, str]]:
    """Advise on memory that CUDA's caching allocator reserved but did not give to tensors."""
    reserved: Bytes = stats.get("reserved_bytes.all.peak", 0)
    allocated: Bytes = stats.get("allocated_bytes.all.peak", 0)
    idle = reserved - allocated
    if idle > _MUCH * reserved:
        split: Bytes = stats.get("inactive_split_bytes.all.peak", 0)
        rounding = allocated - stats.get("requested_bytes.all.peak", allocated)
        yield (
            idle,
            (
                f"The allocator reserved {format_bytes(reserved)} but gave at most "
                f"{format_bytes(allocated)} to tensors, {format_bytes(rounding)} of it by "
                f"rounding up ({format_bytes(split)} are unused parts of larger blocks): to limit "
                'the reserved memory, write rekindle.budget(..., of="reserved").'
            ),
        )
    retries: int = stats.get("num_alloc_retries", 0)
    if retries:
        yield (
            0,
            (
                f"The allocator ran out of memory and emptied its cache {retries} times, which is "
                'slow: write rekindle.budget(..., of="reserved"), or a smaller budget.'
            ),
        )
