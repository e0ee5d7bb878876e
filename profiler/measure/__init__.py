"""Measuring on the machine at hand: single operations, what the host adds to them, and whole steps."""
