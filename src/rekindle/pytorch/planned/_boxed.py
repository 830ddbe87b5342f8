"""Turn an fx graph into a Python function that holds no tensor longer than necessary.

The function empties its list of arguments, calls the overload of each operator, and deletes each
variable after its last use. At the end only the results are left. `torch.fx.Interpreter` does the
same, but takes many times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

from rekindle.pytorch.operators import generator_of, tensors_in
from rekindle.pytorch.planned._segments import Segment


def boxed(module: fx.GraphModule, _: object = None) -> Callable[[list[Any]], list[Any]]:
    """Return a function that runs `module`.

    The function takes a list of arguments, which it empties, and returns a list of results.
    """
    writer = _Writer(module)
    source = writer.source()
    scope = dict(writer.scope)
    exec(compile(source, "<rekindle graph>", "exec"), scope)
    run = scope["run"]
    run._boxed_call = True
    return run


class _Writer:
    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.scope: dict[str, Any] = {}
        self.names: dict[fx.Node, str] = {}

    def source(self) -> str:
        graph = self.module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for node in graph.nodes:
            self.names[node] = f"v{len(self.names)}"
        given = "".join(f"{self.names[node]}, " for node in placeholders)
        lines = [f"{given or '_'} = args" if given else "pass", "args.clear()"]
        last = {}
        for node in graph.nodes:
            for source in node.all_input_nodes:
                last[source] = node
        dead: dict[fx.Node | None, list[str]] = {}
        for node in graph.nodes:
            dead.setdefault(last.get(node, node), []).append(self.names[node])
        for node in graph.nodes:
            gone = dead.get(node, [])
            if isinstance(node.target, Segment):
                lines += self._segment(node, [name for name in gone if name != self.names[node]])
                gone = [name for name in gone if name == self.names[node]]
            else:
                lines += self._statement(node)
            if node.op != "output" and gone:
                lines.append(f"del {', '.join(gone)}")
        return "def run(args):\n" + "".join(f"    {line}\n" for line in lines)

    def _statement(self, node: fx.Node) -> list[str]:
        name = self.names[node]
        match node.op:
            case "placeholder":
                return []
            case "get_attr":
                value: Any = self.module
                for part in str(node.target).split("."):
                    value = getattr(value, part)
                return [f"{name} = {self._constant(value)}"]
            case "output":
                return [f"return {self._text(list(node.args[0]))}"]  # type: ignore[arg-type]
            case _:
                arguments = [self._text(arg) for arg in node.args]
                arguments += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
                target = _PLAIN.get(node.target, node.target)
                return [f"{name} = {self._constant(target)}({', '.join(arguments)})"]

    def _segment(self, node: fx.Node, gone: list[str]) -> list[str]:
        """Return the lines that call a segment.

        The arguments are passed in a list. The variables `gone` are deleted, because nothing reads
        them afterwards. Then only that list refers to their values, so the segment's code can free
        these values.
        """
        assert isinstance(node.target, Segment)
        lines = [f"given = {self._text(list(node.args))}"]
        if gone:
            lines.append(f"del {', '.join(gone)}")
        return [*lines, f"{self.names[node]} = {self._constant(node.target.compile())}(given)"]

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, list):
            return f"[{', '.join(self._text(item) for item in value)}]"
        if isinstance(value, tuple):
            return f"({''.join(f'{self._text(item)}, ' for item in value)})"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name


def _run_and_save(func: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Run `func`; return the state that its random number generator had before, and the result."""
    generator = _generator(args, kwargs)
    return generator.get_state(), func(*args, **kwargs)


def _run_with(state: torch.Tensor, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `func` with its random generator in `state`; then undo the change of the generator."""
    generator = _generator(args, kwargs)
    now = generator.get_state()
    generator.set_state(state)
    try:
        return func(*args, **kwargs)
    finally:
        generator.set_state(now)


def _generator(args: Any, kwargs: dict[str, Any]) -> torch.Generator:
    return generator_of(tensors_in(args), [], kwargs.get("device"))


#: Plain functions that replace higher-order operators, which cannot run inside a dispatch mode.
_PLAIN: dict[Any, Any] = {
    run_and_save_rng_state: _run_and_save,
    run_with_rng_state: _run_with,
}
