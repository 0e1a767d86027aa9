"""Who may do what: certificates, roles, tokens, limits, and what must never be in a log."""
