"""What the control plane exports for Prometheus."""
