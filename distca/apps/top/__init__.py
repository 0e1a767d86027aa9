"""``distca top``: what a cluster does now, read from its control plane."""
