"""OpenAI's routes: requests, choices, streams."""
