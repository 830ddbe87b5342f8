"""Finds a compiled extension, or compiles it with the compiler at hand.

One may have come with the package, for these sources and any torch of one minor version. Else it is
in the user's cache, for exactly these sources, this compiler, these flags and (where it is used)
this torch: all of them are in its key, so a change of any makes another one. Several processes may
ask at once: one compiles, the others wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final, final

FOLDER: Final = Path(__file__).parent
_SHIPPED: Final = "prebuilt"  # the folder of what came with the package
_UNFINISHED: Final = "build-"  # how folders are called in which something is compiled
FLAGS: Final = (
    "-std=c++20",
    "-O2",
    "-DNDEBUG",  # as PyTorch is built: without it the assertions in its headers are compiled in
    "-ffp-contract=off",  # floats are those of the Python engine, to the last bit
    "-fvisibility=hidden",
    "-fPIC",
)
_DAY_S: Final = 24 * 3600.0
_AGAIN_AFTER_S: Final = _DAY_S  # what failed is tried again: a disk may have been full
_OLD_S: Final = 30 * _DAY_S  # not used for so long, it is of sources or a torch that are gone


@final
class Unbuildable(Exception):
    """Why there is no extension, in one line."""


@final
@dataclass(frozen=True, slots=True)
class _Recipe:
    """How one extension is compiled; its key is a digest of all this."""

    name: str
    sources: tuple[Path, ...]
    compiler: tuple[str, ...]
    version: str  # what the compiler says of itself
    flags: tuple[str, ...]
    links: tuple[str, ...]
    torch: str

    def key(self) -> str:
        made_by = self.version, *self.compiler, *self.flags, *self.links, self.torch
        return _digest(self.sources, made_by)


_found: dict[str, ModuleType | str] = {}  # or why there is none


def _digest(sources: Sequence[Path], made_by: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (*made_by, _python()):
        digest.update(part.encode() + b"\0")
    for path in (*sources, *sorted(FOLDER.rglob("*.h"))):
        digest.update(str(path.relative_to(FOLDER)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def extension(
    name: str, sources: Sequence[str], *, with_torch: bool = False, build: bool = True
) -> ModuleType | None:
    """The extension module `name` made of `sources`, patterns in this folder.

    None: there is none, and `why_not(name)` says why. It is compiled on first use; with
    `build=False` only one that is there already is loaded.
    """
    found = _found.get(name)
    if isinstance(found, ModuleType):
        return found
    if isinstance(found, str) and build:
        return None
    module = _shipped(name, sources, with_torch=with_torch)
    if module is not None:
        _found[name] = module
        return module
    try:
        recipe = _recipe(name, sources, with_torch=with_torch)
        path = _cache() / f"{name}-{recipe.key()}.so"
        if not path.exists():
            if not build:
                return None
            _compile_once(recipe, path)
            _remove_old(path.parent)
        _found[name] = module = _load(name, path)
        with contextlib.suppress(OSError):
            _last_use(path).touch()
    except Unbuildable as reason:
        _found[name] = str(reason)
        return None
    return module


def why_not(name: str) -> str:
    """Why `extension(name, ...)` returned None the last time, in one line; empty if it did not."""
    found = _found.get(name, "")
    return found if isinstance(found, str) else ""


def ship(
    name: str, sources: Sequence[str], folder: Path, *, with_torch: bool = False
) -> Path | None:
    """`extension(...)`, copied into `folder` by the name that it has where it comes with a package.

    None: there is none, and `why_not(name)` says why.
    """
    module = extension(name, sources, with_torch=with_torch)
    if module is None:
        return None
    assert module.__file__ is not None
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / _shipped_name(name, sources, with_torch=with_torch)
    return Path(shutil.copyfile(module.__file__, target))


def _shipped(name: str, sources: Sequence[str], *, with_torch: bool) -> ModuleType | None:
    """What came with the package, if it did, is for this torch, and can be loaded."""
    folder = FOLDER / _SHIPPED
    if not folder.exists():  # most often: the sources need not be read for its name
        return None
    path = folder / _shipped_name(name, sources, with_torch=with_torch)
    if not path.exists():
        return None
    with contextlib.suppress(Unbuildable):
        return _load(name, path)
    return None


def _shipped_name(name: str, sources: Sequence[str], *, with_torch: bool) -> str:
    """Whatever compiler it was; torch keeps its binary interface within a minor version."""
    torch = ""
    if with_torch:
        import torch as installed

        minor = ".".join(installed.__version__.split(".")[:2])
        torch = f"torch {minor}, {installed.compiled_with_cxx11_abi()}"
    return f"{name}-{_digest(_paths(sources), [*FLAGS, torch])}.so"


def _paths(sources: Sequence[str]) -> list[Path]:
    return [path for pattern in sources for path in sorted(FOLDER.glob(pattern))]


def _recipe(name: str, sources: Sequence[str], *, with_torch: bool) -> _Recipe:
    compiler = _compiler()
    flags, links = [*FLAGS, f"-isystem{sysconfig.get_paths()['include']}"], ["-shared", "-pthread"]
    torch = ""
    if sys.platform == "darwin":
        links += ["-undefined", "dynamic_lookup"]
    if with_torch:
        more, torch_links, torch = _torch()
        flags += more
        links += torch_links
    version = _run([*compiler, "--version"])
    if version.returncode != 0:
        raise Unbuildable(f"{compiler[0]} --version fails: {_first_line(version)}")
    return _Recipe(
        name, tuple(_paths(sources)), compiler, version.stdout, tuple(flags), tuple(links), torch
    )


def _torch() -> tuple[list[str], list[str], str]:
    """Flags and libraries of the torch that is installed, and which it is."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Unbuildable("torch is not installed")
    import torch

    home = Path(spec.origin).resolve().parent  # by whichever link it was found
    include = home / "include"
    abi = int(torch.compiled_with_cxx11_abi())
    flags = [
        f"-isystem{include}",
        f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
    ]
    # Where these lie Linux need not be told: torch is loaded before, and with it all of them.
    library = home / "lib"
    links = [f"-L{library}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    if sys.platform == "darwin":
        links.append(f"-Wl,-rpath,{library}")
    return flags, links, f"{torch.__version__} {torch.version.git_version}"


def _compiler() -> tuple[str, ...]:
    """`$CXX`, or the first of the usual ones."""
    if sys.platform == "win32":
        raise Unbuildable("the native core is not built on Windows yet")
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["g++"], ["clang++"], ["c++"]]:
        path = shutil.which(command[0])
        if path is not None:
            return (path, *command[1:])
    if chosen:
        raise Unbuildable(f"no C++ compiler: $CXX is {chosen[0]}, which is not found")
    raise Unbuildable("no C++ compiler (g++ or clang++) is found")


def _python() -> str:
    return f"{sys.implementation.cache_tag} {platform.machine()} {sysconfig.get_platform()}"


def _cache() -> Path:
    """The user's folder for what can be made again; made if it is not there."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(home) if Path(home).is_absolute() else Path.home() / ".cache") / "rekindle"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise Unbuildable(f"no folder to keep the compiled core in: {error}") from None
    return folder


def _compile_once(recipe: _Recipe, path: Path) -> None:
    """Compiles to `path` unless another process does so meanwhile."""
    failed = path.with_suffix(".failed")
    with _locked(_last_use(path)):
        if path.exists():
            return
        with contextlib.suppress(OSError):
            if time.time() - failed.stat().st_mtime < _AGAIN_AFTER_S:
                raise Unbuildable(failed.read_text(encoding="utf-8"))
        try:
            with _progress(recipe) as tell:
                _compile(recipe, path, tell)
        except OSError as error:
            raise Unbuildable(f"the native core cannot be compiled: {error}") from None
        except Unbuildable as reason:
            with contextlib.suppress(OSError):
                failed.write_text(str(reason), encoding="utf-8")
            raise


def _last_use(path: Path) -> Path:
    """The file beside a library that is locked while it is made, and touched when it is loaded."""
    return path.with_suffix(".lock")


def _remove_old(cache: Path) -> None:
    """Libraries that nobody loaded for long go, and what compilations left that were killed."""
    now = time.time()
    with contextlib.suppress(OSError):  # another process may be at it, too
        for each in cache.glob("*.lock"):
            if now - each.stat().st_mtime > _OLD_S:
                for suffix in (".so", ".failed", ".lock"):
                    each.with_suffix(suffix).unlink(missing_ok=True)
        for each in cache.glob(f"{_UNFINISHED}*"):
            if now - each.stat().st_mtime > _DAY_S:
                shutil.rmtree(each, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """No other process is in here with the same path."""
    import fcntl

    try:
        file = path.open("w")
    except OSError as error:
        raise Unbuildable(f"the folder for the compiled core: {error}") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_UNIT_BYTES: Final = 240_000  # of sources in a unit, at most


def _units(sources: Sequence[Path]) -> list[list[Path]]:
    """Group the sources of each folder into few translation units of about equal size.

    Parsing PyTorch's headers takes longer than compiling any one source.
    """
    units: list[list[Path]] = []
    for _, group in itertools.groupby(sources, key=lambda path: path.parent):
        files = list(group)
        sizes = [path.stat().st_size for path in files]
        count = -(-sum(sizes) // _UNIT_BYTES)
        parts: list[list[Path]] = [[] for _ in range(count)]
        before = 0
        for path, size in zip(files, sizes, strict=True):
            parts[(before + size // 2) * count // max(sum(sizes), 1)].append(path)
            before += size
        units += [part for part in parts if part]
    return units


def _compile(recipe: _Recipe, path: Path, tell: Callable[[int], None]) -> None:
    """Each source by itself, as many at a time as there are processors; then one library. `tell`
    hears how many are done."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_UNFINISHED) as folder:
        units = _units(recipe.sources)
        objects = [str(Path(folder, f"{i}.o")) for i in range(len(units))]
        files = [Path(folder, f"{i}.cpp") for i in range(len(units))]
        for file, unit in zip(files, units, strict=True):
            file.write_text("".join(f'#include "{source}"\n' for source in unit), "utf-8")

        def one(job: tuple[Path, str]) -> subprocess.CompletedProcess[str]:
            return _run([*recipe.compiler, *recipe.flags, "-c", str(job[0]), "-o", job[1]])

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            jobs = [pool.submit(one, job) for job in zip(files, objects, strict=True)]
            for number, done in enumerate(as_completed(jobs), start=1):
                _must(done.result())
                tell(number)
        made = Path(folder, path.name)
        _must(_run([*recipe.compiler, *objects, "-o", str(made), *recipe.links]))
        made.replace(path)  # whole, or not there


def _must(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode != 0:
        raise Unbuildable(f"{Path(done.args[0]).name} fails: {_first_line(done)}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, errors="replace"
        )
    except OSError as error:
        raise Unbuildable(f"{command[0]} cannot be run: {error}") from None


def _first_line(done: subprocess.CompletedProcess[str]) -> str:
    """What it complains of first."""
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    return (errors or lines or [f"it ends with {done.returncode}"])[0][:300]


_COMPILING: Final = "rekindle: compiling the native core, once: "


@contextlib.contextmanager
def _progress(recipe: _Recipe) -> Generator[Callable[[int], None]]:
    """One line that says what takes so long; on a terminal, how much of it is done as well."""
    terminal = sys.stderr
    if terminal is None:  # there is no console
        yield lambda done: None
        return
    files = f"{len(recipe.sources)} files"
    if not terminal.isatty():
        terminal.write(f"{_COMPILING}{files}; `rekindle build` does so ahead\n")
        terminal.flush()
        yield lambda done: None
        return

    def tell(done: int) -> None:
        terminal.write(f"\r\x1b[K{_COMPILING}{done} of {files}")
        terminal.flush()

    tell(0)
    try:
        yield tell
    finally:
        terminal.write("\r\x1b[K")
        terminal.flush()


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"rekindle.native.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise Unbuildable(f"{path.name} cannot be loaded: {error}") from None
    return module
