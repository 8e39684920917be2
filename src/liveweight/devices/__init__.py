"""Devices: memory, and the kernels that work on it: copy, digest, freeze. Two ports: `device` has the host's and CUDA's memory,
`kernels` their implementations in C, NumPy and torch.

Which bytes a kernel touches is decided in plan/, as tables of integers; here they are checked once and executed.
"""
