"""A rank's link to its control plane."""
