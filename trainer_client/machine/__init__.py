"""What a rank decides, as a state machine: events in, instructions out. No lock, no I/O, no clock,
no thread and no tensor; ``trainer_client.step.rank_steps`` is the shell that carries instructions
out.
"""
