"""PyTorch's insides: checkpoints, compiled code, threads and random numbers."""
