"""Core attention that is computed where the model is, by PyTorch alone."""
