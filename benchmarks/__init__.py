"""Measured claims: what the README and the documents say of speed and size, as commands that anyone can run."""
