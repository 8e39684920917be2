"""One file for each command of `liveweight`; `main` collects them."""
