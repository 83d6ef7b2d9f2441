"""An instruction in words, for messages."""

from tessera.ir import Free, Graph, Instruction, Program, Run


def describe(graph: Graph, program: Program, instruction: Instruction) -> str:
    """An instruction in words, for messages."""
    match instruction:
        case Run(launch):
            return f"run of launch {launch} ({graph.trace.kernel_of(launch).name})"
        case Free(buffer):
            return f"free of buffer {buffer} ({graph.trace.buffers[buffer].name})"
        case _:
            transfer = program.transfers[instruction.transfer]
            name = graph.trace.buffers[transfer.buffer].name
            word = type(instruction).__name__.lower()
            return f"{word} of transfer {instruction.transfer} (buffer {transfer.buffer}, {name})"
