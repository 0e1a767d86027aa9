"""GRPO whose groups of completions are packed as trees, on two ranks of a CPU."""
