"""The nixl transport. Its tests run when asked for by -m nixl: see conftest.py."""
