"""`rekindle doctor`: show the installation, missing parts, and the command that adds them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click

from rekindle import __version__
from rekindle._cache import cache_folder, core_folder
from rekindle.cli._options import examples

_MAPS: Final = Path("/proc/self/maps")
_OTHER_TORCH: Final = (
    "install a torch that the page Compatibility lists, and report this line with the next version"
)
_PRELOADED: Final = ("jemalloc", "tcmalloc", "mimalloc")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the output: a part of the installation, its state, and advice."""

    name: str
    found: str
    advice: str = ""  # the command that adds the missing part; empty if nothing is missing
    needed: bool = False  # True: without this part the exit code is 1


@click.command(
    epilog=examples(
        "rekindle doctor",
        exits="1: PyTorch, a private name of it, or the native core is missing.",
    )
)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Show versions, devices, the native core, compiler, caches, and missing parts.

    Add the output to a bug report. The command compiles nothing and changes nothing.
    """
    rows = [
        *_versions(),
        *_torch(),
        *_native(),
        *_caches(),
        *_allocator(),
        *_extras(),
        *_settings(),
    ]
    width = max(len(row.name) for row in rows)
    for row in rows:
        click.echo(f"{row.name:<{width}}  {row.found}")
    missing = [row for row in rows if row.advice]
    if missing:
        click.echo("\nTo do:")
        for row in missing:
            click.echo(f"  {row.name}: {row.advice}")
    ctx.exit(1 if any(row.needed for row in missing) else 0)


def _versions() -> Iterator[Row]:
    import rekindle

    yield Row("rekindle", f"{__version__}, in {Path(rekindle.__file__).parent}")
    python = f"{platform.python_implementation()} {platform.python_version()}"
    yield Row("python", f"{python}, {sys.executable}")
    yield Row("system", platform.platform())


def _torch() -> Iterator[Row]:
    if find_spec("torch") is None:
        yield Row("torch", "not installed", "pip install torch", needed=True)
        return
    from rekindle.pytorch import environment

    found = environment()
    yield Row("torch", found.torch)
    for described in found.devices:
        yield Row("device", described)
    for setting in found.settings:
        yield Row("setting", setting)
    if found.missing:
        names = "; ".join(found.missing)
        yield Row("torch internals", f"not in this torch: {names}", _OTHER_TORCH, needed=True)
    if not found.core:
        refuses = f"; {found.refuses}" if found.refuses else ""
        guided = ", with profile-guided optimization" if found.guided else ""
        yield Row("native core", f"compiled{guided}{refuses}")
    elif "not been compiled" in found.core:
        yield Row("native core", found.core, "run `rekindle build`, which takes under a minute")
    else:
        yield Row("native core", f"not there: {found.core}", found.remedy, needed=True)


def _native() -> Iterator[Row]:
    from rekindle.native import compiler

    yield Row("compiler", compiler())


def _caches() -> Iterator[Row]:
    learned, cores = cache_folder(), core_folder()
    yield Row("cores", _folder(cores))
    yield Row("cache", "off: REKINDLE_CACHE=off" if learned is None else _folder(learned))


def _folder(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} (made when it is needed)"
    mib = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    writable = "" if os.access(folder, os.W_OK) else ", cannot be written"
    return f"{folder} ({mib:.1f} MiB{writable})"


def _allocator() -> Iterator[Row]:
    """Yield a row with the CPU memory allocator: that of the C library, or a preloaded one.

    The resident memory of a process depends on the allocator, because allocators keep freed memory.
    """
    libc = " ".join(platform.libc_ver()) or "the system's"
    loaded = _MAPS.read_text(encoding="utf-8") if _MAPS.exists() else ""
    others = [name for name in _PRELOADED if re.search(rf"/lib{name}[^/]*$", loaded, re.MULTILINE)]
    yield Row("allocator", f"{', '.join(others) or libc} (CPU)")


def _extras() -> Iterator[Row]:
    """Yield a row for each optional extra: its installed packages, and how to install the rest."""
    for extra, packages in _extra_packages().items():
        found: list[str] = []
        absent: list[str] = []
        for package in packages:
            try:
                found.append(f"{package} {importlib.metadata.version(package)}")
            except importlib.metadata.PackageNotFoundError:
                absent.append(package)
        missing = f"without {', '.join(absent)}: pip install 'rekindle[{extra}]'" if absent else ""
        yield Row(f"extra {extra}", "; ".join(filter(None, [", ".join(found), missing])))


def _extra_packages() -> dict[str, list[str]]:
    """Return the packages of each optional extra, from the metadata of the installed rekindle."""
    found: dict[str, list[str]] = {}
    try:
        requirements = importlib.metadata.requires("rekindle") or []
    except importlib.metadata.PackageNotFoundError:
        return found
    for requirement in requirements:
        package = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if package and extra:
            found.setdefault(extra[1], []).append(package[0])
    return found


def _settings() -> Iterator[Row]:
    for name in sorted(os.environ):
        if name.startswith("REKINDLE_") or name in ("CXX", "LD_PRELOAD", "OMP_NUM_THREADS"):
            yield Row("setting", f"{name}={os.environ[name]}")
