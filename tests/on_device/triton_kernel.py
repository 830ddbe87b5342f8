"""One Triton kernel, which only a build of PyTorch for CUDA can compile."""

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(x, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < count
    value = tl.load(x + at, mask=inside)
    tl.store(out + at, value + value, mask=inside)


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Return twice `x`, computed by the Triton kernel."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), block=1024)
    return out
