"""The planners of a control plane, each compiled as soon as it can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from control_plane.cold_start.planner import ColdPlanner, PlannerState
from control_plane.planner.planners import PLANNERS
from control_plane.planner.planning import Planner


class ColdPlanners:
    """A wrapper of those ``planners`` that are compiled; others, which are plain Python, stay.

    Args:
        planners: by name.
        on_change: called with each planner's new state, on any thread.
        on_failure: called each time that compiling has failed, likewise.

    Attributes:
        planners: by the same names.
    """

    def __init__(
        self,
        planners: Mapping[str, Planner],
        *,
        on_change: Callable[[str, PlannerState], None] = lambda name, state: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._cold = {
            name: ColdPlanner(name, on_change=on_change, on_failure=on_failure)
            for name, planner in planners.items()
            if PLANNERS.get(name) is planner
        }
        self.planners: Mapping[str, Planner] = {**planners, **self._cold}

    def start(self, name: str) -> None:
        """Loads what planner ``name`` is compiled to, or begins to compile it; blocks for a second.
        The others follow when a job asks for them."""
        if name in self._cold:
            self._cold[name].start()

    def state(self, name: str) -> PlannerState:
        """The state of planner ``name``; one that is plain Python counts as compiled."""
        return self._cold[name].state if name in self._cold else PlannerState.COMPILED

    def close(self) -> None:
        """Ends all processes; a plan in the making is dropped."""
        for planner in self._cold.values():
            planner.close()
