"""Find a compiled extension, or compile it with the compiler at hand.

An installed wheel may contain an extension, built from these sources for any torch of one minor
version. Otherwise the extension is in the user's cache. Its file name there contains a digest of
the sources, the compiler's version, the flags, Python, and PyTorch's version and commit.
Installation paths are not part of the digest, so all environments share one extension. If several
processes need an extension at once, one compiles and the others wait.

`_compile` runs the compilers. Callers are `rekindle.native` and `rekindle.pytorch.native`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final, final

from rekindle._cache import core_folder
from rekindle.native import _compile
from rekindle.native._compile import CompilerError, Job, Unit

FOLDER: Final = Path(__file__).parent
_SHIPPED: Final = "prebuilt"  # folder of the extensions that an installed wheel contains
_UNFINISHED: Final = "build-"  # prefix of the names of folders in which a build runs
# Folder of object files. If a source changes, only its translation unit is compiled again.
_OBJECTS: Final = "objects"
_WITHOUT_TORCH: Final = ("base", "engine", "replay")  # folders whose sources do not include PyTorch
FLAGS: Final = (
    "-std=c++20",
    "-O2",
    "-DNDEBUG",  # as in PyTorch's own build; otherwise its headers' assertions are compiled in
    "-ffp-contract=off",  # so that floats equal those of the Python engine, bit for bit
    "-fvisibility=hidden",
    "-fPIC",
)
# Options of g++ for profile-guided optimization. Threads count with atomic additions. Functions
# that the training program does not call are optimized as without counts.
_COUNTED: Final = ("-fprofile-generate", "-fprofile-update=atomic")
_GUIDED: Final = (
    "-fprofile-use",
    "-fprofile-partial-training",
    "-Wno-missing-profile",
    "-DREKINDLE_GUIDED",
)
_DAY_S: Final = 24 * 3600.0
# Time until a failed build is tried again, because the reason may have been temporary (a full
# disk).
_AGAIN_AFTER_S: Final = _DAY_S
_OLD_S: Final = 30 * _DAY_S  # age without use after which an extension is removed
_KEPT: Final = 8  # number of most recently used extensions to keep for each name


@final
class Unbuildable(Exception):
    """The extension cannot be found or built; the message says why, in one line."""


@final
@dataclass(frozen=True, slots=True)
class _Recipe:
    """Inputs of the build of one extension module: sources, compiler and versions."""

    name: str
    units: tuple[Unit, ...]
    compiler: tuple[str, ...]
    version: str  # first line that the compiler prints for `--version`
    torch: _Torch | None

    @property
    def made_by(self) -> tuple[str, ...]:
        """Inputs of the digest other than sources; no paths, because they change no result."""
        return (
            self.version,
            *self.compiler[1:],
            *FLAGS,
            *(self.torch.made_by if self.torch else ()),
        )

    def key(self) -> str:
        """Return the digest for the extension's file name."""
        return _digest([source for unit in self.units for source in unit.sources], self.made_by)

    def object_key(self, unit: Unit) -> str:
        """Return the digest for the file name of a unit's object file."""
        made_by = self.made_by if unit.with_torch else (self.version, *self.compiler[1:], *FLAGS)
        return _digest(unit.sources, made_by)

    def command(
        self, unit: Unit, source: Path, target: Path, more: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Return the command that compiles `unit`, whose text is in the file `source`.

        Args:
            unit: Sources to compile.
            source: File with the text of the unit.
            target: Object file.
            more: Options in addition to `FLAGS`.
        """
        flags = [*FLAGS, *more, f"-isystem{sysconfig.get_paths()['include']}"]
        if unit.with_torch and self.torch:
            flags += self.torch.flags
        return (*self.compiler, *flags, "-c", str(source), "-o", str(target))

    def link(
        self, objects: Sequence[Path], target: Path, more: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Return the command that links the object files into a library at `target`."""
        links = ["-shared", "-pthread", *more]
        if sys.platform == "darwin":
            links += ["-undefined", "dynamic_lookup"]
        if self.torch:
            links += self.torch.links
        return (*self.compiler, *map(str, objects), "-o", str(target), *links)


@final
@dataclass(frozen=True, slots=True)
class _Torch:
    """Options for compiling and linking against the installed PyTorch."""

    flags: tuple[str, ...]
    links: tuple[str, ...]
    made_by: tuple[str, ...]  # version and commit, which are part of the digest


# For each extension name, the loaded module, or the reason why it could not be loaded.
_found: dict[str, ModuleType | str] = {}


def _digest(sources: Sequence[Path], made_by: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (*made_by, _python()):
        digest.update(part.encode() + b"\0")
    headers = {path: path.read_bytes() for path in FOLDER.rglob("*.h")}
    for path in (*sources, *_compile.included(sources, headers)):
        digest.update(str(path.relative_to(FOLDER)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def extension(
    name: str, sources: Sequence[str], *, with_torch: bool = False, build: bool = True
) -> ModuleType | None:
    """Load an extension module, and compile it on first use.

    Args:
        name: Name of the module.
        sources: Patterns of source files, relative to this folder.
        with_torch: The sources use PyTorch.
        build: Compile the module if it is missing.

    Returns:
        The module, or None if it is missing. `why_not(name)` says why.
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
        path = _folder() / f"{name}-{recipe.key()}.so"
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


def compiler() -> str:
    """Return the compiler's command and version, or why no compiler is found."""
    try:
        found = _compiler()
        return f"{' '.join(found)}: {_version_of(found)}"
    except Unbuildable as reason:
        return f"none: {reason}"


def why_not(name: str) -> str:
    """Return in one line why `extension(name, ...)` returned None.

    Returns:
        The reason, or an empty string if the last call returned a module.
    """
    found = _found.get(name, "")
    return found if isinstance(found, str) else ""


def ship(
    name: str, sources: Sequence[str], folder: Path, *, with_torch: bool = False
) -> Path | None:
    """Copy an extension into `folder`, under the name that it has in a wheel.

    The other arguments are those of `extension`.

    Returns:
        The path of the copy, or None if there is no extension. `why_not(name)` says why.
    """
    module = extension(name, sources, with_torch=with_torch)
    if module is None:
        return None
    assert module.__file__ is not None
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / _shipped_name(name, sources, with_torch=with_torch)
    return Path(shutil.copyfile(module.__file__, target))


def rebuild_guided(
    name: str,
    sources: Sequence[str],
    training: Sequence[str],
    *,
    with_torch: bool = False,
) -> None:
    """Compile an extension again, optimized for the calls that a training program makes.

    This is profile-guided optimization (PGO). The extension is compiled with counters, the training
    program runs with it, and the extension is compiled again with the counts. It replaces the
    extension in the cache, and behaves like it.

    Args:
        name: Name of the extension.
        sources: Patterns of source files, as for `extension`.
        training: Command of the training program. In its environment, `REKINDLE_CACHE` names a
            temporary cache with the extension that counts.
        with_torch: The sources use PyTorch.

    Raises:
        Unbuildable: There is no g++, a compilation fails, or the training program fails.
    """
    recipe = _recipe(name, sources, with_torch=with_torch)
    if "clang" in recipe.version.lower():
        raise Unbuildable(f"profile-guided optimization needs g++, not {recipe.version}")
    path = _folder().resolve() / f"{name}-{recipe.key()}.so"
    with _locked(_last_use(path)), tempfile.TemporaryDirectory(
        dir=path.parent, prefix=_UNFINISHED
    ) as made:  # fmt: skip
        folder = Path(made)
        cache = folder / "cache" / path.parent.name
        cache.mkdir(parents=True)
        for other in path.parent.glob("*.so"):
            if other != path:
                (cache / other.name).symlink_to(other)
        try:
            _compile_in(recipe, folder, cache / path.name, _COUNTED, "compile with counters")
            environment = os.environ | {"REKINDLE_CACHE": str(cache.parent)}
            _train(training, environment)
            if not any(folder.glob("*.gcda")):
                raise Unbuildable("the training program did not load the extension")
            library = folder / path.name
            _compile_in(recipe, folder, library, _GUIDED, "compile with the counts")
        except (OSError, CompilerError) as error:
            raise Unbuildable(str(error)) from None
        library.replace(path)


def _train(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run the training program of `rebuild_guided`."""
    sys.stderr.write("rekindle: run the training program, which takes less than a minute\n")
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, errors="replace"
    )
    if done.returncode:
        last = [*filter(None, done.stderr.splitlines()), f"exit code {done.returncode}"][-2:]
        raise Unbuildable(f"the training program fails: {' '.join(last)}")


def _compile_in(
    recipe: _Recipe, folder: Path, library: Path, options: Sequence[str], stage: str
) -> None:
    """Compile all units in `folder` with additional options, and link them.

    The paths of the object files do not depend on the options, because the compiler finds the
    counts of an object file by its path.
    """
    objects = [folder / f"unit{number}.o" for number in range(len(recipe.units))]
    units = zip(recipe.units, objects, strict=True)
    with _compile.shown_progress(folder, [unit.cost for unit in recipe.units], stage) as progress:
        _compile.run_all(_jobs(recipe, units, options), folder, progress)
    _compile.run(recipe.link(objects, library, options))


def _jobs(
    recipe: _Recipe, units: Iterable[tuple[Unit, Path]], options: Sequence[str] = ()
) -> list[Job]:
    """Write the text of each unit beside its object file. Return the commands that compile them."""
    jobs: list[Job] = []
    for unit, target in units:
        source = target.with_suffix(".cpp")
        source.write_text(unit.text, encoding="utf-8")
        jobs.append(Job(recipe.command(unit, source, target, options), unit.cost))
    return jobs


def _shipped(name: str, sources: Sequence[str], *, with_torch: bool) -> ModuleType | None:
    """Load the extension from the installed wheel; return None if it has none for this torch."""
    folder = FOLDER / _SHIPPED
    if not folder.exists():  # Leave early, because computing the file name would read all sources.
        return None
    path = folder / _shipped_name(name, sources, with_torch=with_torch)
    if not path.exists():
        return None
    with contextlib.suppress(Unbuildable):
        return _load(name, path)
    return None


def _shipped_name(name: str, sources: Sequence[str], *, with_torch: bool) -> str:
    """Return the file name of an extension in a wheel.

    The name does not depend on the compiler, nor on torch's patch version: torch keeps its binary
    interface within a minor version.
    """
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
    version = _version_of(compiler)
    units = _compile.units_of(_paths(sources), _WITHOUT_TORCH)
    return _Recipe(name, tuple(units), compiler, version, _torch() if with_torch else None)


def _torch() -> _Torch:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Unbuildable("torch is not installed")
    import torch

    # Resolve symbolic links, so that all paths to one torch give the same folder.
    home = Path(spec.origin).resolve().parent
    include, library = home / "include", home / "lib"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    made_by = [abi, torch.__version__, str(torch.version.git_version)]
    # Linux needs no rpath: torch is loaded before the extension.
    links = [f"-L{library}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    if sys.platform == "darwin":
        links.append(f"-Wl,-rpath,{library}")
        made_by.append(str(library))
    api = include / "torch" / "csrc" / "api" / "include"
    return _Torch((f"-isystem{include}", f"-isystem{api}", abi), tuple(links), tuple(made_by))


def _compiler() -> tuple[str, ...]:
    """Return the command in `$CXX`, or the first common compiler that is installed."""
    if sys.platform == "win32":
        raise Unbuildable("the native core cannot be built on Windows yet")
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["g++"], ["clang++"], ["c++"]]:
        path = shutil.which(command[0])
        if path is not None:
            return (path, *command[1:])
    if chosen:
        raise Unbuildable(f"no C++ compiler: $CXX names {chosen[0]}, which is not installed")
    raise Unbuildable("no C++ compiler (g++ or clang++) is installed")


def _version_of(compiler: Sequence[str]) -> str:
    """Return the first line of a compiler's own description (`--version`)."""
    try:
        return _compile.run([*compiler, "--version"]).partition("\n")[0]
    except CompilerError as error:
        raise Unbuildable(f"{compiler[0]} --version fails: {error}") from None


def _python() -> str:
    return f"{sys.implementation.cache_tag} {platform.machine()} {sysconfig.get_platform()}"


def _folder() -> Path:
    """Return the cache folder of compiled extensions. Create it if it is missing."""
    try:
        folder = core_folder()
        (folder / _OBJECTS).mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise Unbuildable(f"the folder for the compiled core cannot be made: {error}") from None
    return folder


def _compile_once(recipe: _Recipe, path: Path) -> None:
    """Build the extension at `path`, unless another process builds it in the meantime."""
    failed = path.with_suffix(".failed")
    with _locked(_last_use(path)):
        if path.exists():
            return
        with contextlib.suppress(OSError):
            if time.time() - failed.stat().st_mtime < _AGAIN_AFTER_S:
                raise Unbuildable(failed.read_text(encoding="utf-8"))
        try:
            _compile_and_link(recipe, path)
        except OSError as error:
            raise Unbuildable(f"the native core cannot be compiled: {error}") from None
        except CompilerError as error:
            with contextlib.suppress(OSError):
                failed.write_text(str(error), encoding="utf-8")
            raise Unbuildable(str(error)) from None


def _last_use(path: Path) -> Path:
    """Return the lock file of the extension at `path`; its time is that of the last load."""
    return path.with_suffix(".lock")


def _remove_old(cache: Path) -> None:
    """Remove old unused extensions and object files, and the folders of killed builds."""
    now = time.time()
    with contextlib.suppress(OSError):  # Another process may be removing the same files.
        by_name: dict[str, list[tuple[float, Path]]] = {}
        for each in cache.glob("*.lock"):
            by_name.setdefault(each.name.partition("-")[0], []).append((each.stat().st_mtime, each))
        for locks in by_name.values():
            for place, (used, each) in enumerate(sorted(locks, reverse=True)):
                if now - used > _OLD_S or (place >= _KEPT and now - used > _DAY_S):
                    for suffix in (".so", ".failed", ".lock"):
                        each.with_suffix(suffix).unlink(missing_ok=True)
        for each in (cache / _OBJECTS).glob("*.o"):
            if now - each.stat().st_mtime > _DAY_S:
                each.unlink(missing_ok=True)
        for each in cache.glob(f"{_UNFINISHED}*"):
            if now - each.stat().st_mtime > _DAY_S:
                shutil.rmtree(each, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold a lock on the file `path` that excludes other processes."""
    import fcntl

    try:
        file = path.open("w")
    except OSError as error:
        raise Unbuildable(f"the folder for the compiled core cannot be used: {error}") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile_and_link(recipe: _Recipe, path: Path) -> None:
    """Compile the units that have no object file yet, and link all units.

    The extension appears at `path` in one step, so other processes never see half of it.
    """
    objects = [path.parent / _OBJECTS / f"{recipe.object_key(unit)}.o" for unit in recipe.units]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_UNFINISHED) as name:
        folder = Path(name)
        missing: dict[Path, Unit] = {}
        for unit, target in zip(recipe.units, objects, strict=True):
            if target.exists():
                target.touch()
            else:
                missing[target] = unit
        jobs = _jobs(recipe, [(unit, folder / target.name) for target, unit in missing.items()])
        with _compile.shown_progress(path.parent, [job.cost for job in jobs]) as progress:
            _compile.run_all(jobs, folder, progress)
        for target in missing:
            (folder / target.name).replace(target)
        library = folder / path.name
        _compile.run(recipe.link(objects, library))
        library.replace(path)


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
