"""The lines that random programs are made of, and how hypothesis draws a program from them.

Placeholders of a template are filled in: {x}, {y}, {z} with tensors of the program, {w} with a
leaf, {new} and {other} with names to assign to, which may be in use. A line is tried on the plain
program first and mostly omitted if it raises there. So lines need no rules about shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.pytorch.fuzz.program import Program, namespace, run_lines

MOST_NUMBERS = 4_000  #: most elements of a tensor
LEAVES = ("w1", "w2", "w3")
BUILD = (
    "w1 = (torch.rand(8, 6) + 0.5).requires_grad_()",
    "w2 = (torch.rand(6, 6) - 0.5).requires_grad_()",
    "w3 = torch.rand(3, 8, 6, requires_grad=True)",
    "b1 = torch.rand(8, 6)",
    "b2 = torch.rand(48)",
    "b3 = torch.rand(()) ",
    "b4 = torch.rand(0, 6)",
    "index = torch.tensor([2, 0, 2, 5])",
    "linear = nn.Linear(6, 6)",
    "norm = nn.BatchNorm1d(6)",
    "norm3 = nn.BatchNorm1d(8)",
    "relu = nn.ReLU(inplace=True)",
    "dropout = nn.Dropout(0.3)",
    "lstm = nn.LSTM(6, 3, bidirectional=True)",
    "cell = nn.GRUCell(6, 6)",
    "optimizer = torch.optim.SGD([w1, w2, w3, *linear.parameters()], 0.01, momentum=0.5)",
)

UNARY = [
    "sin()",
    "exp()",
    "tanh()",
    "sigmoid()",
    "neg()",
    "square()",
    "abs().sqrt()",
    "softmax(-1)",
    "log_softmax(0)",
    "cumsum(0)",
    "cumprod(-1)",
    "norm()",
    "sum()",
    "sum(0)",
    "mean(-1,keepdim=True)",
    "amax(0)",
    "amin(-1)",
    "logsumexp(0)",
    "clone()",
    "detach()",
    "contiguous()",
    "clamp(0.2,0.8)",
    "prod(0)",
    "std()",
    "roll(1,0)",
    "flip(0)",
    "tril()",
    "repeat(2,1)",
    "double()",
    "half()",
    "bfloat16()",
    "float()",
    "long()",
    "argmax()",
    "sort(0).indices",
    "erf()",
    "relu()",
    "diff(dim=0)",
    "flatten().outer(index.float())",
    "median()",
    "renorm(2,0,1.0)",
    "nan_to_num()",
    "var(0)",
    "atan()",
    "repeat(3)",
    "mul(0.5).add(0.1)",
    "logcumsumexp(0)",
    "bool()",
    "bernoulli()",
    "trace()",
    "det()",
    "inverse()",
    "exp().log1p()",
]
PURE = (
    *(f"{{new}} = {{x}}.{method}" for method in UNARY),
    *(f"{{new}} = {{x}} {op} {{y}}" for op in ("+", "-", "*", "@", "<", "**")),
    "{new} = {x} * {x}",
    "{new} = {x} / ({y}.abs() + 1)",
    "{new} = {x} @ {y}.mT",
    "{new} = torch.where({x} > 0, {x}, {y})",
    "{new} = torch.addcmul({x}, {y}, {z}, value=0.3)",
    "{new} = torch.lerp({x}, {y}, 0.3)",
    "{new} = torch.maximum({x}, {y})",
    "{new} = torch.atan2({x}, {y})",
    "{new} = torch.einsum('ij,kj->ik', {x}, {y})",
    "{new} = torch.cdist({x}, {y})",
    "{new} = torch.addmm({x}, {y}, {z})",
    "{new} = torch.bmm({x}, {y}.mT)",
    "{new} = F.gelu({x})",
    "{new} = F.silu({x})",
    "{new} = F.softplus({x})",
    "{new} = F.leaky_relu({x}, 0.1)",
    "{new} = F.glu({x})",
    "{new} = F.pad({x}, (1, 1))",
    "{new} = F.pad({x}[None], (1, 2), mode='circular')[0]",
    "{new} = F.layer_norm({x}, {x}.shape[-1:])",
    "{new} = F.rms_norm({x}, {x}.shape[-1:])",
    "{new} = F.group_norm({x}, 2)",
    "{new} = F.avg_pool1d({x}, 2)",
    "{new} = F.max_pool1d({x}, 2)",
    "{new} = F.adaptive_avg_pool1d({x}, 3)",
    "{new} = F.interpolate({x}[None], scale_factor=2)",
    "{new} = F.conv1d({x}, {y}[:, :, None])",
    "{new} = F.conv1d({x}[None], {y}[:2, :, None].expand(2, {x}.shape[0], 2))",
    "{new} = F.mse_loss({x}, {y})",
    "{new} = F.cross_entropy({x}, {y}.argmax(-1))",
    "{new} = F.cosine_similarity({x}, {y})",
    "{new} = F.embedding(index, {x})",
    "{new} = F.embedding_bag(index[None], {x}, mode='max')",
    "{new} = F.scaled_dot_product_attention({x}[None], {y}[None], {z}[None])",
    "{new} = F.normalize({x}, dim=0)",
    "{new} = torch.zeros_like({x})",
    "{new} = torch.zeros_like({x}).add_({y})",
    "{new} = torch.empty_like({x}).copy_({y})",
    "{new} = torch.empty_like({x}).fill_(0.5)",
    "{new} = {x}.new_ones(8, 6)",
    "{new} = torch.arange(6.0) * {x}",
    "{new} = torch.eye(6)",
    "{new} = checkpoint(lambda a: (a.sin() * a).exp(), {x}, use_reentrant=False)",
)
VIEWS = tuple(
    f"{{new}} = {{x}}{view}"
    for view in (
        ".t() .transpose(0,-1) [1:] [:,::2] [...,0] [-1] .view(-1) .reshape(-1) .view(2,-1) .mT "
        ".unsqueeze(0) .squeeze() .expand(3,*{x}.shape) [:1].expand_as({x}) .diagonal() [None] "
        ".narrow(0,1,2) .unfold(0,2,1) .as_strided((3,4),(2,1)) .as_strided((3,4),(1,1),1) "
        ".movedim(0,-1) .view(torch.int32) .select(0,1) .detach() .data .view_as({x}) .T "
        ".unflatten(0,(2,-1)) [...,1:3] [2:2] .swapaxes(0,1)[1] .ravel() .alias_copy() .chunk(2)[1]"
    )
    .replace(".alias_copy()", ".view(*{x}.shape)")
    .split()
)
WRITES = (
    *(
        f"{{x}}.{method}"
        for method in [
            "mul_(0.5)",
            "add_({y})",
            "sin_()",
            "relu_()",
            "zero_()",
            "fill_(0.3)",
            "copy_({y})",
            "exp_()",
            "t().mul_(2)",
            "detach().mul_(0.5)",
            "data.add_(1)",
            "masked_fill_({y}>0.5,0.1)",
            "clamp_(0.1,0.9)",
            "t_()",
            "neg_()",
            "index_put_((index,),{y}[0])",
            "index_add_(0,index[:1],{y}[:1])",
            "index_fill_(0,index[:1],0.7)",
            "scatter_(0,index[None,:1],0.5)",
            "transpose_(0,1)",
            "squeeze_()",
            "unsqueeze_(0)",
            "uniform_()",
            "normal_()",
            "bernoulli_(0.4)",
            "exponential_()",
            "lerp_({y},0.3)",
            "addmm_({y},{z})",
            "detach_()",
            "requires_grad_()",
            "set_({y})",
            # results must not contain uninitialized memory
            "resize_({x}.numel()//2 if {x}.is_contiguous() else 0)",
            "sub_({x})",
            "div_({y})",
            "addcmul_({y},{z})",
            "cumsum_(0)",
            "tril_()",
            "sigmoid_()",
            "sqrt_()",
            "pow_(2)",
            "random_(5)",
            "view(-1)[::3].zero_()",
            "resize_(0)",
            "masked_scatter_({y}>0.5,{z})",
            "index_copy_(0,index[:1],{y}[:1])",
            "diagonal().add_(1)",
        ]
    ),
    "{x}[1:].mul_(2)",
    "{x} += {y}",
    "{x} *= {x}",
    "{x}[1:] = {y}[1:]",
    "{x}[0] = 0.25",
    "{x}[0] = {y}",
    "{x}[:, 0] += {y}[:, 0]",
    "{x}[..., 1].exp_()",
    "{x}[index] = {y}[index]",
    "{x}[{x} > 0.6] = 0.6",
    "{x}[1:][:, 1:].mul_({y}[1:, 1:])",
    "{x}.unbind(0)[0].mul_(2)",
    "{x}.data = {x}.data.clone()",
    "F.relu({x}, inplace=True)",
    "F.leaky_relu({x}, inplace=True)",
    "F.elu({x}, inplace=True)",
    "F.dropout({x}, 0.3, inplace=True)",
    "torch.add({x}, {y}, out={z})",
    "torch.mul({x}, {y}, out={x})",
    "torch.sin({x}, out={z})",
    "torch.cat([{x}, {y}], out={z})",
    "torch._foreach_mul_([{x}, {y}], 0.9)",
    "torch._foreach_add_([{x}, {y}], [{y}, {z}])",
    "{new} = relu({x})",
)
SEVERAL = (
    "{new}, {other} = {x}.chunk(2)",
    "{new}, {other} = {x}.chunk(2, -1)",
    "{new}, *_ = {x}.split(3)",
    "{new}, *_ = {x}.unbind(0)",
    "{new}, {other} = torch.unsafe_chunk({x}, 2)",
    "{new}, {other} = {x}.topk(2)",
    "{new}, {other} = {x}.sort(-1)",
    "{new}, {other} = {x}.max(0)",
    "{new}, {other} = {x}.cummax(0)",
    "{new}, {other} = torch.var_mean({x}, 0)",
    "{new}, {other} = torch.aminmax({x})",
    "{new}, {other} = torch.frexp({x})",
    "{new}, {other}, _ = Several.apply({x})",
    "{new}, _, {other} = Several.apply({x})",
    "{new}, {other} = torch._foreach_mul([{x}, {y}], 1.1)",
    "{new}, {other} = torch.linalg.qr({x})",
    "{new}, ({other}, _) = lstm({x})",
    "{new}, {other} = torch.meshgrid({x}, {y}, indexing='ij')",
    "{new}, {other}, _ = torch.native_layer_norm({x}, {x}.shape[-1:], None, None, 1e-5)",
)
JOINS = (
    "{new} = torch.cat([{x}, {y}])",
    "{new} = torch.cat([{x}, {x}], -1)",
    "{new} = torch.cat([{x}, {y}[:0]])",
    "{new} = torch.stack([{x}, {y}])",
    "{new} = torch.stack([{x}, {y}, {z}], -1)",
    "{new} = torch.hstack([{x}, {y}])",
    "{new} = torch.block_diag({x}, {y})",
)
RANDOM = (
    "{new} = F.dropout({x}, 0.4)",
    "{new} = dropout({x})",
    "{new} = {x} * torch.rand({x}.shape)",
    "{new} = torch.rand_like({x})",
    "{new} = {x} + torch.randn_like({x})",
    "{new} = {x}[torch.randperm({x}.shape[0])]",
    "{new} = F.rrelu({x} - 0.5, training=True)",
    "{new} = F.gumbel_softmax({x})",
    "{new} = torch.multinomial({x}.detach().abs(), 2)",
    "{new} = torch.normal({x}, 0.1)",
    "{new} = F.alpha_dropout({x}, 0.3)",
    "{new} = F.dropout1d({x}, 0.5)",
    "torch.manual_seed(3)",
)
INDEXING = (
    "{new} = {x}[index]",
    "{new} = {x}[{x} > 0.5]",
    "{new} = {x}[:, index]",
    "{new} = {x}[{y} > 0.5]",
    "{new} = {x}[{y}]",
    "{new} = {x}.gather(0, {x}.argsort(0))",
    "{new} = {x}.gather(-1, {y})",
    "{new} = {x}.masked_select({y} > 0.5)",
    "{new} = {x}.index_select(0, index)",
    "{new} = {x}.take(index)",
    "{new} = {x}.nonzero()",
    "{new} = {x}.index_add(0, index[:2], {y}[:2])",
    "{new} = {x}.masked_fill({x} > 0.5, 0.5)",
    "{new} = {x}.scatter_add(0, {x}.argsort(0), {y})",
    "{new} = {x}.index_put((index,), {y}[:4], accumulate=True)",
    "{new} = {x}.repeat_interleave(2, 0)",
    "{new} = torch.complex({x}, {y})",
    "{new} = torch.view_as_real({x})",
    "{new} = {x}.real",
    "{new} = {x}.abs()",
)
MODULES = (
    "{new} = linear({x})",
    "{new} = norm({x})",
    "{new} = norm3({x})",
    "norm.train(not norm.training)",
    "{new} = cell({x})",
    "{new} = cell({x}, {y})",
    "{new} = F.batch_norm({x}, b1[0], b1[1], training=True)",
    "{new} = Twice.apply({x})",
    "{new} = Dirty.apply({x})",
    "{new} = Scribbles.apply({x})",
)
BACKWARD = (
    "{x}.sum().backward()",
    "{x}.sum().backward(retain_graph=True)",
    "{x}.sum().backward(inputs=[{w}], retain_graph=True)",
    "{x}.backward(torch.ones_like({x}), retain_graph=True)",
    "({new},) = torch.autograd.grad({x}.sum(), {w}, retain_graph=True)",
    "({new},) = torch.autograd.grad({x}.sum(), {w}, create_graph=True)",
    "({new},) = torch.autograd.grad({x}.square().sum(), {y}, create_graph=True)",
    "({new},) = torch.autograd.grad({x}.sum(), {y})",
    # `grad_fn` is read first, because PyTorch may crash otherwise
    "{x}.grad_fn; {x}.register_hook(lambda gradient: gradient * 0.5)",
    "{x}.retain_grad()",
    "{w}.grad = None",
    "optimizer.step()",
    "optimizer.zero_grad()",
    "optimizer.zero_grad(set_to_none=False)",
    "nn.utils.clip_grad_norm_([w1, w2, w3], 1.0)",
    "{w}.data.mul_(0.9)",
    "{w}.grad.mul_(0.5)",
)
NAMES = (
    "del {x}",
    "del {x}, {y}",
    "held.append({x})",
    "held.append({x}.detach())",
    "held.clear()",
    "{x} = {y}",
    "log.append(str({x}.sum().item()))",
    "log.append({x}.shape)",
    "log.append({x}._version)",
    "{x} = keep({x})",
)
SCOPES = (
    "with torch.no_grad(): ",
    "with torch.autocast('cpu', torch.bfloat16): ",
    "with torch.inference_mode(): ",
    "with rekindle.never_recompute(): ",
    "with torch.autograd.graph.save_on_cpu(): ",
    "with torch.random.fork_rng(): ",
    "with torch.enable_grad(): ",
)
KINDS = (
    *(PURE,) * 5,
    *(VIEWS,) * 3,
    *(WRITES,) * 4,
    *(NAMES,) * 3,
    SEVERAL,
    JOINS,
    RANDOM,
    INDEXING,
    MODULES,
    BACKWARD,
)


@st.composite
def programs(draw: st.DrawFn, *, longest: int = 40) -> tuple[Program, float]:
    """Draw a program of up to `longest` lines, then a backward pass from some of its tensors.

    Also draw the tightness of its budget (see `check.complaint`).
    """
    # A random.Random of its own: thousands of draws from hypothesis would take longer than the
    # programs. So hypothesis cannot shorten programs; `check.shortened` does.
    rng = draw(st.randoms(use_true_random=True))
    return random_program(rng, longest), rng.choice((1.0, 1.0, rng.random()))


@dataclass(frozen=True)
class Lines:
    """The lines of which programs of one kind consist.

    Attributes:
        build: The lines that run before the budget.
        leaves: Names of tensors that require a gradient from the start.
        kinds: Templates, each in a group; a group is drawn first.
        most_numbers: The most elements of a tensor.
        first: The lines with which a program begins.
    """

    build: tuple[str, ...]
    leaves: tuple[str, ...]
    kinds: tuple[tuple[str, ...], ...]
    most_numbers: int
    first: tuple[str, ...] = ()

    def program(self, rng: Random, longest: int) -> Program:
        """Draw a program of up to `longest` lines, then a backward pass from some tensors."""
        space = namespace()
        torch.manual_seed(20)
        for line in self.build:
            exec(line, space)
        step = [*self.first]
        run_lines(self.first, space)
        for _ in range(rng.randint(4, longest)):
            line = self._line(rng, space)
            trial = dict(space)
            raised = run_lines((line,), trial)
            if not raised and not any(isinstance(value, Tensor) for value in trial.values()):
                continue  # the line would delete the last tensor
            if raised or self._has_too_large(trial):
                if "modified by an inplace" in raised or rng.random() < 0.02:
                    step.append(_attempt(line))
                    run_lines((step[-1],), space)
                continue
            space = trial
            step.append(line)
        return Program(self.build, (*step, *self._ending(rng, space)))

    def _line(self, rng: Random, space: dict[str, Any]) -> str:
        template = rng.choice(rng.choice(self.kinds))
        tensors = [name for name, value in space.items() if isinstance(value, Tensor)]
        tracked = [name for name in tensors if space[name].requires_grad]
        made = [name for name in tracked if name not in self.leaves]
        likely = [*tensors, *tracked * 2, *made * 5, *made[-3:] * 5]
        names = {name: rng.choice(likely) for name in "xyz"}
        names["w"] = rng.choice(self.leaves)
        names["new"] = _name(rng, tensors)
        names["other"] = _name(rng, tensors)
        line = template.format(**names)
        return rng.choice(SCOPES) + line if rng.random() < 0.06 else line

    def _ending(self, rng: Random, space: dict[str, Any]) -> list[str]:
        """Add up some tensors that require a gradient to a loss; mostly delete names before."""
        tensors = [name for name, value in space.items() if isinstance(value, Tensor)]
        wanting = [
            name for name in tensors if space[name].requires_grad and name not in self.leaves
        ]
        if not wanting:
            return []
        chosen = rng.sample(wanting, min(len(wanting), rng.randint(1, 6)))
        lines = [f"loss = {' + '.join(f'{name}.abs().sum()' for name in chosen)}"]
        going = [name for name in tensors if name.startswith("v")]
        if going and rng.random() < 0.8:
            lines += [f"del {', '.join(going)}", "held.clear()"]
        if rng.random() < 0.3:
            lines.append("loss.backward(retain_graph=True)")
        return [*lines, "loss.backward()"]

    def _has_too_large(self, space: dict[str, Any]) -> bool:
        return any(
            isinstance(value, Tensor) and value.numel() > self.most_numbers
            for value in space.values()
        )


SMALL = Lines(BUILD, LEAVES, KINDS, MOST_NUMBERS)


def random_program(rng: Random, longest: int) -> Program:
    """Draw a program like `programs`, from a random generator."""
    return SMALL.program(rng, longest)


def _name(rng: Random, tensors: list[str]) -> str:
    """Return a name to assign to, mostly one in use.

    The tensor that had the name before is then held only by the autograd graph.
    """
    mine = [name for name in tensors if name.startswith("v")]
    if len(mine) > 2 and rng.random() < 0.7:
        return rng.choice(mine)
    return f"v{rng.randint(0, 30)}"


def _attempt(line: str) -> str:
    passed_on = "if isinstance(error, MemoryError):\n        raise"  # OutOfBudget is a RuntimeError
    return (
        f"try:\n    {line}\nexcept REFUSED as error:\n    {passed_on}\n"
        "    log.append(type(error).__name__)"
    )
