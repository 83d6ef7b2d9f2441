"""Stepper: the protocol between the service and its devices; written down in `execute.serving`.

It is there because those who keep it are: `execute.stepper` on worker processes, `execute.cuda` on GPUs.
"""

from tessera.execute.serving import Shape, SlotsLost, StepDone, StepKind, Stepper, Tensors, Use

__all__ = ["Shape", "SlotsLost", "StepDone", "StepKind", "Stepper", "Tensors", "Use"]
