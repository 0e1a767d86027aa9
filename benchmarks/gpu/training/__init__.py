"""One training step of a Llama over several GPUs, with core attention spread in different ways."""
