"""A rank's step: lanes, exchanges, replies and recovery."""
