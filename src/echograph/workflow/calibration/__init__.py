"""Profiles of devices and fabrics, fitted to tables of measured kernels and collectives."""
