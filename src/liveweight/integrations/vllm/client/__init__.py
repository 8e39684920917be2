"""In the trainer's process: vLLM as a replica, by URL, Python object or Ray actor. Needs no vLLM."""
