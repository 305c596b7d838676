"""The report of a run: one HTML file that shows what its directory holds."""
