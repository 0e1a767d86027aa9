"""DistCA: core attention disaggregation. This package holds the command line and the stubs."""

__version__ = "0.1.0"
