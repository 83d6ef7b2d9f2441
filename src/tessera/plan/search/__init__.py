"""Search: candidates of every planner, and the task that compares them."""
