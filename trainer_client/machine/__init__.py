"""The decisions of a rank, as a state machine: facts in, instructions out. No lock, no I/O, no
clock, no thread and no tensor; ``trainer_client.step.rank_steps`` is the shell that carries
instructions out.
"""
