"""Decisions as data: which bytes go where, what is digested, how a stream is cut into buckets. Pure: no I/O, no bytes touched."""
