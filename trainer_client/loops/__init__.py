"""Training loops: loaders, losses, trainers of libraries, sharded and tensor-parallel models."""
