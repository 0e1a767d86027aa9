"""The ucxx transport: one host, TCP and CUDA IPC."""
