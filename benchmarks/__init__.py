"""Benchmarks: each module is a command that prints a table and can write JSON."""
