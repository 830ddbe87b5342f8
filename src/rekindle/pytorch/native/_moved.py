"""Find out what moved to the host and back in a run, and what cannot move, for its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, final

from rekindle._types import Bytes
from rekindle.pytorch.native._higher import shown_name
from rekindle.pytorch.native._module import Core, Handle
from rekindle.pytorch.online import GRADIENTS, OPTIMIZER, PARAMETERS, Owners
from rekindle.report._data import Moved

#: The kinds of values, as in `native/memory/room/moved.h`.
_KINDS: Final = (
    "values that can be recomputed",
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER,
    "inputs, buffers and others",
)


@final
class MovedState:
    """The copies to the host and back within one budget, and the tensors that cannot move."""

    def __init__(self, core: Core, handle: Handle, owners: Owners) -> None:
        self._core = core
        self._handle = handle
        self._owners = owners
        self._at_end: dict[str, Bytes] | None = None

    @property
    def copies(self) -> tuple[Moved, ...]:
        """The copies so far, by kind of value. Kinds without a copy are left out."""
        found = self._core.moved(self._handle)
        rows = ((kind, found[4 * at : 4 * at + 4]) for at, kind in enumerate(_KINDS))
        return tuple(Moved(kind, *numbers) for kind, numbers in rows if any(numbers))

    @property
    def staying(self) -> dict[str, Bytes]:
        """The bytes of what cannot move now, or could not when the budget ended.

        The keys are names with the reason. The largest comes first.
        """
        return self._now() if self._at_end is None else self._at_end

    def end(self) -> None:
        """Remember what cannot move, because the budget ends."""
        self._at_end = self._now()

    def _now(self) -> dict[str, Bytes]:
        names = dict(self._names())
        sums: Counter[str] = Counter()
        for tensor, nbytes, site, why in self._core.pinned(self._handle):
            name = names.get(id(tensor)) or ("inputs" if site == "source" else shown_name(site))
            sums[f"{name}: {why}"] += nbytes
        return dict(sums.most_common())

    def _names(self) -> Iterator[tuple[int, str]]:
        """Yield the id and the name of each parameter and buffer, and of each gradient."""
        for call in [*self._owners.calls.values()]:
            model = call.model()
            if model is None:
                continue
            for name, tensor in (*model.named_buffers(), *model.named_parameters()):
                yield id(tensor), name
                if tensor.grad is not None:
                    yield id(tensor.grad), f"gradient of {name}"
