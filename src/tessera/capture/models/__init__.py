"""Built-in models, made from their configurations with seeded random weights.

To add one: a function from Step to Workload, registered here under its name.
"""

from collections.abc import Callable

from tessera.capture.workload import Workload
from tessera.errors import CaptureError, UnknownName
from tessera.ir import Step

Builder = Callable[[Step], Workload]

_BUILDERS: dict[str, tuple[Builder, tuple[str, ...]]] = {}


def register(name: str, steps: tuple[str, ...]) -> Callable[[Builder], Builder]:
    """Adds a model; `steps` are the kinds of step it has."""

    def add(builder: Builder) -> Builder:
        if name in _BUILDERS:
            raise ValueError(f"model {name!r} is registered twice")
        _BUILDERS[name] = (builder, steps)
        return builder

    return add


def known_models() -> dict[str, tuple[str, ...]]:
    """Model name -> kinds of step it has."""
    return {name: steps for name, (_, steps) in sorted(_BUILDERS.items())}


def build(step: Step) -> Workload:
    """The workload that a step record describes. The same record gives the same weights."""
    if step.model not in _BUILDERS:
        raise UnknownName("model", step.model, _BUILDERS)
    builder, steps = _BUILDERS[step.model]
    if step.kind not in steps:
        raise UnknownName(f"step of {step.model}", step.kind, steps)
    if step.batch < 1 or step.context < 1 or step.reserve < 0:
        raise CaptureError(
            f"batch {step.batch}, context {step.context} and reserve {step.reserve} make no step",
            "Use a batch and a context of at least 1.",
        )
    return builder(step)


@register("tiny-llama", ("prefill", "decode"))
def _tiny_llama(step: Step) -> Workload:
    """Four layers of the Llama family, wide enough that its matrix products have work to do."""
    from tessera.capture.models.causal import causal_workload

    sizes = {
        "vocab_size": 258,  # bytes, begin, end
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
    }
    return causal_workload("llama", sizes, step)
