"""The nixl transport: InfiniBand and RoCE."""
