"""Memory and the kernels that work on it: copy, digest, freeze. A port with its implementations, in C and in NumPy.

Which bytes a kernel touches is decided in plan/, as tables of integers; here they are checked once and executed.
"""
