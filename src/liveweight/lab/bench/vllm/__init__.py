"""The benchmark of updates of a vLLM server."""
