"""The contract between services: codec, tokens, identities, the control plane's client."""
