"""What services say to each other: codec, tokens, identities, the control plane's client."""
