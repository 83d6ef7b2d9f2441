"""What a worker says it has done, held against the program it was given.

Messages have the right types (`messages`); this looks at what they mean. A worker that answers for a
run it has no part in, leaves an output out, or hands over one of another shape is lost, with the reason.
Wrong values in tensors of the right shape are not found.
"""

from collections.abc import Collection

from tessera.execute.messages import Done
from tessera.ir import Program, Trace


def problem_of(
    done: Done,
    trace: Trace,
    program: Program,
    device: int,
    missing: Collection[int],
    skips: Collection[str] = (),
    wants_state: bool = False,
) -> str:
    """What is wrong with an answer to a run that the `missing` have not answered yet; empty if nothing is."""
    if device not in missing:
        return "it answered a run that it has no part in, or answered twice"
    here = {name for name, at in program.outputs if at == device and name not in skips}
    if done.outputs.keys() != here:
        return f"it handed over {_listed(done.outputs)} in place of {_listed(here)}"
    for name, view in trace.outputs:
        made = done.outputs.get(name)
        if made is not None and (made.dtype, made.shape) != (view.dtype, view.shape):
            return f"its '{name}' is {made.dtype} {list(made.shape)}, not {view.dtype} {list(view.shape)}"
    if wants_state and (wrong := _state_problem(done, trace, program, device)):
        return wrong
    if any(row[0] >= len(trace.launches) for row in done.spans):
        return f"it reported a launch beyond the {len(trace.launches)} of the step"
    if any(row[0] >= len(program.transfers) for row in done.transfers):
        return f"it reported a transfer beyond the {len(program.transfers)} of the program"
    return ""


def _state_problem(done: Done, trace: Trace, program: Program, device: int) -> str:
    sizes = {
        trace.buffers[b].name: trace.buffers[b].size_bytes for b, home in program.homes if home == device
    }
    if {name: packed.data.nbytes for name, packed in done.state.items()} != sizes:
        return f"it handed over state {_listed(done.state)} in place of {_listed(sizes)}, or of another size"
    return ""


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "nothing"
