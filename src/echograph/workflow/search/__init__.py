"""The best plan for a step: `search`.

`space` lists the plans, as axes with the values that divide; `bounds` says what none of them can be better than,
`objective` what is better, and `branch` looks for the best. `sizing` answers what follows from it: how many GPUs,
which cluster, what fits. `moves` makes one plan better step by step. `writers` writes a plan as others say
it.
"""

from echograph.workflow.search.branch import Candidate, SearchResult, search

__all__ = ["Candidate", "SearchResult", "search"]
