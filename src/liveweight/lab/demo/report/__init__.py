"""The demo's report: one page, complete in itself, drawn from the run's records."""
