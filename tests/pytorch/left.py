"""Find changes of global state that a test could leave in the process for later tests."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.optim.optimizer as optimizers
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import is_in_any_mode_without_ignore_compile_internals

_PATCHED: Any = (torch.Tensor, torch.UntypedStorage, torch._C.TensorBase, threading.Thread)


def settings() -> dict[str, Any]:
    """Return the modes, hooks, switches and classes of PyTorch as they are now."""
    found: dict[str, Any] = {
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        # PyTorch's flag of an active mode. While it is set, torch.compile compiles at each call.
        "note of modes": is_in_any_mode_without_ignore_compile_internals(),
        "function modes": torch._C._len_torch_function_stack(),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "hooks before optimizers": list(optimizers._global_optimizer_pre_hooks),
        "hooks after optimizers": list(optimizers._global_optimizer_post_hooks),
        "hooks before modules": list(modules._global_forward_pre_hooks),
        "hooks after modules": list(modules._global_forward_hooks),
        "hooks of parameters": list(modules._global_parameter_registration_hooks),
        "hooks of buffers": list(modules._global_buffer_registration_hooks),
        "swap_tensors": torch.utils.swap_tensors,
        "states of generators": torch.Generator.get_state,
    }
    for each in _PATCHED:
        found[f"attributes of {each.__name__}"] = dict(vars(each))
    return found


def behind(before: dict[str, Any]) -> list[str]:
    """Return the differences from the state `before`.

    New attributes that PyTorch makes on first use are no difference.
    """
    changed: list[str] = []
    for name, now in settings().items():
        was = before[name]
        if name.startswith("attributes"):
            changed += [f"{name}: {key}" for key in was if now.get(key) is not was[key]]
        elif now != was:
            changed.append(f"{name}: {was} -> {now}")
    return changed
