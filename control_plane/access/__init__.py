"""Who may call what, how often and how many at a time."""
