"""GPUs: one worker process per device, one CUDA graph per microbatch and program, sends and waits inside.

    device      one device of a cluster opened on its GPU, or disjoint sets of SMs of one card
    pace        which launches and sends keep time, the common time scale, and the kernel that keeps it
    transport   how a graph sends and receives, and where; `direct` (ipc, nvshmem) and `host` are such ways
    graphs      shares of programs, captured for one microbatch each, and the memory under them
    worker      the process: orders in, graphs launched, answers out
    measure     what launches cost on these devices, stamped in their place in the step

Importing this package imports nothing; most of its modules import torch.
"""
