"""Search: candidates of every planner, and the judge that compares them.

`task` is one planning run, `local` the search of throughput plans, `planners` all planners by name,
`objectives` what cost and energy are; `judge` compares what they find, `robust` under costs that are wrong.
"""
