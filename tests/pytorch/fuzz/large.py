"""The lines of random programs whose tensors are large, for operators that run in slices.

Most lines are operators that `split="equal"` knows, on matrices of up to a few MiB, with views,
writes and other operators between them.
"""

from __future__ import annotations

from random import Random

from tests.pytorch.fuzz.lines import Lines
from tests.pytorch.fuzz.program import Program

UNARY = (
    "relu() tanh() sigmoid() exp() neg() abs() square() mul(0.5) mul(0.5).add(0.1) erf() sin() "
    "clamp(0.2,0.8) pow(3) abs().sqrt() abs().log1p() abs().rsqrt() double() bfloat16() half() "
    "float() softmax(-1) softmax(0) log_softmax(-1) log_softmax(0) log_softmax(1) sum(0) sum(-1) "
    "sum(1) mean(0,keepdim=True) mean(-1,keepdim=True) amax(0) amax(-1) amin(1,keepdim=True) "
    "argmax(-1) argmax(0) argmin(-1) sum((0,-1)) logsumexp(-1) var(0) norm() sum() clone() "
    "contiguous() gt(0) masked_fill(v>0.5,0.5) cumsum(-1) log_softmax(-1,dtype=torch.float64)"
)
VIEW_METHODS = (
    ".t() .mT .unflatten(0,(2,-1)) .unflatten(-1,(4,-1)) .transpose(0,1) .flatten(0,1) "
    "[...,:-1] [1:] [:,::2] [...,:64] [:64] .unsqueeze(0) .squeeze() .reshape(-1) [0] "
    ".view(16,-1) .view(-1,64) .flatten() .movedim(0,-1) .chunk(2)[1] .chunk(2,-1)[0] "
    ".detach() .expand(2,*{x}.shape)"
)
WRITING_METHODS = (
    "mul_(0.5) add_({y}) relu_() copy_({y}) masked_fill_({x}>0.5,0.1) zero_() exp_() "
    "data.mul_(0.9) detach().mul_(0.5) t().mul_(2)"
)
OPERATORS = (
    *(f"{{new}} = {{x}}.{each}".replace("v>", "{x} > ") for each in UNARY.split()),
    *("{new} = {x} @ wide", "{new} = F.linear({x}, table)", "{new} = F.linear({x}, table, row)")
    * 5,
    *("{new} = {x} @ narrow", "{new} = {x} @ {y}", "{new} = {x} @ {y}.mT", "{new} = {x}.mT @ {y}")
    * 4,
    *(f"{{new}} = F.{each}({{x}})" for each in ("gelu", "silu", "softplus", "elu", "hardswish")),
    "{new} = F.gelu({x}, approximate='tanh')",
    "{new} = torch.addmm(row, {x}, {y})",
    "{new} = torch.addmm({x}, {y}, {z}, alpha=0.5)",
    "{new} = torch.bmm({x}, {y}.mT)",
    "{new} = torch.baddbmm({x}, {y}, {z})",
    *("{new} = {x} + {y}", "{new} = {x} * {y}", "{new} = {x} + row", "{new} = {x} * column") * 2,
    "{new} = {x} / ({y}.abs() + 1)",
    "{new} = {x} - {y}.amax(-1, keepdim=True)",
    "{new} = torch.add({x}, {y}, alpha=0.3)",
    "{new} = torch.where({x} > 0, {x}, {y})",
    "{new} = torch.maximum({x}, {y})",
    "{new} = torch.addcmul({x}, {y}, {z}, value=0.3)",
    "{new} = torch.lerp({x}, {y}, 0.3)",
    "{new} = F.layer_norm({x}, {x}.shape[-1:])",
    "{new} = F.embedding(words % len({x}), {x})",
    "{new} = F.embedding(words % len(table), table)",
    *(
        f"{{new}} = F.cross_entropy({{x}}, words % {{x}}.shape[1]{how})"
        for how in (
            "",
            ", reduction='none'",
            ", reduction='sum'",
            ", ignore_index=3",
            ", label_smoothing=0.1",
            ", weight=row.exp()",
        )
    ),
    "{new} = F.nll_loss({x}.log_softmax(-1), words % {x}.shape[1])",
    "{new} = F.cross_entropy({x}[:-1], words[1:] % {x}.shape[1])",
    "{new} = {x}.gather(1, words[:, None] % {x}.shape[1])",
    "{new} = ({x} @ {x}.mT).softmax(-1) @ {y}",
    "{new} = F.dropout({x}, 0.4)",
    "{new} = torch.cat([{x}, {y}])",
    "{new} = torch.cat([{x}, {x}], -1)",
    "{new} = {x}[words % len({x})]",
)
VIEWS = tuple(f"{{new}} = {{x}}{view}" for view in VIEW_METHODS.split())
WRITES = (
    *(f"{{x}}.{each}" for each in WRITING_METHODS.split()),
    "{x}[0] = 0.25",
    "{x} += {y}",
    "{w}.data.mul_(0.9)",
)
BACKWARD = (
    "{x}.sum().backward()",
    "{x}.sum().backward(retain_graph=True)",
    "({new},) = torch.autograd.grad({x}.sum(), {w}, create_graph=True)",
    "({new},) = torch.autograd.grad({x}.square().sum(), {w}, retain_graph=True)",
    "{x}.retain_grad()",
    "optimizer.step()",
    "optimizer.zero_grad()",
    "{w}.grad = None",
)
NAMES = (
    "del {x}",
    "held.append({x})",
    "held.clear()",
    "{x} = {y}",
    "log.append(str({x}.sum().item()))",
    "log.append({x}.argmax().item())",
    "{x} = keep({x})",
)


KINDS = (*(OPERATORS,) * 12, *(VIEWS,) * 4, WRITES, NAMES, NAMES, BACKWARD)
LEAVES = ("hidden", "wide", "narrow", "table", "row")


def drawn_lines(rng: Random, threads: int | None = None) -> Lines:
    """Draw the shapes of the tensors with which a program begins, and its first line.

    Args:
        rng: Draws.
        threads: With so many threads kernels run; None to draw that too.
    """
    rows = rng.choice((64, 96, 128, 192, 250, 256, 320))
    width = rng.choice((16, 32, 48, 64, 100))
    count = rng.choice((384, 512, 768, 1000, 1024, 1500))
    drawn_threads = rng.choice((1, 1, 2, 3))
    build = (
        f"torch.set_num_threads({threads or drawn_threads})",
        f"x = torch.randn({rows}, {width})",
        f"hidden = torch.randn({rows}, {width}, requires_grad=True)",
        f"wide = (torch.randn({width}, {count}) * 0.2).requires_grad_()",
        f"narrow = (torch.randn({count}, {width}) * 0.05).requires_grad_()",
        f"table = (torch.randn({count}, {width}) * 0.2).requires_grad_()",
        f"row = torch.randn({count}, requires_grad=True)",
        f"column = torch.randn({rows}, 1)",
        f"words = torch.randint(0, {count}, ({rows},))",
        "optimizer = torch.optim.SGD([hidden, wide, narrow, table, row], 0.01, momentum=0.5)",
    )
    first = rng.choice(("hidden @ wide", "F.linear(hidden, table, row)", "F.linear(x, table)"))
    return Lines(build, LEAVES, KINDS, 500_000, (f"v0 = {first}",))


def random_program(rng: Random, longest: int, threads: int | None = None) -> Program:
    """Draw a program of up to `longest` lines, whose kernels run with `threads` threads."""
    return drawn_lines(rng, threads).program(rng, longest)
