"""The PTX analyzer: what a kernel reads and writes, proved from its code."""
