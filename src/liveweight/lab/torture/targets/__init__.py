"""Engines that can be tortured: the embedded one, one updated in place, a vLLM server."""
