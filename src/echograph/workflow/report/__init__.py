"""`--html` of `echosim run` and `echosim compare`: predictions as pages, drawn as those of what was measured.

`lanes` puts the step on a timeline, `prediction` and `comparison` are the pages, `parts` what both have.
"""
