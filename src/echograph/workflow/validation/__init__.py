"""Predictions held against a table of measured training steps."""
