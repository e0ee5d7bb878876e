"""Frontends: each turns what it reads into a graph, or a trace into a timeline."""
