"""Collectives: the records of their traces, the operations that these name, and how bandwidth is counted."""
