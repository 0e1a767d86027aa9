"""A server's decisions, as state machines: methods for what happens, instructions out.

No lock, no I/O, no clock, no thread and no tensor; ``attention_node.tick_server`` is the shell that
carries instructions out.
"""
