"""Observations -> which policy now, and when to plan anew."""
