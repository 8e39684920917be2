"""The trainer's side: sources of weights, offers made of them, the publisher, and the Replica protocol that it drives."""
