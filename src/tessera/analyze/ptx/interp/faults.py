"""What the interpreter raises: the launch did something undefined, or something it does not know."""

from tessera.errors import TesseraError


class InterpreterFault(TesseraError):
    """A launch that cannot go on; `place` is `file:line` of the instruction."""


class OutOfBounds(InterpreterFault):
    """An access outside every buffer, a misaligned one, or one to a space that does not hold the address."""


class UnknownInstruction(InterpreterFault):
    """An instruction, or a form of one, that the interpreter has no rule for."""


class Deadlock(InterpreterFault):
    """Lanes that wait for lanes that never come, or a launch that runs on past its step limit."""


class BadLaunch(InterpreterFault):
    """Arguments, grid or block that do not fit the kernel."""


class BadAccess(Exception):
    """Inside the interpreter only: an access of one lane that fails; the engine adds place and lane."""

    def __init__(self, message: str, lane: int) -> None:
        super().__init__(message, lane)
        self.message, self.lane = message, lane
