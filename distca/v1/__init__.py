"""Generated from ``proto/distca/v1`` by ``tools/generate_stubs.py``; do not edit."""
