"""A whole DistCA on this machine: control plane, attention nodes and trainers as processes."""
