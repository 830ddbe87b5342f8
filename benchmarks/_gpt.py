"""A training step of a GPT as a trace, operator by operator, for any number of layers.

The GPT has width 768, 12 heads, 8 sequences of 512 tokens, fp32, and 45 operators in a layer. Costs
(us) come from a roofline model of a V100. Sizes are multiples of 64 KiB. A view and its base are
one value. Gradients of parameters have 0 bytes, because no schedule can evict them.
"""

from __future__ import annotations

from rekindle._types import ValueId
from rekindle.trace import Call, Release, Trace, TraceBuilder

_UNIT = 64 * 1024

# Name, cost (us), size (units), and the names of the inputs: results of this layer, "in" for its
# input, and in the backward pass "grad" for the gradient of its output.
_FORWARD = (
    ("norm1", 32, 193, "in"),
    ("qkv", 1479, 576, "norm1"),
    ("q", 31, 192, "qkv"),
    ("k", 31, 192, "qkv"),
    ("scores", 329, 1536, "q k"),
    ("scaled", 252, 1536, "scores"),
    ("masked", 253, 1536, "scaled"),
    ("softmax", 252, 1536, "masked"),
    ("v", 31, 192, "qkv"),
    ("heads", 329, 192, "softmax v"),
    ("joined", 31, 192, "heads"),
    ("projected", 493, 192, "joined"),
    ("middle", 47, 192, "in projected"),
    ("norm2", 32, 193, "middle"),
    ("wide", 1972, 768, "norm2"),
    ("gelu", 126, 768, "wide"),
    ("narrow", 1972, 192, "gelu"),
    ("out", 47, 192, "middle narrow"),
)
_BACKWARD = (
    ("d_gelu", 1972, 768, "grad"),
    ("w_narrow", 1972, 0, "gelu grad"),
    ("b_narrow", 16, 0, "grad"),
    ("d_wide", 189, 768, "wide d_gelu"),
    ("d_norm2", 1972, 192, "d_wide"),
    ("w_wide", 1972, 0, "norm2 d_wide"),
    ("b_wide", 63, 0, "d_wide"),
    ("d_middle2", 47, 192, "middle norm2 d_norm2"),
    ("d_middle", 47, 192, "grad d_middle2"),
    ("d_joined", 493, 192, "d_middle"),
    ("w_projected", 493, 0, "joined d_middle"),
    ("b_projected", 16, 0, "d_middle"),
    ("d_heads", 31, 192, "d_joined"),
    ("d_v", 329, 192, "softmax d_heads"),
    ("d_softmax", 329, 1536, "v d_heads"),
    ("d_masked", 377, 1536, "softmax d_softmax"),
    ("d_scores", 252, 1536, "d_masked"),
    ("d_k", 329, 192, "q d_scores"),
    ("d_q", 329, 192, "k d_scores"),
    ("c_v", 31, 192, "d_v"),
    ("c_q", 31, 192, "d_q"),
    ("d_qkv", 94, 576, "d_k c_v c_q"),
    ("d_norm1", 1479, 192, "d_qkv"),
    ("w_qkv", 1479, 0, "norm1 d_qkv"),
    ("b_qkv", 47, 0, "d_qkv"),
    ("d_in1", 47, 192, "in norm1 d_norm1"),
    ("d_in", 47, 192, "d_middle d_in1"),
)


def gpt(layers: int) -> Trace:
    """Return the trace: embedding, layers and loss, forward and backward."""
    builder = TraceBuilder(f"gpt{layers}l")

    def call(name: str, cost: int, size: int, reads: list[ValueId], back: bool = False) -> ValueId:
        return builder.call(name, cost * 1000, reads, [size * _UNIT], is_backward=back)[0]

    x = call("embedding", 31, 192, [])
    x = call("positions", 33, 192, [x])
    values: list[dict[str, ValueId]] = []
    for _ in range(layers):
        layer = {"in": x}
        for name, cost, size, reads in _FORWARD:
            layer[name] = call(name, cost, size, [layer[read] for read in reads.split()])
        values.append(layer)
        x = layer["out"]
    norm = call("norm", 32, 193, [x])
    logits = call("logits", 2630, 1024, [norm])
    logs = call("log_softmax", 168, 1024, [logits])
    call("loss", 84, 1, [logs])
    d_logs = call("d_loss", 168, 1024, [logs], True)
    d_logits = call("d_log_softmax", 252, 1024, [logs, d_logs], True)
    call("w_logits", 2630, 0, [norm, d_logits], True)
    d_norm = call("d_logits", 2630, 192, [d_logits], True)
    gradient = call("d_norm", 47, 192, [x, norm, d_norm], True)
    for layer in reversed(values):
        layer["grad"] = gradient
        for name, cost, size, reads in _BACKWARD:
            layer[name] = call(name, cost, size, [layer[read] for read in reads.split()], True)
        gradient = layer["d_in"]
    call("w_positions", 31, 0, [gradient], True)
    call("w_embedding", 31, 0, [gradient], True)
    return released(builder.build())


def released(trace: Trace) -> Trace:
    """Return the trace with an added event after each value's last use: the program frees it."""
    last = {value: op_id for op_id, op in enumerate(trace.ops) for value in op.outputs}
    for op_id, op in enumerate(trace.ops):
        last.update(dict.fromkeys(op.inputs, op_id))
    due: dict[int, list[ValueId]] = {}
    for value, op_id in last.items():
        due.setdefault(op_id, []).append(value)
    events: list[Call | Release] = []
    for event in trace.events:
        assert isinstance(event, Call)
        events += [event, *map(Release, due.get(event.op, ()))]
    return Trace(trace.storages, trace.values, trace.ops, tuple(events), trace.name)
