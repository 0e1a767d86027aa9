"""Answers of servers, compared and recomputed."""
