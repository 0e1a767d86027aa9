"""The report of a run: its record as JSON, a table, figures and a self-contained HTML page."""
