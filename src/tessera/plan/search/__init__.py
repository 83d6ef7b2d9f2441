"""Search: candidates of every planner, and the judge.

`task`: one planning run. `local`: throughput search. `planners`: planners by name. `objectives`: cost and
energy. `judge`: comparison. `robust`: figures under wrong costs.
"""
