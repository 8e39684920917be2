"""Events: each fact is emitted once, as a frozen value; log lines, metrics and reports are readers of them.

Owns the closed set of events and the bus that carries them inside one process.
Nothing here crosses a process: what another process must know is a message of wire/.
"""
