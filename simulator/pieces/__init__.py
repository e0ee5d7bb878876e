"""The static pass in pieces: a call is worked out once, however often programs repeat it.

A *piece* is a stretch of operations that one call runs between two meetings with other programs. What it does to
the clocks of the streams that it uses, and of the host, is linear in the algebra of maximum and addition: each
clock afterwards is the largest of (clock before + a constant). `passages` works these constants out for each kind
of piece, `run` sends the clocks of all programs through their pieces, `path` follows the causes back, and
`timeline` writes a program's times out. The times are those of `engine.static`, to the picosecond.
"""
