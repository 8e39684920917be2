"""In vLLM's worker processes: the backend that vLLM makes, and the rank behind it."""
