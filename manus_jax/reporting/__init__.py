"""The HTML report of a run, built from its run directory."""
