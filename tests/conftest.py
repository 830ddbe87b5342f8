"""Skip slow tests, limit the time of the others, and keep tests away from the user's cache."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings

from tests import durations
from tests.changed import Landing
from tests.helpers import own_cache

for _absent in (torch.cuda, torch.xpu, torch.mtia):
    # For each absent device, `torch.manual_seed` formats the stack of calls: a fifth of the time of
    # some test files.
    if not _absent.is_available():
        _absent.traceback = SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]

_EXAMPLES = {"fast": 20, "ci": 50, "whole": 100}  # of each property, by profile of hypothesis
for _name, _most in _EXAMPLES.items():
    settings.register_profile(_name, settings.get_profile("ci"), max_examples=_most)

_ROOT = Path(__file__).parents[1]
_SLOW = durations.read_slow()
_MARKED = "not slow"  #: pytest's option `-m` that excludes slow tests
_started = pytest.StashKey[float]()
_frozen_for = pytest.StashKey[Path]()
_recorder = pytest.StashKey["_Recorder"]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--measure",
        action="store_true",
        help="write the tests that were slow into tests/slow.txt",
    )
    parser.addoption(
        "--limit",
        type=float,
        default=durations.LIMIT,
        help="processor seconds after which a test that is not slow fails; 0: none does",
    )
    parser.addoption(
        "--part", default="1/1", help="of all tests this part: 2/3 is the second third"
    )
    parser.addoption(
        "--landing",
        metavar="COMMIT",
        help="of the slow tests only those that belong to files changed since the last landed "
        "COMMIT (empty: tests.changed finds it), and a share of the others",
    )
    parser.addoption(
        "--clock",
        default="",
        help="multiply each time that Rekindle measures: slow (by 10), fast (by 0.1), or "
        "random:SEED (by 0.1 to 10)",
    )
    # Other conftest.py files import Rekindle, which reads this variable, before `pytest_configure`.
    # The processes of pytest-xdist inherit it.
    config = pluginmanager.getplugin("pytestconfig")
    if speed := parser.parse_known_args(config.invocation_params.args).clock:
        os.environ["REKINDLE_TEST_CLOCK"] = speed


def pytest_configure(config: pytest.Config) -> None:
    # A shell ignores Ctrl-C in what it runs in the background, and tests send it to themselves.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        recorder = config.stash[_recorder] = _Recorder(config)
        config.pluginmanager.register(recorder)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip importing a file whose tests are all slow if slow tests are excluded."""
    if config.getoption("-m") != _MARKED or not collection_path.is_relative_to(_ROOT):
        return None
    return True if collection_path.relative_to(_ROOT).as_posix() in _SLOW else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if durations.is_slow(item.nodeid, _SLOW):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep every n-th of the selected tests, for a shard of CI.

    Raise if a test id contains a memory address, which differs between parallel processes.
    """
    for each in items:
        if " at 0x" in each.nodeid:
            raise pytest.UsageError(f"{each.nodeid}: write ids=name_of in its parametrize")
    since = config.getoption("--landing")
    if since is not None:
        landing = Landing.of_head(since)
        _keep(
            config,
            items,
            lambda at, item: item.get_closest_marker("slow") is None or landing.runs(item.nodeid),
        )
    part, parts = (int(each) for each in config.getoption("--part").split("/"))
    _keep(config, items, lambda at, item: at % parts == part - 1)


def _keep(
    config: pytest.Config, items: list[pytest.Item], wanted: Callable[[int, pytest.Item], bool]
) -> None:
    """Remove the items for whose index and item `wanted` returns False."""
    kept = [each for at, each in enumerate(items) if wanted(at, each)]
    config.hook.pytest_deselected(items=[each for each in items if each not in {*kept}])
    items[:] = kept


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    if item.path != item.config.stash.get(_frozen_for, None):
        # Exempt all that was imported so far from garbage collection, which then takes a tenth of
        # the time: many tests collect garbage, to see that nothing stays in memory.
        item.config.stash[_frozen_for] = item.path
        gc.collect()
        gc.freeze()
    item.stash[_started] = durations.processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport]:
    report = yield
    taken = durations.processor_seconds() - item.stash[_started]
    if report.when == "teardown":
        item.user_properties.append(("processor", taken))
        report.user_properties = item.user_properties
    if report.when == "call" and item.get_closest_marker("slow") is None:
        durations.judge(report, taken, _limit(item))
    return report


def _limit(item: pytest.Item) -> float:
    """Return the processor seconds that the test may take, more for a test of more examples."""
    share = settings().max_examples / settings.get_profile("fast").max_examples
    drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return item.config.getoption("--limit") * (max(1, share) if drawn else 1)


class _Recorder:
    """Record the processor time of each test in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = {}
        self._marked: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            return
        self._seconds[report.nodeid] = dict(report.user_properties)["processor"]
        if "slow" in report.keywords and not durations.is_slow(report.nodeid, _SLOW):
            self._marked.add(report.nodeid)

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int
    ) -> None:
        if not self._seconds:
            return
        for line in durations.report(self._seconds):
            terminalreporter.write_line(line)
        whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if whole and self._config.getoption("--measure"):
            durations.write_slow(durations.find_slow(self._seconds, _SLOW, self._marked))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give the tests a cache folder of their own, also in processes that they start."""
    os.environ["REKINDLE_CACHE"] = str(own_cache(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session", autouse=True)
def _slow_training_is_no_warning() -> Iterator[None]:
    """Let Rekindle not warn that a budget makes training slow: on a slow machine many tests do."""
    from rekindle.pytorch.native import _driver

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_driver, "MUCH_LOST", 10**18)
        yield


@pytest.fixture
def prices_of_plans(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Share the measured costs of operators among all tests that plan."""
    monkeypatch.setenv("REKINDLE_CACHE", str(own_cache(tmp_path_factory.getbasetemp() / "prices")))


@pytest.fixture
def kernels(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share one cache of Inductor among the tests that compile, separate from the user's cache."""
    folder = tmp_path_factory.getbasetemp() / "kernels"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))


@pytest.fixture
def nothing_left_compiled() -> Iterator[None]:
    """Discard compiled code before and after a test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
