"""What a run did: its record as JSON, a table, figures and a self-contained HTML page."""
