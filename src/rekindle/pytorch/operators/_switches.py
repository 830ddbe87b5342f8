"""PyTorch's switches: what an operator's bits depend on beside its arguments.

Default type, kernels of oneDNN, deterministic algorithms, precision of products, number of threads:
a program may change each of them between the forward pass and recomputation. A recipe has them as
they stood; recomputation puts them back to that, and afterwards to what the program set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

from rekindle.pytorch.devices import accelerator

_C: Any = torch._C

State = tuple[Any, ...]  #: what each of `SWITCHES` is at; equal ones are one object

_DENORMAL = 5e-324


@final
@dataclass(frozen=True, slots=True)
class Switch:
    """How to read one and how to set it. Set is only what reads differently."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


def _plain(name: str) -> Switch:
    return Switch(getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}"))


def _precision(backend: str, operators: str) -> Switch:
    return Switch(
        lambda: _C._get_fp32_precision_getter(backend, operators),
        lambda value: _C._set_fp32_precision_setter(backend, operators, value),
    )


def _legacy_precision() -> str | None:
    try:
        return _C._get_float32_matmul_precision()
    except RuntimeError:  # the program sets precisions by the newer functions
        return None


def _set_legacy_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _deterministic() -> tuple[bool, bool]:
    return _C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    _C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _flushes_denormal() -> bool:
    return _DENORMAL * 1.0 == 0.0


def _reduction(name: str) -> Switch:
    """Two settings by one function, which gives them as a pair and takes them apart."""
    get, put = getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}")
    return Switch(get, lambda pair: put(*pair))


_ON_CUDA = (
    "blas_preferred_backend",
    "cublas_allow_fp16_accumulation",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cudnn_enabled",
)
_REDUCTIONS = (
    "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_reduced_precision_reduction",
)
#: Those of CUDA, wherever they are looked at.
ON_CUDA = (*map(_plain, _ON_CUDA), *map(_reduction, _REDUCTIONS))
_CUDA = ON_CUDA if accelerator.IS_BUILT else ()
#: From the general to the particular: to set one may set those that follow.
SWITCHES = (
    Switch(torch.get_default_dtype, torch.set_default_dtype),
    Switch(torch.get_num_threads, torch.set_num_threads),
    Switch(_flushes_denormal, torch.set_flush_denormal),
    Switch(_deterministic, _set_deterministic),
    _plain("mkldnn_enabled"),
    _plain("mkldnn_deterministic"),
    _plain("nnpack_enabled"),
    _plain("cpu_allow_fp16_reduced_precision_reduction"),
    _plain("linalg_preferred_backend"),
    *_CUDA,
    Switch(_legacy_precision, _set_legacy_precision),
    _precision("generic", "all"),
    *(
        _precision(backend, operators)
        for backend in ("cuda", "mkldnn")
        for operators in ("all", "matmul", "conv", "rnn")
    ),
)
_states: dict[State, State] = {}


@final
class Switches:
    """How they stand, at a fraction of a microsecond a look while nobody turns one."""

    def __init__(self) -> None:
        self._last: tuple[Any, ...] = ()
        self._last_precision: tuple[Any, ...] = ()
        self._state: State = ()

    def now(self, precise: bool) -> State:
        """As they stand; unless `precise`, those of precision may be as they stood before."""
        last = (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            _DENORMAL * 1.0 == 0.0,
            _C._get_deterministic_algorithms(),
            _C._get_deterministic_algorithms_warn_only(),
            _C._get_mkldnn_enabled(),
            _C._get_mkldnn_deterministic(),
            _C._get_nnpack_enabled(),
            _C._get_cpu_allow_fp16_reduced_precision_reduction(),
        )
        if _CUDA:
            last += tuple([switch.get() for switch in _CUDA])
        if last != self._last or (precise and self._precision_changed()):
            self._last = last
            self._state = self.read()
        return self._state

    def read(self) -> State:
        """All of them, as they stand."""
        state = tuple([switch.get() for switch in SWITCHES])
        return _states.setdefault(state, state)

    def _precision_changed(self) -> bool:
        read = _C._get_fp32_precision_getter
        before = self._last_precision
        self._last_precision = now = (  # the older functions set these as well
            read("mkldnn", "matmul"),
            read("mkldnn", "conv"),
            read("mkldnn", "rnn"),
        )
        if _CUDA:
            self._last_precision = now = (
                *now,
                read("cuda", "matmul"),
                read("cuda", "conv"),
                read("cuda", "rnn"),
                _C._get_linalg_preferred_backend(),
            )
        return now != before


switches = Switches()


def kernels_in_words() -> str:
    """What a device's kernels are chosen by, and so what they cost."""
    precision = _C._get_fp32_precision_getter("cuda", "matmul")
    chosen = "benchmark" if _C._get_cudnn_benchmark() else "heuristics"
    settled = _C._get_cudnn_deterministic() or _C._get_deterministic_algorithms()
    return f"{precision}-{chosen}{'-deterministic' if settled else ''}"


def kernels_are_timed() -> bool:
    """Whether cuDNN tries its kernels and takes the quickest, which may be another one later."""
    settled = _C._get_cudnn_deterministic() or _C._get_deterministic_algorithms()
    return _C._get_cudnn_benchmark() and not settled


@contextmanager
def switched(state: State) -> Iterator[None]:
    """Inside, they are as they were when `state` was read."""
    if switches.now(precise=True) is state:
        yield
        return
    now = switches.read()
    _set(state)
    try:
        yield
    finally:
        _set(now)


def _set(state: State) -> None:
    for switch, value in zip(SWITCHES, state, strict=True):
        if switch.get() != value:
            switch.set(value)
