"""How ranks read an offer: a port, a registry of transfer modes, and one module per mode that holds both of its halves."""
