"""Durations: measured, fitted and estimated."""
