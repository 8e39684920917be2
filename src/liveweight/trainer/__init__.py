"""The trainer's side: sources of weights, offers made of them, and the publisher."""
