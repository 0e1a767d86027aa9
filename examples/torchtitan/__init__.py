"""torchtitan with served core attention."""
