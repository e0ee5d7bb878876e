"""Fits of devices and fabrics to measurements."""
