"""Tests of collectives, which write to arguments that their schemas declare as only read.

Rules R3, in-place writes; R9, everything else runs once.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed  # registers the collective operators

import rekindle
from rekindle.pytorch.operators._operators import (
    COLLECTIVES_IN_PLACE,
    COLLECTIVES_WITHOUT_RESULT,
    operator,
)
from tests.pytorch.harsh import deeper

NAMES = torch._C._dispatch_get_all_op_names()
IN_PLACE = sorted(name for name in NAMES if name.startswith("c10d::") and name.endswith("_"))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="built without them")
def test_each_in_place_collective_of_pytorch_is_listed() -> None:
    known = COLLECTIVES_IN_PLACE | COLLECTIVES_WITHOUT_RESULT
    assert set(IN_PLACE) <= known
    # torch 2.14 added this operator
    assert known - set(IN_PLACE) <= {"c10d::gather_into_tensor_"}


@pytest.mark.parametrize("name", sorted(COLLECTIVES_IN_PLACE & set(IN_PLACE)))
def test_collective_writes_first_argument_and_is_not_recomputed(name: str) -> None:
    facts = operator(getattr(torch.ops.c10d, name.removeprefix("c10d::")).default)
    assert [position for position, _ in facts.written] == [0]
    assert facts.opaque


def test_collective_without_known_writes_is_refused() -> None:
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("rotate_(Tensor[] tensors, int by) -> ()")
    library.impl("rotate_", lambda tensors, by: None, "CompositeExplicitAutograd")
    refused = pytest.raises(rekindle.Unsupported, match=r"c10d::rotate_.*functional form")
    with rekindle.budget(1_000_000), refused:
        torch.ops.c10d.rotate_([torch.ones(3)], 1)
    library._destroy()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="built without them")
def test_gathered_value_is_not_recomputed() -> None:
    """A collective overwrites a value that could be recomputed. The new contents stay in memory.

    Rule R3, in-place writes.
    """
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:

        def gradient(amount: str) -> torch.Tensor:
            torch.manual_seed(20)
            weight = torch.rand(1_000, requires_grad=True)
            with rekindle.budget(amount) as run:
                gathered = weight.detach().exp()  # could be recomputed
                distributed.all_gather([gathered], torch.ones(1_000))
                loss = deeper(weight * gathered, 8).sum()
                del gathered
                loss.backward()
            recomputations.append(run.recomputations)
            assert weight.grad is not None
            return weight.grad

        recomputations: list[int] = []
        assert torch.equal(gradient("1MiB"), gradient("60KB"))
        assert recomputations[0] == 0 < recomputations[1]
    finally:
        distributed.destroy_process_group()
