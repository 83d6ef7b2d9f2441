"""paper: the published evaluation, made again by commands anyone can run."""
