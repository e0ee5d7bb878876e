"""Echograph: a compiler and simulator for distributed deep-learning training."""

from __future__ import annotations

__version__ = "0.1.0"
