"""The static pass over segments: a call is worked out once, however often programs repeat it.

A *segment* is a run of operations of one call between two rendezvous with other programs. What it does to the
clocks of the streams that it uses, and of the host, is linear in max-plus algebra: each clock afterwards is the
largest of (clock before + a constant). `cut` finds the segments, `transfer` works the constants of each kind of
segment out, `run` sends the clocks of all programs through their segments, `critical_path` follows the causes
back, and `timeline` writes a program's times out. The times are those of `engine.static`, to the picosecond.
"""
