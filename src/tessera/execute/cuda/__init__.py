"""GPUs: one worker process per device, one CUDA graph per microbatch and program, transfers inside.

    device      a GPU, or a disjoint set of its SMs
    pace        modelled time on dilated devices
    transport   sends and receives inside graphs; implemented by `direct` (ipc, nvshmem) and `host`
    graphs      captured shares of programs, and their memory
    worker      the process: orders in, graphs launched, answers out
    measure     costs of launches, stamped in place in the step

Importing this package imports nothing; most of its modules import torch.
"""
