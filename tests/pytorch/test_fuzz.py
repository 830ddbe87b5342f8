"""Tests of random programs of single lines (`fuzz`), also of stored programs that once failed."""

from __future__ import annotations

import ast
import builtins
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.differ.judge import BELOW, Plain, complaint, judge
from tests.differ.modes import Mode, Setting
from tests.differ.shrink import report, shrunk
from tests.helpers import others_slow
from tests.pytorch import cores
from tests.pytorch.bits import differing
from tests.pytorch.fuzz import large
from tests.pytorch.fuzz.lines import BUILD, SCOPES, SMALL, Lines, programs
from tests.pytorch.fuzz.program import DETACHED, EXCHANGED, VIEWS, Program, modes, namespace
from tests.pytorch.planted import wrong_again
from tests.strategies import examples

# warnings of all kinds that random programs cause
pytestmark = pytest.mark.filterwarnings("ignore")

PINNED = {
    "a GRU cell writes parts of one storage": ("v = cell(w1)", "v.sum().backward()"),
    "parts with counters of their own": (
        "v0, v1 = torch.unsafe_chunk(w3, 2)",
        "v2 = v0.view_as(v0)",
        "v0.sigmoid_()",
        "v2.uniform_()",
        "v2.abs().sum().backward()",
    ),
    "a function's own result is written, and its variable is gone": (
        "v0 = w3 * torch.rand(w3.shape)",
        "v1 = Dirty.apply(v0)",
        "v0 = w3.tanh()",
        "v1.random_(5)",
        "v2, _, v1 = Several.apply(v1)",
        "v2.abs().sum().backward()",
    ),
    "what a decision made is written": ("_, v0 = index.sort(-1)", "v0[0].mul_(2)"),
    "a result that cannot be rebuilt": ("v0 = torch.complex(w1, w1)", "v0.exp_()"),
    "noise is written behind the schema's back": (
        "v0 = F.rrelu(w2 - 0.5, training=True)",
        "v0.abs().sum().backward()",
    ),
    "a function writes a part of what was saved whole": (
        "v1 = w1.relu()",
        "v1, v2 = torch.unsafe_chunk(v1, 2)",
        "v3 = Dirty.apply(v1)",
        "loss = v3.abs().sum() + v2.abs().sum()",
        "loss.backward()",
    ),
    "an operator fails when it has written the first of two": (
        "v1 = w3.tanh()",
        "v2 = torch.addcmul(v1, v1, w1, value=0.3)",
        "v3 = v1[..., 0]",
        "try: torch._foreach_add_([v1, v2], [v2, v3])\nexcept RuntimeError: pass",
        "del v1, v3",
        "loss = v2.abs().sum()",
        "loss.backward()",
    ),
    "a value is written that lost its recipe to a write before": (
        "v1 = w2.exp()",
        "w2.data.add_(1)",
        "v1.cumsum_(0)",
        "loss = v1.sum()",
        "del v1",
        "loss.backward()",
    ),
    "what was made from a source that is written is dropped": (
        "v1 = w2.clone()",
        "v2 = v1.exp()",
        "w2.data.add_(1)",
        "loss = v2.sum()",
        "del v1, v2",
        "loss.backward()",
    ),
    "the whole is written that was saved before it was in parts": (
        "v1 = w3.amax(0)",
        "v2, v3 = torch.unsafe_chunk(v1, 2)",
        "v1.uniform_()",
        "del v1",
        "(v2.sum() + v3.sum()).backward()",
    ),
    "a view of a weight gets other memory": (
        "v1 = w2.real",
        "v2 = v1.unflatten(0, (2, -1))",
        "v3, v4 = v2.max(0)",
        "v5 = v1 + torch.randn_like(v1)",
        "with torch.no_grad(): v2.set_(v5)",
        "loss = v1.abs().sum() + v3.abs().sum() + v2.abs().sum() + v5.abs().sum()",
        "del v1, v2, v3, v4, v5",
        "loss.backward()",
    ),
    "a kept value's tensor moves, and is written there": (
        "v1 = keep(w3.gather(0, w3.argsort(0)))",
        "v1.data = v1.data.clone()",
        "v2 = torch.empty_like(v1).copy_(v1)",
        "v1.clamp_(0.1, 0.9)",
        "loss = v1.abs().sum() + v2.abs().sum()",
        "loss.backward(retain_graph=True)",
    ),
    "what is a view or a copy runs whole in inference mode": (
        "with torch.inference_mode(): v1 = w3.mT.ravel()",
        "v2 = w3.exp()",
    ),
    "an operator makes its result grow": (
        "v1 = b2.clone()",
        "with torch.no_grad(): torch.cat([w2, w1], out=v1)",
    ),
    "memory that another tensor gets": ("b4.set_(w1.data)", "v0 = w2.exp()"),
    "a result gets its own memory again, and is made again": (
        "v1 = w1[0].flatten().outer(index.float())",
        "v1.set_(v1)",
        "v2 = torch.empty_like(v1).copy_(v1)",
        "loss = v2.abs().sum() + w1[0].abs().sum()",
        "del v1, v2",
        "loss.backward(retain_graph=True)",
    ),
    "a backward pass writes what another saved": (
        "v1 = w2.exp()",
        "v2 = Scribbles.apply(v1) + Scribbles.apply(v1)",
        "v2.sum().backward()",
    ),
    "numbers as below any mode, and versions that no other mode counts": (
        "with torch.autograd.graph.save_on_cpu(): v1 = w2.median()",
        "torch._foreach_mul_([v1, v1], 0.9)",
        "v1.exp().backward()",
    ),
    "what is only looked at in inference mode counts": (
        "with torch.inference_mode(): v1 = w3.real",
        "with torch.inference_mode(): v2 = b3.float()",
    ),
    "one of several views is written, as below a mode": (
        "v1 = w3.view(-1)",
        "v2 = v1.chunk(2)[1]",
        "v3 = Scribbles.apply(v2)",
        "torch._foreach_mul_([v3, v3], 0.9)",
        "loss = v3.abs().sum() + v2.abs().sum()",
        "loss.backward(retain_graph=True)",
        "loss.backward()",
    ),
    "a backward pass writes what its variable has no more": (
        "v1 = w1.view(-1)",
        "v2 = Scribbles.apply(v1)",
        "v1.data = v1.data.clone()",
        "v2.sum().backward()",
    ),
    "statistics that were written and loaded": (
        "norm.running_mean.copy_(torch.zeros(6))",
        "v0 = norm(w1)",
        "v0.neg().sum().backward(inputs=[w1], retain_graph=True)",
    ),
}

#: For each reason why results may differ from plain PyTorch (`fuzz.program`): one such program.
EXCEPTED = {
    BELOW: ("v1 = w1.prod(0)", "v1.sum().backward()"),
    DETACHED: ("v1 = w3.exp()", "v2 = v1.log1p()", "v1.detach_()", "v2.sum().backward()"),
    EXCHANGED: (
        "v1 = w2.exp()",
        "v1.data = v1.data.clone()",
        "v1.add_(1)",
        "loss = v1.sum()",
        "del v1",
        "loss.backward()",
    ),
    VIEWS: (
        "v1 = w3 * 1",
        "v2, *_ = v1.unbind(0)",
        "v3 = v2 * v2",
        "v1.mul_(2)",
        "v3.sum().backward()",
    ),
}


#: Reasons for which a budget gives the results of plain PyTorch, if no dispatch mode is active.
AS_PLAIN = (BELOW, EXCHANGED)


def _modes(tightness: float) -> list[tuple[Mode, float]]:
    return [(mode, tightness) for mode in modes().values()]


@pytest.mark.parametrize("name", PINNED)
@pytest.mark.parametrize("tightness", [0.0, 0.5, 1.0])
def test_stored_fuzz_program_matches_pytorch(name: str, tightness: float) -> None:
    outcome = judge(Program(BUILD, PINNED[name]), _modes(tightness))
    assert outcome.kind != "different", outcome


@pytest.mark.parametrize("reason", EXCEPTED)
def test_each_listed_fuzz_exception_is_still_needed(reason: str) -> None:
    program = Program(BUILD, EXCEPTED[reason])
    plain = Plain(program)
    as_plain = reason in AS_PLAIN
    for mode in modes().values():
        found = complaint(program, plain, mode)
        if not as_plain or reason == BELOW:  # the tracker is a dispatch mode
            assert found is not None
            assert found.excepted
            assert found.text == reason
        else:
            assert found is None
    setting = Setting(modes()["tight"], 1 << 30, tracked=False)
    got = program.run(setting)
    names = differing(got, plain.first)
    assert bool(names) != as_plain
    assert program.excuse(plain, setting, got, names) == reason if names else as_plain
    got["result[b1]"] = torch.zeros(1)
    names = differing(got, plain.first)
    assert "result[b1]" in names
    assert program.excuse(plain, setting, got, names) == ""


@pytest.mark.slow
@settings(
    examples(300),
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(programs())
def test_random_fuzz_programs_match_pytorch(drawn: tuple[Program, float]) -> None:
    program, tightness = drawn
    outcome = judge(program, _modes(tightness))
    if outcome.kind == "different":
        pytest.fail(report(outcome))


@pytest.mark.parametrize("lines", [SMALL, large.drawn_lines(Random(0))], ids=["small", "large"])
def test_names_in_lines_of_fuzz_programs_exist(lines: Lines) -> None:
    """A line with an unknown name would be refused, and left out of every program."""
    filled = dict.fromkeys(["x", "y", "z", "w", "new", "other"], lines.leaves[0])
    step = [line.format(**filled) for kind in lines.kinds for line in kind]
    step += [f"{scope}pass" for scope in SCOPES]
    nodes = [*ast.walk(ast.parse("\n".join([*lines.build, *step])))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    assigned = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    known = {*namespace(), *vars(builtins), *assigned, *arguments}
    assert {name.id for name in names} <= known


#: Seeds and numbers of threads. 57: softmax of columns; 120: a product with three threads; 61,076:
#: GELU of columns; the other three: slices of a sum that are no slices of what it reads.
LARGE = [(57, None), (61_076, 1), (120, None), (21_031, 1), (23_055, 3), (23_066, 3)]


@pytest.mark.parametrize("drawn", others_slow([*LARGE, *((i, None) for i in range(20))]), ids=str)
def test_random_program_of_large_tensors_in_slices_is_equal(
    drawn: tuple[int, int | None],
) -> None:
    seed, of = drawn
    rng, threads = Random(seed), torch.get_num_threads()
    try:
        program = large.random_program(rng, 40, of)
        tight = modes("split")["split, tight"]
        outcome = judge(program, [(tight, 1.0), (tight, rng.random()), (tight, rng.random())])
    finally:
        torch.set_num_threads(threads)
    assert outcome.kind != "different", outcome


def test_fuzz_reports_and_shortens_program_with_planted_defect() -> None:
    lines = ("v0 = w1.exp()", "v1 = w2.tanh()", "held.append(v0)", "v1 = v1 * v1")
    program = Program(BUILD, (*lines, "v1.sum().backward()"))
    assert judge(program, _modes(0.0)).kind == "same"
    with wrong_again(), cores.fixed_prices():  # with fixed costs, each run recomputes the same
        outcome = judge(program, _modes(0.0))
        assert outcome.kind == "different"
        short = shrunk(program, lambda candidate: judge(candidate, _modes(0.0)).kind == "different")
        assert lines[0] not in report(outcome).partition("with rekindle.budget")[2]
    assert short.step == (lines[1], "v1.sum().backward()")
