"""Pipelines of ``torch.distributed.pipelining``."""
