"""Build and solve integer programs. No other file uses the solver HiGHS (Huangfu and Hall, 2018).

A `Model` collects columns and rows as arrays. A column is a variable of the program, and a row is a
constraint. `solve` returns the best solution and the proven bound of the objective, which is
minimised. The solver uses one thread, because planners may run in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

try:
    import highspy
except ImportError as error:  # The solver is an optional extra of the package.
    raise ImportError(
        "this planner solves integer programs with HiGHS; write: pip install 'rekindle[plan]'"
    ) from error

Floats = NDArray[np.float64]


class _Silent(highspy.Highs):
    """Solver that prints nothing.

    HiGHS 1.16 prints its version when callbacks are enabled. The constructor of `Highs` enables
    them with the method that this class overrides.
    """

    def enableCallbacks(self) -> None:
        self.silent()
        super().enableCallbacks()


@final
@dataclass(frozen=True)
class Solution:
    """Result of solving an integer program.

    Attributes:
        values: The values of the columns in the best solution, or None if none was found.
        objective: The objective of the best solution; infinite if none was found.
        bound: The proven lower bound of the objective.
        infeasible: True if it is proven that no solution exists.
    """

    values: Floats | None
    objective: float
    bound: float
    infeasible: bool


@final
class Model:
    """Integer program: minimise c x, subject to all rows, lower <= x <= upper, some x integer."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._integer: list[bool] = []
        self._starts: list[int] = [0]
        self._columns: list[int] = []
        self._coefficients: list[float] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []

    def column(
        self, cost: float = 0.0, *, lower: float = 0.0, upper: float = 1.0, integer: bool = False
    ) -> int:
        """Add a variable to the integer program, and return the number of its column."""
        self._cost.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        self._integer.append(integer)
        return len(self._cost) - 1

    def row(
        self,
        columns: Sequence[int],
        coefficients: Sequence[float],
        *,
        lower: float = -np.inf,
        upper: float = np.inf,
    ) -> None:
        """Add the constraint lower <= sum of coefficients * columns <= upper."""
        self._columns += columns
        self._coefficients += coefficients
        self._starts.append(len(self._columns))
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    def price(self, column: int, extra: float) -> None:
        """Add `extra` to the coefficient of a column in the objective."""
        self._cost[column] += extra

    def fix(self, column: int, value: float) -> None:
        """Fix the value of a variable, given by the number of its column."""
        self._lower[column] = self._upper[column] = value

    @property
    def columns(self) -> int:
        return len(self._cost)

    def solve(
        self,
        *,
        time_limit: float = np.inf,
        relative_gap: float = 0.0,
        absolute_gap: float = 0.0,
        start: Floats | None = None,
        relaxed: bool = False,
        seed: int = 0,
        watch: Callable[[float, float], None] | None = None,
        enough: Callable[[], bool] | None = None,
    ) -> Solution:
        """Solve the integer program with the solver HiGHS.

        Args:
            time_limit: Seconds after which the best solution so far is returned.
            relative_gap: Stop when objective and bound are this close, as a share of the objective.
            absolute_gap: Stop when objective and bound are this close.
            start: A solution to start from.
            relaxed: Let integer variables take fractional values.
            seed: The random seed of the solver, which determines the order of the search.
            watch: A function that is called with (objective, bound) while solving.
            enough: A function that is called while solving; when it returns True, solving ends.
        """
        highs: Any = _Silent()
        highs.silent()
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("time_limit", max(0.0, float(time_limit)))
        highs.setOptionValue("mip_rel_gap", relative_gap)
        highs.setOptionValue("mip_abs_gap", max(absolute_gap, 1e-6))
        highs.setOptionValue("mip_feasibility_tolerance", 1e-7)
        highs.setOptionValue("random_seed", seed)
        highs.passModel(self._program(relaxed))
        if start is not None and not relaxed:
            highs.setSolution(
                len(start), np.arange(len(start), dtype=np.int32), np.asarray(start, np.float64)
            )
        if watch is not None and not relaxed:

            def report(event: Any) -> None:
                watch(event.data_out.mip_primal_bound, event.data_out.mip_dual_bound)

            highs.cbMipLogging.subscribe(report)
        if enough is not None and not relaxed:

            def interrupt(event: Any) -> None:
                if enough():
                    event.interrupt()

            highs.cbMipInterrupt.subscribe(interrupt)
        highs.run()
        return self._solution(highs, relaxed)

    def _program(self, relaxed: bool) -> Any:
        """Convert the model to a linear program of the solver HiGHS."""
        program: Any = highspy.HighsLp()
        program.num_col_ = len(self._cost)
        program.num_row_ = len(self._row_lower)
        program.col_cost_ = np.array(self._cost)
        program.col_lower_ = np.array(self._lower)
        program.col_upper_ = np.array(self._upper)
        program.row_lower_ = np.array(self._row_lower)
        program.row_upper_ = np.array(self._row_upper)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.array(self._starts, dtype=np.int32)
        program.a_matrix_.index_ = np.array(self._columns, dtype=np.int32)
        program.a_matrix_.value_ = np.array(self._coefficients)
        if not relaxed:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            program.integrality_ = [kinds[integer] for integer in self._integer]
        return program

    def _solution(self, highs: Any, relaxed: bool) -> Solution:
        status = highs.getModelStatus()
        info = highs.getInfo()
        infeasible = status == highspy.HighsModelStatus.kInfeasible
        found = info.primal_solution_status == highspy.kSolutionStatusFeasible
        values = np.array(highs.getSolution().col_value) if found and not infeasible else None
        objective = float(info.objective_function_value) if values is not None else np.inf
        if relaxed:
            solved = status == highspy.HighsModelStatus.kOptimal
            bound = objective if solved else -np.inf
        else:
            bound = float(info.mip_dual_bound)
        if infeasible:
            bound = np.inf
        return Solution(values, objective, bound, infeasible)
