"""Moves the bytes of a tick between processes: transports, connections and buffers.

Knows bytes and peers, not attention.
"""
