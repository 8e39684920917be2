"""The embedded engine: a small inference server that runs where there is no GPU. Models, cache, scheduler, ranks."""
