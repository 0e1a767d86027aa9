"""Kernels that run fused batches of CA-tasks, one module per implementation."""
