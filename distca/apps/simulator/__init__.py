"""The simulator: what a plan would do on 2 to 4096 servers, from lengths and a cost profile."""
