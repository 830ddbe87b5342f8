"""Change a trace so that results of operators overwrite inputs that nothing else needs.

Such an input dies (loses its last reference) right after the operator. If the operator reads each
element before it writes that element, a runtime can compute the result in the memory of the input.
The result then needs no additional memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rekindle._types import OpId, ValueId
from rekindle.trace._liveness import References
from rekindle.trace._model import Call, Drop, Event, Op, Trace
from rekindle.trace._rules import check_trace


def taking_over(trace: Trace, sources: Mapping[OpId, ValueId]) -> Trace:
    """Return a copy of `trace` in which results take over the memory of inputs that die.

    A result does not take over an input that is used later, that has another size than the result,
    or that is read by an operator that can run again.

    Args:
        trace: Any trace.
        sources: For operators with one result, the input that the result may overwrite.
    """
    made: dict[OpId, Op] = {}
    dropped: set[int] = set()
    read_again = {trace.values[value] for op in trace.ops if op.replayable for value in op.inputs}
    references = References(trace)
    for position, event in enumerate(trace.events):
        if not isinstance(event, Call):
            references.other(event)
            continue
        op = trace.ops[event.op]
        references.called(event)
        source = sources.get(event.op)
        if source is None or op.overwrites or len(op.outputs) != 1:
            continue
        (output,) = op.outputs
        storage = trace.values[source]
        same = trace.is_root(output) and trace.storages[storage] == trace.output_bytes(op)
        alone = references.is_held_alone(storage) and storage not in read_again
        end = _dropped_at(trace, position, storage)
        if same and alone and end is not None:
            made[event.op] = replace(op, overwrites=((output, source),))
            dropped.add(end)
    events: list[Event] = [each for at, each in enumerate(trace.events) if at not in dropped]
    changed = [made.get(OpId(number), op) for number, op in enumerate(trace.ops)]
    return check_trace(replace(trace, ops=tuple(changed), events=tuple(events)))


def _dropped_at(trace: Trace, call: int, storage: int) -> int | None:
    """Return the index of the event that drops `storage` between a call and the next call.

    `call` is the index of the first call. The result is None if the program does not drop the
    storage between the two calls.
    """
    for position in range(call + 1, len(trace.events)):
        event = trace.events[position]
        if isinstance(event, Call):
            return None
        if isinstance(event, Drop) and trace.values[event.value] == storage:
            return position
    return None
