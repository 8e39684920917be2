"""vLLM: live updates through its own interface for weight transfer. Nothing of vLLM is patched.

`workers/` runs in vLLM's worker processes, `client/` in the trainer's process, whose environment needs no vLLM. `plugin` is vLLM's entry
point, `middleware` runs in vLLM's API server, `engine` is `lw.vllm(...)`. The round between client and workers is rounds/'s, over our wire.
"""
