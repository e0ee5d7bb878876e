"""`--html` of `echosim run` and `echosim compare`: predictions as pages, drawn as those of what was measured.

`details` says what a prediction knows beyond its JSON, `lanes` puts the step on a timeline, `assumptions` says what
it rests on, `prediction` and `comparison` are the pages.
"""
