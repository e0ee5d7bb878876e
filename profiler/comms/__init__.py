"""Every collective of a running job: traced as it happens, and reported over all ranks.

tracer.py is what a user starts; capture.py is where PyTorch calls us; clock.py tells start and end; writer.py puts
lines into a file for each rank, in the format of `ir.comms.record`; readers/ read those and the traces of other
tools; merge.py joins the ranks, report.py adds up.
"""

from __future__ import annotations
