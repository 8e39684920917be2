"""HTTP: the OpenAI routes of the embedded engine, its health and its metrics.

Owns schemas, status codes and streams. What is computed, and in which order, is engine/'s; argv and exit codes are cli/'s.
"""
