"""The inside of the planners: cost tables, geometry of cuts, the steps of the balanced planner."""
