"""Core attention as data: documents, CA-tasks, plans, routing, kernels and their cost.

No network and no gRPC. Everything here is a value or a pure function, except the kernels' work on
the tensors they are given.
"""
