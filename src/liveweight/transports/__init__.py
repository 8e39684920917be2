"""How ranks read an offer: a port, a registry of transfer modes, and one package per mode with its source half and its rank half."""
