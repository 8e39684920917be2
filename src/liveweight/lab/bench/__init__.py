"""Measurements. Each returns a frozen value; how it is shown is cli/'s."""
