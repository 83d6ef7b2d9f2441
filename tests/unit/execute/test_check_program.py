"""The program's verifier: every way to break a program is found and named."""

import dataclasses
import random
from collections.abc import Callable

import pytest

import engine_factory as made
from tessera.errors import RuleBroken
from tessera.execute.lower import check_programs
from tessera.execute.memory import ready_programs
from tessera.ir import Free, Plan, Program, Recv, Run, Send


def make(seed: int = 0) -> tuple[Plan, Program]:
    """A scattered program, right as it is."""
    plan = made.plan_of([made.scattered(random.Random(seed), [0, 1])], 2)
    return plan, ready_programs(plan)[0][-1]


def without(kind: type, number: int) -> Callable[[Program], Program]:
    """Removes one instruction."""

    def change(program: Program) -> Program:
        key = "launch" if kind is Run else "transfer"
        columns = tuple(
            tuple(i for i in column if not (isinstance(i, kind) and getattr(i, key) == number))
            for column in program.instructions
        )
        return dataclasses.replace(program, instructions=columns)

    return change


def moved(kind: type, to_front: bool) -> Callable[[Program], Program]:
    """Moves the first instruction of a kind to an end of its list."""

    def change(program: Program) -> Program:
        for device, column in enumerate(program.instructions):
            found = next((i for i in column if isinstance(i, kind)), None)
            if found is not None:
                rest = tuple(i for i in column if i is not found)
                lists = list(program.instructions)
                lists[device] = (found, *rest) if to_front else (*rest, found)
                return dataclasses.replace(program, instructions=tuple(lists))
        raise AssertionError("no such instruction")

    return change


def freed_early(program: Program) -> Program:
    """A device frees what its next launch reads."""
    launches = made.unit().graphs[program.step].trace.launches
    for device, column in enumerate(program.instructions):
        for index, found in enumerate(column):
            run = next((i for i in range(index - 1, -1, -1) if isinstance(column[i], Run)), None)
            if isinstance(found, Free) and run is not None:
                before = column[run]
                assert isinstance(before, Run)
                if any(a.read and a.buffer == found.buffer for a in launches[before.launch].accesses):
                    early = (*column[:run], found, *column[run:index], *column[index + 1 :])
                    lists = [*program.instructions[:device], early, *program.instructions[device + 1 :]]
                    return dataclasses.replace(program, instructions=tuple(lists))
    raise AssertionError("no launch reads what is freed behind it")


def freed_at_once(program: Program) -> Program:
    """A device frees a buffer before the launch that makes it."""
    for device, column in enumerate(program.instructions):
        found = next((i for i in column if isinstance(i, Free)), None)
        if found is not None:
            lists = list(program.instructions)
            lists[device] = (found, *(i for i in column if i is not found))
            return dataclasses.replace(program, instructions=tuple(lists))
    raise AssertionError("nothing is freed")


def sent_twice(program: Program) -> Program:
    """One transfer has two senders."""
    first = (*program.instructions[0], Send(0))
    return dataclasses.replace(program, instructions=(first, *program.instructions[1:]))


def circle(program: Program) -> Program:
    """Each device waits for the other's first transfer before it does anything."""
    lists = []
    for device, column in enumerate(program.instructions):
        first = next(n for n, t in enumerate(program.transfers) if t.dst == device)
        rest = tuple(i for i in column if i != Recv(first))
        lists.append((Recv(first), *rest))
    return dataclasses.replace(program, instructions=tuple(lists))


def with_old_version(program: Program) -> Program:
    """A transfer claims to move another version than its sender has."""
    first = dataclasses.replace(program.transfers[0], value=program.transfers[-1].value)
    return dataclasses.replace(program, transfers=(first, *program.transfers[1:]))


def test_the_program_is_right_before_it_is_broken() -> None:
    """Otherwise the cases below would show nothing."""
    plan, program = make()

    check_programs(plan, [program])
    assert {Run, Send, Recv, Free} == {type(i) for c in program.instructions for i in c}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (without(Run, 3), "every launch runs once"),
        (without(Recv, 0), "every transfer has one sender and one receiver"),
        (moved(Send, True), "every transfer finds the version it moves on its sender"),
        (moved(Recv, False), "every read finds the version it needs"),
        (freed_early, "every read finds the version it needs on its device"),
        (freed_at_once, "nothing is used after it is freed"),
        (sent_twice, "every transfer has one sender and one receiver"),
        (circle, "no circular wait"),
        (with_old_version, "every transfer finds the version|every read finds the version"),
    ],
)
def test_a_broken_program_is_named(change: Callable[[Program], Program], rule: str) -> None:
    """Each mutation breaks the rule that it is about."""
    plan, program = make()

    with pytest.raises(RuleBroken, match=rule):
        check_programs(plan, [change(program)])
