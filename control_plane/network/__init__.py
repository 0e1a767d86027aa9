"""An encrypted data network: its members, their keys and addresses."""
