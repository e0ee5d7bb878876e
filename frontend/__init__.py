"""Frontends: each turns what it reads into a `StepGraph`, or a trace into a timeline."""
