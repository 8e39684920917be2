"""The process of one rank: weights, KV cache, and the loop that carries out steps."""
