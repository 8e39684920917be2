"""Shared memory on one host: the source's arenas are memfds, which ranks map read-only, or memory of a device, lent by handle.

`arena` and `device_arena` are the memory and what both halves must agree on about it, `source` the half of the publisher, `reader`
the half of a rank.
"""
