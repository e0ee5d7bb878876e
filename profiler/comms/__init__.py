"""Every collective of a running job: traced as it happens, and reported over all ranks.

tracer.py is what a user starts, and writes a file for each rank in the format of `ir.comms.record`; capture.py is
where PyTorch calls us. readers/ read those files and the traces of other tools; report.py joins the ranks and adds
up; views.py shows it.
"""

from __future__ import annotations
