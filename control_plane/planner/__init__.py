"""The inside of the planners: cost tables, geometry of cuts, the steps of the balanced planner."""

DEFAULT_PLANNER = "balanced"
"""The planner of jobs that name none; see :mod:`control_plane.planner.planners`."""
