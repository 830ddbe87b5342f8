"""Train PyTorch models inside a memory budget given in bytes.

This module lists the public names and holds no code of its own. Each name is imported on first
access, so that `import rekindle` is quick and loads none of torch, numpy and matplotlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rekindle import distributed as distributed
    from rekindle import integrations as integrations
    from rekindle import planners as planners
    from rekindle import policies as policies
    from rekindle import report as report
    from rekindle import schedule as schedule
    from rekindle import trace as trace
    from rekindle._errors import InvalidArgument as InvalidArgument
    from rekindle._errors import InvalidBudget as InvalidBudget
    from rekindle._errors import InvalidFile as InvalidFile
    from rekindle._errors import InvalidSchedule as InvalidSchedule
    from rekindle._errors import InvalidTrace as InvalidTrace
    from rekindle._errors import OutOfBudget as OutOfBudget
    from rekindle._errors import RekindleError as RekindleError
    from rekindle._errors import SwapFailed as SwapFailed
    from rekindle._errors import Unsupported as Unsupported
    from rekindle._errors import VerificationFailed as VerificationFailed
    from rekindle._facade import backend as backend
    from rekindle._facade import export as export
    from rekindle._facade import plan as plan
    from rekindle._facade import sequential as sequential
    from rekindle._predict import Batch as Batch
    from rekindle._predict import max_batch as max_batch
    from rekindle._predict import profile as profile
    from rekindle.pytorch import Estimate as Estimate
    from rekindle.pytorch import Run as Run
    from rekindle.pytorch import Verification as Verification
    from rekindle.pytorch import budget as budget
    from rekindle.pytorch import capture as capture
    from rekindle.pytorch import estimate as estimate
    from rekindle.pytorch import never_recompute as never_recompute
    from rekindle.pytorch import recomputable as recomputable
    from rekindle.pytorch import verify as verify
    from rekindle.pytorch.native import Step as Step
    from rekindle.pytorch.planned import Export as Export
    from rekindle.pytorch.planned import ModelPlan as ModelPlan
    from rekindle.simulator import simulate as simulate

__all__ = [
    "Batch",
    "Estimate",
    "Export",
    "InvalidArgument",
    "InvalidBudget",
    "InvalidFile",
    "InvalidSchedule",
    "InvalidTrace",
    "ModelPlan",
    "OutOfBudget",
    "RekindleError",
    "Run",
    "Step",
    "SwapFailed",
    "Unsupported",
    "Verification",
    "VerificationFailed",
    "__version__",
    "backend",
    "budget",
    "capture",
    "distributed",
    "estimate",
    "export",
    "integrations",
    "max_batch",
    "never_recompute",
    "plan",
    "planners",
    "policies",
    "profile",
    "recomputable",
    "report",
    "schedule",
    "sequential",
    "simulate",
    "trace",
    "verify",
]
__version__ = "0.1.0"

# Module that defines each public name. A name that is itself a public module is mapped to itself.
_HOME = {
    "Batch": "rekindle._predict",
    "Estimate": "rekindle.pytorch",
    "Export": "rekindle.pytorch.planned",
    "InvalidArgument": "rekindle._errors",
    "InvalidBudget": "rekindle._errors",
    "InvalidFile": "rekindle._errors",
    "InvalidSchedule": "rekindle._errors",
    "InvalidTrace": "rekindle._errors",
    "ModelPlan": "rekindle.pytorch.planned",
    "OutOfBudget": "rekindle._errors",
    "RekindleError": "rekindle._errors",
    "Run": "rekindle.pytorch",
    "Step": "rekindle.pytorch.native",
    "SwapFailed": "rekindle._errors",
    "Unsupported": "rekindle._errors",
    "Verification": "rekindle.pytorch",
    "VerificationFailed": "rekindle._errors",
    "backend": "rekindle._facade",
    "budget": "rekindle.pytorch",
    "capture": "rekindle.pytorch",
    "distributed": "rekindle.distributed",
    "estimate": "rekindle.pytorch",
    "export": "rekindle._facade",
    "integrations": "rekindle.integrations",
    "max_batch": "rekindle._predict",
    "never_recompute": "rekindle.pytorch",
    "plan": "rekindle._facade",
    "planners": "rekindle.planners",
    "policies": "rekindle.policies",
    "profile": "rekindle._predict",
    "recomputable": "rekindle.pytorch",
    "report": "rekindle.report",
    "schedule": "rekindle.schedule",
    "sequential": "rekindle._facade",
    "simulate": "rekindle.simulator",
    "trace": "rekindle.trace",
    "verify": "rekindle.pytorch",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(_unknown(name), name=name)
    module = import_module(_HOME[name])
    value: object = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value  # store it here, so that later accesses do not call `__getattr__`
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _unknown(name: str) -> str:
    """Return the message for an unknown attribute, with a close match if there is one."""
    from difflib import get_close_matches

    close = get_close_matches(name, __all__, n=1)
    hint = f"; did you mean rekindle.{close[0]}?" if close else ""
    return f"module 'rekindle' has no attribute {name!r}{hint}"
