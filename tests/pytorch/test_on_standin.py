"""Tests of the code for CUDA on a stand-in device, a simulation that needs no GPU.

They check that results have equal bits, that the allocator stays within the budget, and that
streams wait for each other wherever they must.
"""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.helpers import combined, sampled
from tests.standin.process import asked, compiled

MODES = (
    "native",
    "native, swap",
    "native, swapped",
    "native, learned",
    "native, anything",
)
STREAMS = ("prompt", "late", "side first", "side last")
PROGRAMS = (
    "batches_of_the_host",
    "a_staging_buffer",
    "convolutions",
    "timed_convolutions",
    "transformer",
    "sums_by_atomics",
    "captured_in_between",
    "by_way_of_the_host",
    "mixed_precision",
    "a_side_stream",
    "a_side_stream_that_is_met_late",
    "streams_in_turn",
    "workspaces",
    "gathered_parameters",
)


@pytest.fixture(scope="session")
def extension() -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the stand-in device needs g++")
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("the stand-in takes CUDA's place in a PyTorch that has none")
    return compiled(compiler)


#: Largest peak, as a multiple of the budget, of a program that captures a CUDA graph. Rekindle
#: evicts nothing during capture.
OVER = {"captured_in_between": 1.1}


def _trains_the_same(
    extension: Path, programs: tuple[str, ...], modes: tuple[str, ...] = MODES
) -> None:
    """Run each program in some modes (settings of the budget) and orders of streams.

    The bits must be equal, and the peak at most 2 % above the budget.
    """
    most = max(OVER.get(program, 1.02) for program in programs)
    # Some combinations, which contain each mode and each order of streams at least once.
    # `scripts/sweep tests` runs all combinations.
    kinds = [", ".join(kind) for kind in combined(modes, STREAMS)]
    found = asked(extension, *map(", ".join, product(programs, kinds)))
    assert {question: a for question, a in found.items() if not a.get("equal")} == {}
    assert {q: a for q, a in found.items() if a["peak over budget"] > most} == {}
    evicted = [answer["evictions"] for answer in found.values()]
    assert min(evicted) > 0
    assert {answer["states set"] for answer in found.values()} == {0}


@pytest.mark.slow
def test_mlp_on_simulated_cuda_device_matches_pytorch(extension: Path) -> None:
    _trains_the_same(extension, ("mlp",))


@pytest.mark.slow
def test_mlp_on_simulated_cuda_with_lru_policy_matches_pytorch(extension: Path) -> None:
    _trains_the_same(extension, ("mlp",), ("native, oldest",))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_on_simulated_cuda_device_matches_pytorch(extension: Path, program: str) -> None:
    _trains_the_same(extension, (program,))


@pytest.mark.slow
@pytest.mark.parametrize("program", sampled(("mlp", *PROGRAMS), 6))
def test_simulated_cuda_with_all_evicted_matches_pytorch(extension: Path, program: str) -> None:
    found = asked(extension, *(f"{program}, native, harsh, {streams}" for streams in STREAMS))
    assert {question: a for question, a in found.items() if not a.get("equal")} == {}
    assert min(answer["recomputations"] for answer in found.values()) > 100


@pytest.mark.slow
def test_small_results_fit_into_full_budget(extension: Path) -> None:
    """Large results leave some bytes of a budget on a device free for small ones.

    `OutOfBudget` for a small result could interrupt the start of a CUDA graph capture.
    """
    kept, full = asked(extension, "any, small, prompt", "any, small, prompt, kept_back").values()
    assert (kept["large"], kept["small"]) == (63, 100)
    assert kept["peak over budget"] <= 1
    assert (full["large"], full["small"]) == (64, 0), "nothing was kept back: this tests nothing"


@pytest.mark.slow
def test_first_custom_optimizer_step_on_device_copies_to_host(extension: Path) -> None:
    (found,) = asked(extension, "any, undone, prompt").values()
    assert found.get("equal"), found
    (on_host,) = found["on the host"]
    assert 0 < on_host < found["weights"]
    assert found["peak over budget"] <= 1


@pytest.mark.slow
def test_device_with_less_memory_than_budget_matches_pytorch(extension: Path) -> None:
    kinds = product(("native", "native, swapped"), STREAMS)
    found = asked(extension, *(f"transformer, {mode}, full, {streams}" for mode, streams in kinds))
    assert {question: a for question, a in found.items() if not a.get("equal")} == {}
    assert min(answer["evictions"] for answer in found.values()) > 0


@pytest.mark.slow
def test_allocation_on_full_device_waits_for_swap_out(extension: Path) -> None:
    """The device refuses an allocation while evicted memory is still being copied to the host.

    Rekindle waits for these copies and tries again, which succeeds. So it evicts no more values.
    """
    found = asked(
        extension, *(f"transformer, native, swapped, full, {on}, fitted" for on in STREAMS)
    )
    assert {question: a for question, a in found.items() if not a.get("equal")} == {}
    assert min(answer["swapped"] for answer in found.values()) > 0
    assert {answer["rescues by the sum"] for answer in found.values()} <= {0, None}


@pytest.mark.slow
def test_on_full_device_values_at_adjacent_addresses_are_evicted(extension: Path) -> None:
    """For comparison, another run evicts values until their bytes suffice, wherever they are.

    That run must evict more values. The policy does not depend on measured times.
    """
    question = "transformer, native, oldest, full, late, fitted"  # the budget is not lowered
    found = asked(extension, question, f"{question}, cheapest_neighbors")
    by_place, by_sum = found.values()
    assert by_place.get("equal"), by_place
    assert by_sum.get("equal"), by_sum
    assert by_place["rescues by the sum"] == 0 < by_sum["rescues by the sum"]
    assert 0 < by_place["evictions"] < by_sum["evictions"]


@pytest.mark.slow
def test_budget_is_lowered_after_one_failed_allocation(extension: Path) -> None:
    """Only one allocation of a step fails, and the report says that the budget was lowered.

    Eviction of adjacent values is off, because it would also avoid later failures.
    """
    question = "large, native, full, late, find_place"
    lowered, as_given = asked(extension, question, f"{question}, fitted").values()
    assert lowered.get("equal"), lowered
    assert as_given.get("equal"), as_given
    assert lowered["rescues"] == 1 < 4 <= as_given["rescues"]
    assert lowered["peak over budget"] <= 1
    assert [reported.partition(" before")[0] for reported in lowered["reported"]] == [
        "The device ran out of memory 1 time"
    ]


@pytest.mark.slow
def test_full_device_frees_adjacent_memory_before_allocation(extension: Path) -> None:
    """After one failed allocation, Rekindle makes a large free block before each later one."""
    question = "of_many_sizes, native, full, late, fitted"
    found, failed = asked(extension, question, f"{question}, find_place").values()
    assert found.get("equal"), found
    assert failed.get("equal"), failed
    assert (failed["places"], found["rescues"] < failed["rescues"]) == (0, True), (found, failed)
    assert found["places"] > 0


@pytest.mark.slow
def test_budget_of_reserved_memory_limits_what_device_reserves(extension: Path) -> None:
    questions = [f"of_many_sizes, native, reserved, {streams}" for streams in STREAMS]
    found = asked(extension, *questions, f"{questions[0]}, find_place")
    assert {question: a for question, a in found.items() if not a.get("equal")} == {}
    *kept, grown = [answer["reserved over budget"] for answer in found.values()]
    assert max(kept) <= 1.1 < grown, found


@pytest.mark.slow
def test_auto_budget_on_device_is_set_again_after_first_step(extension: Path) -> None:
    question = "large, auto, late"
    found = asked(extension, question, f"{question}, measured_again")
    for answer in found.values():
        assert answer.get("equal"), answer
    again, once = found.values()
    for what in ("less", "more"):
        budgets, there = again[what]["budgets"], again[what]["there"]
        assert budgets[1:] == [there, there]
        assert (budgets[0] > there) == (what == "less")
        assert len({*once[what]["budgets"]}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("program", ["mlp", "streams_in_turn"])
def test_device_program_with_rekindle_poison_matches_pytorch(extension: Path, program: str) -> None:
    modes = ("native", "native, swap", "native, anything")
    questions = map(", ".join, product((program,), modes, STREAMS))
    found = asked(extension, *questions, REKINDLE_POISON="1")
    assert {question: a for question, a in found.items() if not a.get("equal")} == {}
    assert min(answer["evictions"] for answer in found.values()) > 0


@pytest.mark.slow
def test_python_engine_takes_same_actions_as_swap_on_device(extension: Path) -> None:
    programs = ("mlp", "transformer", "streams_in_turn")
    found = asked(extension, *map(", ".join, product(programs, ["acts"], STREAMS)))
    assert {question: a for question, a in found.items() if "error" in a} == {}
    for answer in found.values():
        assert answer["compared"] >= answer["recomputations"] + answer["evictions"] > 0
        assert answer["swapped"] > 0


@pytest.mark.slow
def test_learned_plan_on_device_matches_pytorch(extension: Path) -> None:
    found = asked(extension, *(f"mlp, planned, {streams}" for streams in STREAMS))
    assert {question: a for question, a in found.items() if not a.get("equal")} == {}
    assert max(answer["peak over plain"] for answer in found.values()) < 0.97


@pytest.mark.slow
def test_workspaces_on_device_stay_within_budget(extension: Path) -> None:
    """Without a measured or estimated workspace, the first call of an operator would exceed it."""
    asked_for = "workspaces, native, same price, prompt"
    over: list[float] = []
    for missing in ("", ", took", ", guess"):
        answer = asked(extension, asked_for + missing)[asked_for + missing]
        assert answer.get("equal"), answer
        over.append(answer["peak over budget"])
    whole, not_learned, not_guessed = over
    assert whole <= 1
    assert not_learned > 1.1
    assert not_guessed > 1.02


@pytest.mark.slow
def test_first_operator_call_with_workspace_waits_for_swap_out(extension: Path) -> None:
    """The estimated workspace of a first call must not overlap memory that is being copied."""
    modes = ("native, swap", "native, swapped")
    found = asked(extension, *map(", ".join, product(["workspaces"], modes, ["late", "side last"])))
    assert {question: a for question, a in found.items() if not a.get("equal")} == {}
    assert max(answer["peak over budget"] for answer in found.values()) <= 1
    assert min(answer["swapped"] for answer in found.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("copied", ["10000", "1000"])
def test_learned_steps_that_swap_take_their_planned_time(extension: Path, copied: str) -> None:
    """On the simulated clock, steps take the planned time, and swapping is not slower."""
    question = f"{copied}, timed, prompt"
    answer = asked(extension, question)[question]
    assert "error" not in answer, answer
    ways = {way: found for way, found in answer.items() if way != "plain"}
    assert all(found["equal"] and found["peak over budget"] <= 1 for found in ways.values()), ways
    alone, recomputed, online, learned = (
        answer[way] for way in ("alone", "recomputed", "online", "learned")
    )
    assert learned["followed"] >= 2
    assert learned["step"] <= 1.1 * learned["planned"]
    assert learned["step"] <= 1.02 * recomputed["step"]
    assert online["step"] <= 1.02 * alone["step"]
    if copied != "1000":
        assert learned["back"] > 0
        assert learned["step"] < 0.97 * recomputed["step"]
        assert online["step"] < alone["step"]


@pytest.mark.slow
@pytest.mark.parametrize("copied", ["10000", "1000"])
def test_planned_model_that_swaps_takes_planned_time(extension: Path, copied: str) -> None:
    """On the simulated clock, passes take the planned time, and swapping beats recomputing."""
    question = f"{copied}, timed plans, prompt"
    answer = asked(extension, question)[question]
    assert "error" not in answer, answer
    recomputed, swapped = answer["recomputed"], answer["swapped"]
    for found in (recomputed, swapped):
        assert found["equal"]
        assert found["peak over budget"] <= 1
        assert found["step"] == pytest.approx(found["planned"], rel=0.02)
    assert swapped["swapped out"] > 0
    assert swapped["step"] < recomputed["step"]
    if copied == "10000":
        assert swapped["step"] < 1.01 * answer["plain"]


@pytest.mark.slow
def test_planned_bert_that_swaps_takes_planned_time(extension: Path) -> None:
    """A small BERT-base trains twice the batch in the memory that the smaller batch needs.

    Swapping costs less than half of the additional time of recomputing.
    """
    question = "BERT-base, scaled plans, prompt"
    answer = asked(extension, question)[question]
    assert "error" not in answer, answer
    for way in ("recomputed", "swapped"):
        assert answer[way]["equal"]
        assert answer[way]["peak over budget"] <= 1
        assert answer[way]["overhead"] == pytest.approx(answer[way]["planned"], abs=0.002)
    assert answer["swapped"]["overhead"] < 0.5 * answer["recomputed"]["overhead"]


@pytest.mark.slow
def test_planned_swap_on_late_streams_matches_pytorch(extension: Path) -> None:
    questions = [f"10000, timed plans, {streams}" for streams in STREAMS]
    found = asked(extension, *questions)
    ways = [answer[way] for answer in found.values() for way in ("recomputed", "swapped")]
    assert all(way["equal"] and way["peak over budget"] <= 1 for way in ways), found
    assert all(answer["swapped"]["swapped out"] > 0 for answer in found.values())


def test_rounded_up_bytes_of_allocator_count_in_budget(extension: Path) -> None:
    question = "vectors, least, prompt"
    answer = asked(extension, question)[question]
    assert answer.get("equal"), answer
    assert answer["recomputations"] > 0
    assert answer["peak over budget"] <= 1


def test_device_event_error_reaches_program_once(extension: Path) -> None:
    question = "matrices, fails, prompt"
    answer = asked(extension, question)[question]
    assert answer["raised"] == "standin device: unspecified launch failure"
    assert answer["in flight"] == [0, 0]
    assert answer["equal"]


@pytest.mark.slow
def test_allocation_refused_by_device_is_retried_after_evicting(extension: Path) -> None:
    """The budget exceeds the device's memory, so the device refuses an allocation."""
    who = ("allocator", "cublas", "driver")
    found = asked(extension, *map(", ".join, product(who, ["refuses"], ("prompt", "late"))))
    assert {question: a for question, a in found.items() if not a.get("equal")} == {}
    for answer in found.values():
        assert answer["refused"] > 0
        assert answer["evictions"] > 0
        assert answer["recomputations"] > 0


@pytest.mark.slow
def test_device_oom_after_all_evictions_lists_memory_holders(extension: Path) -> None:
    held, hoarded = asked(extension, "held, refuses, prompt", "hoarded, refuses, prompt").values()
    assert held["refused"] > 0
    assert held["held"] > 20  # of the 40 vectors that fit
    assert hoarded["raised"].startswith("standin device out of memory")
    # The device refuses the allocation four times: at first, and after each of three evictions.
    assert hoarded["refused"] == 4
    (note,) = hoarded["notes"]
    assert "held by your code" in note
    assert "All values that may be evicted are" in note


@pytest.mark.slow
def test_retry_of_first_operator_call_evicts_predicted_bytes(extension: Path) -> None:
    """The operator needs eight vectors. The retry evicts twice as many, within the lower budget."""
    (found,) = asked(extension, "first_call, refuses, prompt").values()
    assert found["refused"] == 1
    assert 8 <= found["evictions"] < 30
    assert found["budget"] >= found["memory"]


@pytest.mark.slow
def test_allocator_snapshot_in_unknown_format_raises(extension: Path) -> None:
    (found,) = asked(extension, "no_segments, refuses, prompt").values()
    assert found == {"()": "SystemError", "['no bytes']": "TypeError"}


@pytest.mark.slow
def test_retried_operator_draws_same_numbers_and_writes_once(extension: Path) -> None:
    """An operator that failed after it added to a part of a list is not retried, but raises."""
    drawn, written = asked(extension, "drawn, refuses, late", "written, refuses, late").values()
    for kind in ("recorded", "unrecorded"):
        assert drawn[kind] == {"refused": 3, "equal": True}
    assert written == {"raised": "a stand-in has no memory", "calls": 1, "once": True}


@pytest.mark.slow
@pytest.mark.parametrize("options", ["swapped", "auto", "anything"])
def test_captured_cuda_graph_neither_waits_nor_recomputes(extension: Path, options: str) -> None:
    """Values that the CUDA graph reads are not evicted afterwards.

    If one was evicted before the capture, an error is raised, and the program can continue.
    """
    scenes = ["step during copies", "evicted input", "evicted afterwards", "operator of evicted"]
    scenes += ["address of evicted"]
    questions = [f"{scene}, captured, {on}, {options}" for scene in scenes for on in STREAMS]
    found = asked(extension, *questions)
    assert all(answer.get("later") for answer in found.values()), found
    assert min(answer["evictions"] for answer in found.values()) > 0
    for question, answer in found.items():
        scene = question.split(",")[0]
        of_variables = scene.endswith(" of evicted") and options != "swapped"
        if scene == "evicted input" or of_variables:
            assert "is needed while CUDA captures a graph" in answer["raised"], question
            assert answer.get("of variables", 1) > 0, question
        else:
            assert answer.get("equal"), question
            assert answer.get("of variables", 0) == 0, question
        assert (answer["swapped"] > 0) == (options == "swapped")


@pytest.mark.slow
def test_canceled_swap_in_does_not_write_reused_memory(extension: Path) -> None:
    found = asked(extension, *(f"vectors, dropped, {streams}" for streams in STREAMS))
    assert {question: a for question, a in found.items() if not a.get("equal")} == {}
    assert all(answer["same place"] for answer in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "program", "mode"),
    [
        ("waits of copies out", "a_side_stream", "native, swapped"),
        ("waits of copies back", "a_side_stream", "native, swapped"),
        ("waits for copies out", "mlp", "native, swapped"),
        ("waits for copies back", "mlp", "native, swapped"),
        ("keep_until_read", "streams_in_turn", "native, swapped"),
        ("streams reported", "a_side_stream_that_is_met_late", "native, swapped"),
        ("keep_until_read", "streams_in_turn", "native, same price"),
        ("in_order", "a_side_stream", "native, same price"),
        ("may_differ", "sums_by_atomics", "native, harsh"),
    ],
)
def test_missing_stream_wait_gives_wrong_results(
    extension: Path, missing: str, program: str, mode: str
) -> None:
    """Shows that the tests above can fail: if Rekindle omits a wait, some run has other bits."""
    questions = [f"{program}, {mode}, {streams}, {missing}" for streams in STREAMS]
    found = asked(extension, *questions)
    assert not all(answer.get("equal") for answer in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["native", "native, harsh"])
def test_timed_convolution_with_equal_bits_is_recomputed(extension: Path, mode: str) -> None:
    """cuDNN chooses the kernel by time, so a trial must give equal bits before recomputation."""
    found = asked(extension, *(f"timed_convolutions, {mode}, {streams}" for streams in STREAMS))
    assert {question: a for question, a in found.items() if not a.get("equal")} == {}
    for answer in found.values():
        assert "aten::convolution" in answer["again"]
        assert answer["kept"] == []


@pytest.mark.slow
def test_timed_convolution_with_other_bits_is_not_recomputed(extension: Path) -> None:
    found = asked(extension, *(f"sums_by_atomics, native, harsh, {each}" for each in STREAMS))
    assert {question: a for question, a in found.items() if not a.get("equal")} == {}
    for answer in found.values():
        assert {"aten::index_add", "aten::cumsum"} <= {*answer["kept"]}
        assert {*answer["kept"]}.isdisjoint(answer["again"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "streams", "missing"),
    [
        ("read", "side first", "readers_wait"),
        ("write", "side last", "writers_wait"),
        ("unseen", "side first", "readers_wait"),
    ],
)
def test_second_stream_waits_for_recomputations(
    extension: Path, scene: str, streams: str, missing: str
) -> None:
    """The second stream waits before it reads a value that the first stream recomputed.

    A stream that writes waits until the other one has read.
    """
    questions = [f"{scene}, ordered, {each}" for each in STREAMS]
    found = asked(extension, *questions, f"{scene}, ordered, {streams}, {missing}")
    *right, wrong = found.values()
    assert all(answer.get("equal") for answer in right), found
    assert wrong["equal"] is False
    assert min(answer["recomputations"] for answer in right) > 0


@pytest.mark.slow
def test_idle_second_stream_is_not_waited_for_again(extension: Path) -> None:
    (found,) = asked(extension, "idle, ordered, prompt").values()
    assert found["recomputations"] >= 19
    assert found["waits"] <= 1  # one wait, for memory from before the stream was seen to be idle
