"""The training program: a small Llama on text, in a user's own loop around an attached model."""
