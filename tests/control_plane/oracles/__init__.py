"""What no plan can undercut, computed without the planner, and random steps to hold it against."""
