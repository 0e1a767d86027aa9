"""The election of a leader among control planes, and its epochs."""
