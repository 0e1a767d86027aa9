"""Megatron-core with served core attention."""
