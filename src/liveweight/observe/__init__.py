"""What happens, said once: events are frozen values; log lines, metrics and reports are readers of them.

Owns the closed set of events and the bus that carries them inside one process.
Nothing here crosses a process: what another one must learn is a message, and messages are wire/'s.
"""
