"""Configurations and training loops that run, one folder a framework."""
