"""The trainer process: a transformers model, DDP, and core attention served by DistCA."""
