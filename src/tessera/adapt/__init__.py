"""Observations -> which policy to follow, and when to replan."""
