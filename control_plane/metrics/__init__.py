"""The metrics of the control plane."""
