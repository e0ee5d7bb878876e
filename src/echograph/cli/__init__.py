"""The commands; the one place where rooms meet."""

import gc

# What a command imports and builds lives until it ends: the usual thresholds make it look for garbage in vain.
gc.set_threshold(100_000, 50, 50)
