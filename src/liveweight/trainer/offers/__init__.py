"""Versions held ready to be read: frozen, live or ring; and how ranks and engines reach them."""
