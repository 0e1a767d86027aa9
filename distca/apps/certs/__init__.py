"""Certificates for development: an authority, and one certificate for each role."""
