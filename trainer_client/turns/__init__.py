"""A row or microbatch in two nano-batches that take turns."""
