"""GPUs: one worker process per device, one CUDA graph per microbatch and program, transfers inside.

Importing this package imports nothing; most of its modules import torch.
"""
