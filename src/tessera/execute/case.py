"""Case: one program under the checks of `check_program`, and what all of them need."""

from dataclasses import dataclass, field

from tessera.errors import RuleBroken
from tessera.execute.words import describe
from tessera.ir import Graph, Instruction, Plan, Program, Recv, Send, Signal, Wait


@dataclass(slots=True)
class Order:
    """One order in which the instructions can run, and what each is known to come after."""

    # (device, position)
    order: list[tuple[int, int]] = field(default_factory=list)
    # before[node][device]: how many instructions of the device are over when the node starts, which is
    # (device, position) or, for a transfer, (-1, number).
    before: dict[tuple[int, int], list[int]] = field(default_factory=dict)


class Case:
    """A program to be checked, with where its sends, receives, signals and waits are."""

    def __init__(self, plan: Plan, graph: Graph, program: Program) -> None:
        self.plan, self.graph, self.program = plan, graph, program
        # (kind of instruction, transfer) -> (device, position)
        self.at: dict[tuple[type, int], tuple[int, int]] = {}
        for device, column in enumerate(program.instructions):
            for position, instruction in enumerate(column):
                if isinstance(instruction, (Send, Recv, Signal, Wait)):
                    self.at[type(instruction), instruction.transfer] = (device, position)

    def broken(self, rule: str, device: int, what: str) -> RuleBroken:
        """The error for a rule that a device's list breaks."""
        name = self.plan.cluster.devices[device].name
        place = f"lane {self.program.lane}, step {self.program.step}, device {name}"
        return RuleBroken(f"program breaks the rule: {rule}: {what}", "Please report this plan.", place)

    def words(self, instruction: Instruction) -> str:
        """An instruction in words."""
        return describe(self.graph, self.program, instruction)
