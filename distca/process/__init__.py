"""Common parts of every process: metrics, traces, signals, and text of others made safe."""
