"""Training frameworks from stock wheels, in an environment of their own: make test-frameworks."""
