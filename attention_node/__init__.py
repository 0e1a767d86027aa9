"""The attention server: receives ticks, fuses ready CA-tasks into kernel calls, returns results."""
