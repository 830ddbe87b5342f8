"""Tests of `rekindle run`: a script behaves as under `python`, and stays within the budget."""

from __future__ import annotations

import json
import os
import py_compile
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from rekindle.cli import _main_program, main
from rekindle.trace import chain
from rekindle.trace.formats import save
from tests.helpers import own_cache

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import argparse
import os
import sys

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--budget", default="the program's own option")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--end", default="")
options = parser.parse_args()
print(__name__, sys.argv, options.budget, os.getcwd(), __file__, sys.path[0])
print(__spec__ and __spec__.name)
torch.manual_seed(0)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        return torch.randn(64, generator=torch.Generator().manual_seed(index))


if __name__ == "__main__":
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters())
    start = "spawn" if options.workers else None
    loader = torch.utils.data.DataLoader(
        Numbers(), 256, num_workers=options.workers, multiprocessing_context=start
    )
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item())
    print([parameter.sum().item() for parameter in model.parameters()])
    if options.end == "exit":
        sys.exit(7)
    if options.end == "message":
        sys.exit("no more")
    if options.end == "error":
        raise ValueError("it failed")
    if options.end == "interrupt":
        os.kill(os.getpid(), 2)
    if options.end == "fork":
        child = os.fork()
        if child == 0:
            sys.exit(5)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def python(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the Python interpreter with these arguments."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def run(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "rekindle", "run", *words, cwd=cwd)


TIGHT = "900KiB"


def test_run_of_script_behaves_as_python_script(script: Path) -> None:
    """Arguments, output and exit code are those of `python script`, although values are evicted."""
    words = ("train.py", "--budget", "mine", "--end=exit")
    plain = python(*words, cwd=script.parent)
    tight = run("--budget", TIGHT, *words, cwd=script.parent)
    assert plain.returncode == 7
    assert (tight.stdout, tight.returncode) == (plain.stdout, 7)
    assert "__main__ ['train.py', '--budget', 'mine', '--end=exit'] mine" in plain.stdout
    recomputations = tight.stderr.partition("recomputations")[2].split()[0]
    assert int(recomputations) > 10
    assert "parameters" in tight.stderr  # the script makes its parameters inside the budget


@pytest.mark.slow
def test_run_of_module_behaves_as_python_m_module(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("from . import __name__ as parent\nprint(parent)\n" + TRAIN)
    words = ("-m", "package.train", "--end", "message")
    plain = python(*words, cwd=tmp_path)
    tight = run("--budget", TIGHT, *words, cwd=tmp_path)
    assert (tight.stdout, tight.returncode) == (plain.stdout, 1)
    assert plain.stderr == "no more\n"
    assert tight.stderr.endswith("no more\n")


@pytest.mark.slow
def test_run_of_failing_script_shows_its_traceback_and_report(script: Path) -> None:
    plain = python("train.py", "--end=error", cwd=script.parent)
    tight = run("--budget", TIGHT, "train.py", "--end=error", cwd=script.parent)
    assert (tight.stdout, tight.returncode) == (plain.stdout, 1)
    assert plain.stderr.endswith("ValueError: it failed\n")
    assert tight.stderr.startswith(plain.stderr)
    assert "recomputations" in tight.stderr


def test_traceback_shows_script_in_folder_named_like_package() -> None:
    package = str(Path(_main_program.__file__).parents[1])
    inner = compile("1 / 0", f"{package}-examples/train.py", "exec")
    outer = compile("exec(inner)", f"{package}/cli/run.py", "exec")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(outer, {"inner": inner})
    ours = caught.value.__traceback__
    assert ours is not None
    shown = _main_program._of_the_program(ours.tb_next)
    assert shown is not None
    assert shown.tb_frame.f_code is inner


def test_interrupted_run_exits_by_sigint_and_writes_report(script: Path) -> None:
    tight = run("--report", "json", "run.json", "train.py", "--end=interrupt", cwd=script.parent)
    assert tight.returncode == -signal.SIGINT
    assert tight.stderr.endswith("KeyboardInterrupt\n")
    assert json.loads((script.parent / "run.json").read_text())["peak"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_run_of_script_that_forks_prints_one_report(script: Path) -> None:
    plain = python("train.py", "--end=fork", cwd=script.parent)
    tight = run("--budget", TIGHT, "train.py", "--end=fork", cwd=script.parent)
    assert (tight.stdout, tight.returncode) == (plain.stdout, 0)
    assert "child 5" in plain.stdout
    assert tight.stderr.count("recomputations") == 1


@pytest.mark.slow
def test_spawned_data_workers_of_script_import_its_main_module(script: Path) -> None:
    """Spawned data loader workers import the script, and unpickle objects of its `__main__`."""
    plain = python("train.py", "--workers=1", cwd=script.parent)
    tight = run("--budget", TIGHT, "train.py", "--workers=1", cwd=script.parent)
    assert (tight.stdout, tight.returncode) == (plain.stdout, 0)
    assert "__mp_main__" in plain.stdout


@pytest.mark.slow
def test_restarted_script_follows_cached_plan_from_first_step_on(script: Path) -> None:
    """Run a script three times: the first run learns a plan after its first step and caches it.

    The second run follows the cached plan in every step. The third run has `--no-cache`, so it
    learns its own plan.
    """
    longer = TRAIN.replace("return 512", "return 1024")
    script.write_text(longer)
    first, again, without = (
        run("--budget", TIGHT, "--learn-wait", *words, "train.py", cwd=script.parent)
        for words in ((), (), ("--no-cache",))
    )
    assert first.stdout == again.stdout == without.stdout
    assert "1   followed to the end, 0 abandoned, 3 without a plan" in first.stderr
    assert "4   followed to the end, 0 abandoned, 0 without a plan" in again.stderr
    assert "1   followed to the end, 0 abandoned, 3 without a plan" in without.stderr


@pytest.mark.slow
def test_run_within_too_small_budget_suggests_larger_budget(script: Path) -> None:
    result = run("--budget", "64KiB", "-q", "train.py", cwd=script.parent)
    assert result.returncode == 1
    assert "\nrekindle.OutOfBudget: " in result.stderr
    assert "rekindle run --profile train.py" in result.stderr
    (smallest,) = re.findall(r"On this command line: --budget (\d+)KiB\n", result.stderr)
    assert int(smallest) > 64
    assert "rehearse" not in result.stderr, "a script's user cannot call it"
    assert "rekindle.budget(" not in result.stderr.partition("rekindle.OutOfBudget")[2]


@pytest.mark.slow
def test_run_options_write_reports_profile_and_progress(script: Path) -> None:
    """Run without a limit, then within the budget that the first run's profile suggests."""
    words = ("--report", "html", "run.html", "--report", "text", "run.txt")
    first = run("--budget=none", "--profile", "--progress", *words, "train.py", cwd=script.parent)
    assert first.returncode == 0, first.stderr
    assert "of no limit" in first.stderr
    assert "step 1: 0 evictions, time lost 0.0%" in first.stderr
    assert "recomputations" not in first.stderr  # the report goes to the files instead
    assert "recomputations" in (script.parent / "run.txt").read_text()
    assert "<polygon" in (script.parent / "run.html").read_text()  # the chart of memory over time
    smallest = first.stderr.partition("smallest budget: --budget ")[2].split()[0]
    second = run("--budget", smallest, "train.py", cwd=script.parent)
    assert (second.stdout, second.returncode) == (first.stdout, 0)


@pytest.mark.slow
def test_run_with_progress_leaves_output_to_a_file_alone(tmp_path: Path) -> None:
    """Standard error is a terminal, standard output a file."""
    line = "x" * 300
    (tmp_path / "train.py").write_text(f"import torch\ntorch.ones(9).exp()\nprint({line!r})")
    screen, terminal = os.openpty()
    command = [sys.executable, "-m", "rekindle", "run", "--progress", "train.py"]
    with (tmp_path / "out.txt").open("w") as file:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=file, stderr=terminal)
        os.close(terminal)
        shown = b""
        while part := _read(screen):
            shown += part
        assert process.wait() == 0, shown
    os.close(screen)
    assert (tmp_path / "out.txt").read_text() == line + "\n"
    assert b"evictions" in shown


def _read(screen: int) -> bytes:
    """Return what was written to a pseudo-terminal; nothing once its other end is closed."""
    try:
        return os.read(screen, 4096)
    except OSError:
        return b""


@pytest.mark.slow
def test_report_is_written_although_program_changes_its_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys, torch\ntorch.ones(9).exp()\nos.mkdir('other')\nos.chdir('other')\n"
        "sys.exit(7)"
    )
    result = run("--report", "json", "run.json", "train.py", cwd=tmp_path)
    assert result.returncode == 7, result.stderr
    assert json.loads((tmp_path / "run.json").read_text())["peak"] > 0


@pytest.mark.slow
def test_exit_code_is_that_of_the_program_if_report_fails(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, shutil, sys, torch\ntorch.ones(9).exp()\nshutil.rmtree('reports')\nsys.exit(7)"
    )
    (tmp_path / "reports").mkdir()
    result = run("--report", "json", "reports/run.json", "train.py", cwd=tmp_path)
    assert result.returncode == 7, result.stderr
    assert "rekindle: no report: FileNotFoundError" in result.stderr


@pytest.mark.slow
def test_module_stays_main_until_the_process_ends(tmp_path: Path) -> None:
    """An exit handler pickles a class of the program, which it finds in `__main__`."""
    (tmp_path / "train.py").write_text(
        "import atexit, pickle, sys\n"
        "class Own: pass\n"
        "atexit.register(lambda: print(len(pickle.dumps(Own())) > 0, sys.argv[1:]))\n"
        "print(__name__, __spec__.name, __package__, __file__ == sys.argv[0])\n"
    )
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text((tmp_path / "train.py").read_text())
    for name in ("train", "package"):
        plain = python("-m", name, "--own", cwd=tmp_path)
        ours = run("-q", "-m", name, "--own", cwd=tmp_path)
        assert plain.returncode == 0, plain.stderr
        assert (ours.stdout, ours.returncode) == (plain.stdout, 0), ours.stderr


@pytest.mark.slow
def test_script_from_a_pipe_or_compiled_runs_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("text = 'helped'")
    (tmp_path / "train.py").write_text("import helper\nprint(helper.text)")
    compiled = py_compile.compile(str(tmp_path / "train.py"), str(tmp_path / "train.pyc"))
    (tmp_path / "train.py").unlink()
    (tmp_path / "elsewhere").mkdir()
    result = run("-q", compiled, cwd=tmp_path / "elsewhere")
    assert (result.stdout, result.returncode) == ("helped\n", 0), result.stderr
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("print('from a pipe')",))
    writer.start()
    result = run("-q", "pipe", cwd=tmp_path)
    writer.join()
    assert (result.stdout, result.returncode) == ("from a pipe\n", 0), result.stderr


@pytest.mark.slow
def test_run_of_script_that_enters_own_budget_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import rekindle\nwith rekindle.budget('1GiB'): pass")
    result = run("train.py", cwd=tmp_path)
    assert result.returncode == 1
    assert "if `rekindle run` made it, start the program with python" in result.stderr


@pytest.mark.slow
def test_run_of_script_without_tensors_suggests_torchrun(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text("print('started')")
    result = run("launcher.py", cwd=tmp_path)
    assert (result.stdout, result.returncode) == ("started\n", 0)
    assert "torchrun -m rekindle run" in result.stderr


@pytest.mark.slow
def test_each_torchrun_rank_has_own_budget_and_report(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "torch.manual_seed(0)\n"
        "layers = [torch.nn.Linear(64, 64) for _ in range(8)]\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))\n"
        "model(torch.randn(256, 64)).square().mean().backward()\n"
        "del model\n"
        "time.sleep(0.5)  # gloo frees the last gradient meanwhile: tests/distributed/ranks.py\n"
        "dist.destroy_process_group()\n"
    )
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    words = ("-m", "rekindle", "run", "--report", "json", "run.json", "ranks.py")
    result = python(*launcher, *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert json.loads((tmp_path / f"run-rank{rank}.json").read_text())["peak"] > 0


@pytest.mark.slow
def test_accelerate_launch_of_rekindle_run_matches_plain_script(script: Path) -> None:
    pytest.importorskip("accelerate")
    launcher = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes=1")
    words = ("-m", "rekindle", "run", "--budget", TIGHT, "train.py")
    result = python(*launcher, *words, cwd=script.parent)
    assert result.returncode == 0, result.stderr
    assert result.stdout == python("train.py", cwd=script.parent).stdout
    assert "recomputations" in result.stderr


RANKS = """
import torch
from accelerate import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(1024, 64), batch_size=256)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    loss = (model(batch) - batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
total = sum(parameter.sum().item() for parameter in model.parameters())
with open(f"rank{accelerator.process_index}.txt", "w") as file:
    print(accelerator.num_processes, total, file=file)
# If DDP is freed after its process group, it sometimes aborts, also without a budget.
model, optimizer, data = accelerator.free_memory(model, optimizer, data)
accelerator.end_training()
"""


@pytest.mark.slow
def test_two_accelerate_ranks_with_budget_match_plain_ranks(tmp_path: Path) -> None:
    """Each rank has a budget and a report, and ends with the weights of a rank without a budget."""
    pytest.importorskip("accelerate")
    (tmp_path / "ranks.py").write_text(RANKS)
    launcher = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2")

    def launched(*words: str) -> list[str]:
        result = python(*launcher, *words, "ranks.py", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)]

    plain = launched()
    words = ("--budget", "900KiB", "--report", "json", "run.json")
    assert launched("-m", "rekindle", "run", *words) == plain
    assert plain[0].startswith("2 ")
    for rank in (0, 1):
        report = json.loads((tmp_path / f"run-rank{rank}.json").read_text())
        assert 0 < report["peak"] <= 900 * 1024
        assert report["recomputations"] > 0


def in_this_process(folder: Path, *words: str) -> Result:
    (folder / "train.py").write_text("print('it ran')")
    return CliRunner().invoke(main, ["run", "-q", *words])


def test_budget_option_after_script_name_causes_warning(folder: Path) -> None:
    reported = in_this_process(folder, "train.py", "--budget", "3MiB")
    assert (reported.exit_code, reported.stdout) == (0, "it ran\n")
    assert "write rekindle run --budget 3MiB train.py" in reported.stderr
    assert "--budget=3MiB" not in reported.stderr
    reported = in_this_process(folder, "train.py", "--budget=3MiB")
    assert "write rekindle run --budget 3MiB train.py" in reported.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("train.py", "--budget", "mine"),
        ("train.py", "--budget"),
        ("--budget", "auto", "train.py", "--budget", "3MiB"),
        ("train.py", "--budget-of-time", "3"),
    ],
)
def test_other_option_after_script_name_causes_no_warning(
    folder: Path, words: tuple[str, ...]
) -> None:
    assert "stands after" not in in_this_process(folder, *words).stderr


def test_run_without_budget_option_uses_rekindle_budget_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_BUDGET", "5MiB")
    (folder / "train.py").write_text("import torch; torch.ones(9)")
    words = ["run", "--report", "json", "run.json", "train.py"]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert json.loads((folder / "run.json").read_text())["budget"] == 5 << 20
    monkeypatch.setenv("REKINDLE_BUDGET", "5 potatoes")
    reported = CliRunner().invoke(main, words)
    assert reported.exit_code == 2
    assert "write REKINDLE_BUDGET=" in reported.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("nowhere.py",), "there is no file nowhere.py"),
        (("weights.pt",), "weights.pt: wanted a program, got a checkpoint of PyTorch"),
        (("step.jsonl",), "step.jsonl: wanted a program, got a trace"),
        ((".",), ".: wanted a program, got a folder without a __main__.py"),
        (("-m", "no.such.module"), "no.such.module"),
        (("--budget", "6 Gigs", "train.py"), '--budget "6GiB"'),
        (("--budget", "-5", "train.py"), '--budget "6GiB"'),
        (("--policy", "newest", "train.py"), "lru"),
        (("--device", "gpu", "train.py"), 'device="cpu"'),
        (("--report", "html", "no/folder/x.html", "train.py"), "there is no folder no/folder"),
        (("--profile", "--learn", "train.py"), "leave one of them out"),
        (
            ("--profile", "--swap", "1GiB", "--evict", "anything", "train.py"),
            "rekindle profile --swap",
        ),
        (("--learn", "--no-learn", "train.py"), "leave one of them out"),
        (("--no-learn", "--learn-wait", "train.py"), "--learn-wait and --no-learn"),
        (("--swap", "1", "train.py"), '--swap "1GiB"'),
        (("--budget", "24", "train.py"), '--budget "24GiB"'),
        (("--swap-directory", "/tmp", "train.py"), "swap="),
    ],
)
def test_run_with_wrong_command_line_does_not_run_script(
    folder: Path, words: tuple[str, ...], hint: str
) -> None:
    (folder / "train.py").write_text("raise AssertionError('it ran')")
    torch.save({}, folder / "weights.pt")
    save(chain(3), folder / "step.jsonl")
    result = CliRunner().invoke(main, ["run", *words])
    assert result.exit_code in (1, 2)
    assert hint in result.stderr


def test_budgets_that_failed_runs_suggest_reach_need_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line rounds a suggestion up. The next run must know it as a suggestion."""
    monkeypatch.setenv("REKINDLE_CACHE", str(own_cache(tmp_path / "cache")))
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "parts, x = [], torch.randn(512, 512)\n"
        "for i in range(40):\n"
        "    parts.append(x * i)  # another MiB that the program holds\n"
    )
    budgets = ["20MiB"]
    while True:
        done = run("-q", "--evict=saved", "--budget", budgets[-1], script, cwd=tmp_path)
        if done.returncode == 0:
            break
        budgets += re.findall(r"--budget (\S+)", done.stderr)[-1:]
    assert len(budgets) == 4
