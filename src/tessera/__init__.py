"""Tessera makes unlike GPUs work as one."""

__version__ = "0.1.0"
