"""What PyTorch itself refuses under a budget."""

from __future__ import annotations

from typing import Final

#: What PyTorch itself refuses under a budget: a part of its message, and what to do instead.
REFUSED_BY_TORCH: Final = {
    "support saved tensor hooks": (
        "a torch.func transform (grad, vjp, jacrev, hessian) inside rekindle.budget(...), "
        "which works by saved tensor hooks: those transforms have none. Use "
        "loss.backward() or torch.autograd.grad(...), or leave the budget for it"
    ),
}
