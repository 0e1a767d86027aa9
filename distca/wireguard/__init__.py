"""Membership in an encrypted data network: WireGuard between members, keys by the control plane."""
