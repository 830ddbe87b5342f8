"""Check the rules of a valid trace.

Each rule is a function. It yields a message for each place at which a trace breaks the rule.
`RULES` lists all rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rekindle._errors import InvalidTrace
from rekindle.trace._model import Call, Drop, Pin, Release, Retain, Trace, Use


def _ids_exist(trace: Trace) -> Iterator[str]:
    storages, values, ops = len(trace.storages), len(trace.values), len(trace.ops)
    for value, storage in enumerate(trace.values):
        if not 0 <= storage < storages:
            yield f"value {value} is in storage {storage}, but there are {storages} storages"
    for op_id, op in enumerate(trace.ops):
        for value in (*op.inputs, *op.outputs, *(v for pair in op.overwrites for v in pair)):
            if not 0 <= value < values:
                yield f"op {op_id} ({op.name}) names value {value}, but there are {values} values"
    for position, event in enumerate(trace.events):
        if isinstance(event, Call):
            if not 0 <= event.op < ops:
                yield f"event {position} calls op {event.op}, but there are {ops} ops"
        elif not 0 <= event.value < values:
            yield f"event {position} names value {event.value}, but there are {values} values"


def _nothing_is_negative(trace: Trace) -> Iterator[str]:
    for storage, nbytes in enumerate(trace.storages):
        if nbytes < 0:
            yield f"storage {storage} has {nbytes} bytes"
    for op_id, op in enumerate(trace.ops):
        if op.cost < 0:
            yield f"op {op_id} ({op.name}) costs {op.cost} ns"
        if op.workspace < 0:
            yield f"op {op_id} ({op.name}) has a workspace of {op.workspace} bytes"


def _each_value_is_made_once(trace: Trace) -> Iterator[str]:
    made: dict[int, int] = {}
    for op_id, op in enumerate(trace.ops):
        for value in op.outputs:
            if value in made:
                yield f"value {value} is made by op {made[value]} and by op {op_id} ({op.name})"
            made[value] = op_id
    for value in range(len(trace.values)):
        if value not in made:
            yield f"value {value} is made by no op"


def _inputs_are_made_before(trace: Trace) -> Iterator[str]:
    made: set[int] = set()
    for op_id, op in enumerate(trace.ops):
        for value in op.inputs:
            if value not in made:
                yield f"op {op_id} ({op.name}) reads value {value}, which no earlier op makes"
        made.update(op.outputs)


def _views_follow_their_root(trace: Trace) -> Iterator[str]:
    """Yield a message for each view whose operator does not read its storage."""
    for op_id, op in enumerate(trace.ops):
        for value in op.outputs:
            if trace.is_root(value):
                continue
            storage = trace.values[value]
            if all(trace.values[source] != storage for source in op.inputs):
                yield (
                    f"op {op_id} ({op.name}) makes value {value}, a view of storage {storage}, "
                    "but reads no value of that storage"
                )


def _overwrites_pair_output_and_input(trace: Trace) -> Iterator[str]:
    """Yield a message for each pair in `Op.overwrites` that is invalid.

    A valid pair is an output and an input of the op, of equal size.
    """
    for op_id, op in enumerate(trace.ops):
        for output, source in op.overwrites:
            if output not in op.outputs or source not in op.inputs:
                yield (
                    f"op {op_id} ({op.name}) overwrites value {source} by value {output}, which "
                    "are not an input and an output of this op"
                )
            elif trace.storages[trace.values[output]] != trace.storages[trace.values[source]]:
                yield f"op {op_id} ({op.name}) overwrites value {source} by a value of other size"


def _calls_in_order(trace: Trace) -> Iterator[str]:
    calls = [event.op for event in trace.events if isinstance(event, Call)]
    if calls != list(range(len(trace.ops))):
        yield f"the ops must be called once each, in order; got {calls[:8]}..."


def _references_balance(trace: Trace) -> Iterator[str]:
    """Yield a message for each event that ends a reference which does not exist.

    Such an event is a `Release` of a value without references, or a `Drop` of a value that no
    variable holds.
    """
    references = [0] * len(trace.values)
    held: set[int] = set()
    for position, event in enumerate(trace.events):
        match event:
            case Call(op, hold):
                for value in trace.ops[op].outputs:
                    if hold:
                        held.add(trace.values[value])
                    else:
                        references[value] += 1
                for output, source in trace.ops[op].overwrites:
                    if trace.values[source] in held:
                        held.discard(trace.values[source])
                        held.add(trace.values[output])
            case Retain(value):
                references[value] += 1
            case Release(value):
                references[value] -= 1
                if references[value] < 0:
                    yield f"event {position} releases value {value}, which has no reference left"
            case Use(value):
                held.add(trace.values[value])
            case Drop(value):
                if trace.values[value] not in held:
                    yield f"event {position} drops value {value}, which the program does not hold"
                held.discard(trace.values[value])
            case Pin():
                pass


RULES: tuple[tuple[str, Callable[[Trace], Iterator[str]]], ...] = (
    ("ids-exist", _ids_exist),
    ("nothing-is-negative", _nothing_is_negative),
    ("each-value-is-made-once", _each_value_is_made_once),
    ("inputs-are-made-before", _inputs_are_made_before),
    ("views-follow-their-root", _views_follow_their_root),
    ("overwrites-pair-output-and-input", _overwrites_pair_output_and_input),
    ("calls-in-order", _calls_in_order),
    ("references-balance", _references_balance),
)
"""The rules in the order in which they are checked. A rule may assume that earlier ones hold."""


def check_trace(trace: Trace) -> Trace:
    """Return `trace` if it obeys every rule.

    Raises:
        InvalidTrace: The trace breaks a rule. The error names the rule and where it is broken.
    """
    for name, rule in RULES:
        for complaint in rule(trace):
            raise InvalidTrace(name, complaint)
    return trace
