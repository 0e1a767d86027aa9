"""One module for each command; heavy imports happen when the command runs."""
