"""Which of several control planes leads, and the epochs that it hands out."""
