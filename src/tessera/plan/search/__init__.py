"""Search: candidates of every planner, and the judge that compares them."""
