"""The gRPC services over :mod:`control_plane.jobs`."""
