"""vLLM: live updates through its own seam for weight transfer. Nothing of vLLM is patched.

In vLLM's workers: plugin, backend, rank, target, arenas, install, seam. In the trainer, whose environment needs no vLLM: engine,
replica, controls. The round between them is worker/'s and trainer/'s, over our wire.
"""
