"""Tests of models that are made or loaded within a budget smaller than they are."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

from tests.pytorch.bits import differing, everything
from tests.pytorch.held.placeholders import empty
from tests.pytorch.held.test_moved_state import LARGEST, LAYERS, WIDTH, Task, moving

FEW = 5 * LARGEST  #: a budget of 0.4 of the weights


def model() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def test_model_larger_than_budget_is_made_and_loaded(tmp_path: Path) -> None:
    wanted = Task().model.state_dict()
    with moving(tmp_path, FEW) as run:
        made = model()
        made.load_state_dict(wanted)
        assert run.peak <= FEW
        assert empty(made.parameters()) >= LAYERS // 3
    assert differing(everything(made.state_dict()), everything(wanted)) == []


def test_checkpoint_larger_than_budget_is_loaded_by_parts(tmp_path: Path) -> None:
    wanted = Task().model.state_dict()
    for name, each in wanted.items():
        torch.save(each, tmp_path / name)
    with moving(tmp_path, FEW) as run:
        made = model()
        for name in wanted:
            made.load_state_dict({name: torch.load(tmp_path / name)}, strict=False)
        assert run.peak <= FEW
    assert differing(everything(made.state_dict()), everything(wanted)) == []


def test_model_of_more_than_budget_changes_its_dtype(tmp_path: Path) -> None:
    plain = copy.deepcopy(Task().model).double()
    with moving(tmp_path, FEW) as run:
        made = Task().model.double()
        assert run.peak <= FEW
    assert differing(everything(made.state_dict()), everything(plain.state_dict())) == []
