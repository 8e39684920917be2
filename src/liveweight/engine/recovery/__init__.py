"""Snapshots of committed versions, and an engine that replaces ranks it lost."""
