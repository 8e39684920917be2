"""HTTP: the OpenAI routes of the embedded engine, the routes for operators, health and metrics.

Owns schemas, status codes and streams. Computation is engine/'s; argv and exit codes are cli/'s.
"""
