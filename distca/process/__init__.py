"""What every process does: metrics, traces, signals, and text of others made safe to show."""
