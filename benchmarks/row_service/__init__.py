"""Plans of steps as a service on a virtual clock: the scheduler over modelled rows, and a monitor.

The published evaluation compares such policies; what users serve is a service plan
(`tessera.serve.rehearse`).
"""
