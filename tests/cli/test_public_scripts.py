"""Tests of scripts in the style of public ones, which run unchanged within a budget.

The plain classifier follows PyTorch's own first example, and the image model timm's `train.py`.
The language model follows `run_clm.py` of transformers, the module Lightning's. All are small and
offline.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_run import python, run
from tests.helpers import own_cache

SCRIPTS = Path(__file__).parent / "scripts"
FOR_TRAINER = (
    "--output_dir=out --num_train_epochs=2 --per_device_train_batch_size=16 "
    "--per_device_eval_batch_size=4 --logging_steps=2 --eval_strategy=steps --eval_steps=4 "
    "--save_steps=4 --report_to=none --disable_tqdm=true --use_cpu=true"
)
#: Of what is printed, what the clock decides.
CLOCK = re.compile(r"'?\w*(runtime|per_second)'?\s*[=:] *[^,}\n]*|/\S*/checkpoints/")


@dataclass(frozen=True)
class Script:
    """`share`: of the plain peak, the budget; `weights`: a file that it leaves."""

    name: str
    words: tuple[str, ...]
    share: float
    weights: str
    needs: str = "torch"


ALL = [
    Script("plain", ("--save-model",), 0.85, "weights.pt"),
    Script("vision", (), 0.8, "weights.pt"),
    Script("vision", ("--amp", "--channels-last", "--workers=1"), 0.9, "weights.pt"),
    Script("language", tuple(FOR_TRAINER.split()), 0.4, "out/model.safetensors", "transformers"),
    Script("lit", ("3",), 0.75, "weights.pt", "lightning"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ALL, ids=lambda script: "-".join((script.name, *script.words))[:24]
)
def test_a_public_script_does_not_notice(script: Script, tmp_path: Path) -> None:
    """The same output, exit code, weights and other files, online and by learned schedules."""
    pytest.importorskip(script.needs)
    plain, free, online, learned = (
        tmp_path / name for name in ("plain", "free", "online", "learned")
    )
    for folder in (plain, free, online, learned):
        folder.mkdir()
    words = (SCRIPTS / f"{script.name}.py", *script.words)
    report = ("--report", "json", "run.json")
    expected = python(*words, cwd=plain)
    assert expected.returncode == 0, expected.stderr
    assert run("--budget", "none", *report, *words, cwd=free).returncode == 0
    budget = int(script.share * json.loads((free / "run.json").read_text())["peak"])
    for folder, options in ((online, ()), (learned, ("--learn-wait",))):
        found = run("--budget", budget, *report, *options, *words, cwd=folder)
        assert found.returncode == 0, found.stderr
        assert CLOCK.sub("", found.stdout) == CLOCK.sub("", expected.stdout)
        told = json.loads((folder / "run.json").read_text())
        assert told["peak"] <= budget
        assert told["recomputations"] > 0
        differing = [name for name, value in weights(plain / script.weights).items()
                     if not torch.equal(value, weights(folder / script.weights)[name])]  # fmt: skip
        assert differing == []
        assert files(folder) == files(plain)
    assert "followed to the end" in "".join(told["advice"])


@pytest.mark.slow
def test_plans_are_followed_when_script_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image model's loop logs, evaluates, averages weights and saves.

    Every step follows a plan but those that are observed, and all do when the script starts again.
    """
    cache = own_cache(tmp_path / "cache")  # others learn of it as well
    monkeypatch.setenv("REKINDLE_CACHE", str(cache))
    words = (SCRIPTS / "vision.py", "--epochs=4")
    assert (
        run("--budget=none", "--report", "json", "run.json", *words, cwd=tmp_path).returncode == 0
    )
    budget = int(0.8 * json.loads((tmp_path / "run.json").read_text())["peak"])
    told = [run("--budget", budget, "--learn-wait", *words, cwd=tmp_path).stderr for _ in range(2)]
    assert "13   followed to the end, 0 left, 3 without a plan: 81% of the steps" in told[0]
    assert "16   followed to the end, 0 left, 0 without a plan: 100% of the steps" in told[1]


def weights(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    state = torch.load(path)
    return state.get("state_dict", state)


def files(folder: Path) -> set[str]:
    """By name, without the report."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return names - {"run.json"}
