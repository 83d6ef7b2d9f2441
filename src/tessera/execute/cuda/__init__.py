"""GPUs: one worker process per device, one CUDA graph per microbatch and program, sends and waits inside.

Importing this package imports nothing; most of its modules import torch.
"""
