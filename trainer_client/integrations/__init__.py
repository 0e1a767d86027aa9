"""Autograd, checkpoints, FSDP, loaders and transformers round the operation."""
