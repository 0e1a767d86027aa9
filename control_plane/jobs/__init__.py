"""Jobs, members and steps: the state of the control plane, and what changes it."""
