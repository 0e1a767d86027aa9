"""The control plane: membership, planning, publication of plans, metrics."""
