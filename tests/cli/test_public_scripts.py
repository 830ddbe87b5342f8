"""Tests of scripts in the style of public training scripts, run unchanged within a budget.

The plain classifier follows PyTorch's MNIST example, the image model timm's `train.py`, the
language model `run_clm.py` of transformers, the module Lightning's examples, and the compiled
transformer torchtitan. All are small and need no network.
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
from tests.helpers import WHOLE, own_cache

SCRIPTS = Path(__file__).parent / "scripts"
FOR_TRAINER = (
    "--output_dir=out --num_train_epochs=2 --per_device_train_batch_size=16 "
    "--per_device_eval_batch_size=4 --logging_steps=2 --eval_strategy=steps --eval_steps=4 "
    "--save_steps=4 --report_to=none --disable_tqdm=true --use_cpu=true"
)
#: Parts of the printed text that contain measured times, which differ from run to run.
CLOCK = re.compile(r"'?\w*(runtime|per_second)'?\s*[=:] *[^,}\n]*|/\S*/checkpoints/")


@dataclass(frozen=True)
class Script:
    """A script and its budget.

    `share` is the budget as a fraction of the peak memory without a budget. `weights` is the file
    that the script saves.
    """

    name: str
    words: tuple[str, ...]
    share: float
    weights: str
    needs: str = "torch"


PLAIN = Script("plain", ("--save-model",), 0.85, "weights.pt")
LANGUAGE = Script(
    "language", tuple(FOR_TRAINER.split()), 0.4, "out/model.safetensors", "transformers"
)
COMPILED = Script("compiled", ("--fullgraph",), 0.6, "weights.pt")
SAMPLE = [
    PLAIN,
    Script("vision", ("--amp", "--channels-last", "--workers=1"), 0.9, "weights.pt"),
    LANGUAGE,
    Script("lit", ("3",), 0.75, "weights.pt", "lightning"),
    COMPILED,
]
ALL = [*SAMPLE, Script("vision", (), 0.8, "weights.pt")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    ALL if WHOLE else SAMPLE,
    ids=lambda script: "-".join((script.name, *script.words))[:24],
)
def test_public_script_prints_same_with_and_without_budget(script: Script, tmp_path: Path) -> None:
    """Output, exit code and files are equal, with online eviction and with learned plans."""
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
        reported = json.loads((folder / "run.json").read_text())
        assert reported["peak"] <= budget
        assert reported["recomputations"] > 0
        differing = [name for name, value in weights(plain / script.weights).items()
                     if not torch.equal(value, weights(folder / script.weights)[name])]  # fmt: skip
        assert differing == []
        assert files(folder) == files(plain)
    assert "followed to the end" in "".join(reported["advice"])


@pytest.mark.slow
def test_restarted_public_script_follows_cached_plans_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run makes a plan after three steps. The second one follows it from its first step.

    The script trains the image model. Its loop also logs, evaluates, averages weights and saves.
    """
    cache = own_cache(tmp_path / "cache")  # the plan is stored for other processes
    monkeypatch.setenv("REKINDLE_CACHE", str(cache))
    words = (SCRIPTS / "vision.py", "--epochs=4")
    assert (
        run("--budget=none", "--report", "json", "run.json", *words, cwd=tmp_path).returncode == 0
    )
    budget = int(0.8 * json.loads((tmp_path / "run.json").read_text())["peak"])
    reported = [
        run("--budget", budget, "--learn-wait", *words, cwd=tmp_path).stderr for _ in range(2)
    ]
    assert (
        "13   followed to the end, 0 abandoned, 3 without a plan: 81% of the steps" in reported[0]
    )
    assert (
        "16   followed to the end, 0 abandoned, 0 without a plan: 100% of the steps" in reported[1]
    )


def weights(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    state = torch.load(path)
    return state.get("state_dict", state)


def files(folder: Path) -> set[str]:
    """Return the names of all files in `folder`, except the report."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return names - {"run.json"}
