"""Previews: what disaggregation would do, shown before any GPU is rented."""
