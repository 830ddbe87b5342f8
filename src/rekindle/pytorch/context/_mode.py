"""The dispatch mode of the core in Python: every operator within a budget comes by here."""

from __future__ import annotations

from typing import Any, final

from torch._C._dynamo import eval_frame as _dynamo
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.pytorch.held import Touching
from rekindle.pytorch.online import Runtime, Work, unwatched
from rekindle.pytorch.operators import Operator, operator, takes_itself_apart


class Mode(TorchDispatchMode):
    """Hands every operator to the runtime. Views make no memory and pass."""

    supports_higher_order_operators = True

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        #: Or who stands in for it: during an optimizer's step, and when the budget is over.
        self.runtime: Any = runtime

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # by `_keep_dynamo_out` instead: the wrapper costs as much as all of a mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled stays so, and comes here as one operator (R12)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if type(func) is not OpOverload and isinstance(func, HigherOrderOperator):
            resort, kwargs = self.runtime.driver.resort, kwargs or {}
            if resort is not None:
                return resort.around(self.runtime.run_whole, func, args, kwargs)
            return self.runtime.run_whole(func, args, kwargs)
        if types and any(map(takes_itself_apart, types)):  # a DTensor: its parts will come here
            return NotImplemented
        facts = operator(func)
        kwargs = kwargs or {}
        driver = self.runtime.driver
        with unwatched():
            if driver.work.thread and driver.work.mine:
                return facts.func(*args, **kwargs)
            if driver.resort is not None:
                return driver.resort.around(self._run, facts, args, kwargs)
            return self._run(facts, args, kwargs)

    def _run(self, facts: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime = self.runtime
        if facts.view:
            if facts.resizes:
                return runtime.set_memory(facts, args, kwargs)
            if facts.marks:
                return runtime.mark(facts, args, kwargs)
            runtime.driver.meet(args[0])
            return facts.func(*args, **kwargs)
        return runtime.run(facts, args, kwargs)


@final
class Over:
    """In the place of the runtime in the mode of a thread that outlives the budget."""

    def __init__(self) -> None:
        self.driver = self
        self.work = Work()
        self.resort = None

    def meet(self, tensor: object) -> None:
        pass

    def run(self, facts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return facts.func(*args, **kwargs)

    mark = set_memory = run_whole = run


def _keep_dynamo_out() -> None:
    """Inside compiled programs, what the runtime itself runs is not to be compiled."""
    skip = _dynamo._FrameAction.SKIP
    modes = (Mode.__torch_dispatch__, Touching.__torch_dispatch__)
    for entry in (*modes, Runtime.pack, Runtime.unpack):
        strategy = _dynamo._FrameExecStrategy(skip, skip)  # this frame, and all below it
        _dynamo.set_code_exec_strategy(entry.__code__, strategy)


_keep_dynamo_out()
