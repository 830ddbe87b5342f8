"""Tests that Rekindle's stand-in for autograd's engine forwards all that PyTorch may call."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import rekindle
import rekindle.native

HEADER = Path(torch.__path__[0]) / "include" / "torch" / "csrc" / "autograd" / "engine.h"
PROXY = Path(rekindle.native.__path__[0]) / "dispatch" / "proxy.cpp"


def virtual_functions(header: str) -> set[str]:
    """Return the public virtual functions of `Engine` in torch's header, without the destructor.

    The protected ones are called by the engine itself, not through the stand-in.
    """
    begins = header.index("struct TORCH_API Engine {")
    public = header[begins : header.index("protected:", begins)]
    return set(re.findall(r"virtual [^;{(]*?(\w+)\(", public.replace("virtual ~Engine()", "")))


def forwarded(source: str) -> set[str]:
    """Return the functions that the stand-in calls on the engine behind it."""
    return set(re.findall(r"behind_\.(\w+)\(", source))


def test_stand_in_for_engine_forwards_each_virtual_function() -> None:
    found = virtual_functions(HEADER.read_text())
    assert len(found) >= 6
    assert found <= forwarded(PROXY.read_text())


def test_new_virtual_function_of_engine_would_be_found() -> None:
    new = (
        "  virtual std::vector<std::unique_ptr<Hook>>\n  get_new_hooks() {\n    return {};\n  }\n\n"
    )
    header = HEADER.read_text().replace(" protected:", new + " protected:")
    assert virtual_functions(header) - forwarded(PROXY.read_text()) == {"get_new_hooks"}


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "node_creation_hook"), reason="needs torch 2.14"
)
def test_node_creation_hook_within_and_after_budget_is_called() -> None:
    def names() -> list[str]:
        seen: list[str] = []
        x = torch.rand(4, requires_grad=True)
        with torch.autograd.graph.node_creation_hook(  # type: ignore[attr-defined]
            lambda node: seen.append(node.name())
        ):
            (x * 2).sin().sum()
        return seen

    before = names()
    with rekindle.budget(None):
        within = names()
    assert before
    assert before == within == names()
