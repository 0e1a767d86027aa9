"""The limits of callers: methods, rates and numbers at a time."""
