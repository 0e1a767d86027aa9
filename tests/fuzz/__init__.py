"""Malformed inputs to whatever listens: ``python -m tests.fuzz --help``."""
