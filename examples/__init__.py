"""Training loops that run, one folder a framework, and the method itself, small: `nano_distca`."""
