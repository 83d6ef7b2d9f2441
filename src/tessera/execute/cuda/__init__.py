"""GPUs: one worker process per device, one CUDA graph per microbatch and program, sends and waits inside.

    pace_kernel one thread that keeps time on the device
    device      one device of a cluster opened on its GPU, or disjoint sets of SMs of one card
    pace        which launches and sends keep time, how long each takes, and the common time scale
    transport   how a graph sends and receives, and where; `ipc`, `nvshmem` and `host` are such ways
    graph       one device's share of a program, captured for one microbatch
    graphs      all graphs of one device, and the memory under them
    worker      the process: orders in, graphs launched, answers out
    measure     what launches cost on these devices, stamped in their place in the step
    probe       which ways between workers this machine has

Importing this package imports nothing; most of its modules import torch.
"""
