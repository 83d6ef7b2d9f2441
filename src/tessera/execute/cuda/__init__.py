"""Plans on GPUs, in one process: one CUDA graph a slot and program, spanning every device of the plan.

    order       Program -> the order of launches and copies, and who waits for whom (no torch)
    stretch     what a launch must take on a stretched device, and the common time scale (no torch)
    launches    the launches of a trace over one GPU's memory
    turnstile   the one-thread kernel that keeps time on the device
    issue       one program issued on streams, with its waits and turnstiles
    driver      the CUDA driver by ctypes: streams, green contexts
    partition   disjoint sets of SMs of one card
    machine     a plan's devices opened on this machine's GPUs
    slot        memory and streams of one request in flight
    pace        which launches and copies keep time, and how long each takes
    workspace   scratch memory of matrix products inside a graph's own pool
    graph       one program captured for one slot
    captured    all graphs of some plans
    engine      requests through those graphs
    stepper     single steps of a served model through those graphs
    pick        plans tried out, for `execute.pick`
    run         plans from start to end: time scale, requests, comparison, timeline
    spans       what turnstiles wrote -> spans of a timeline
    measure     what launches cost on these devices, stamped in their place in the step
    undivided   the same launches in program order on one GPU: what every divided run must equal
    probe       which ways between GPUs this machine has

Importing this package imports nothing; most of its modules import torch.
"""
