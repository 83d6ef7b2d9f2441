"""Answers of workers: those that do not fit the program they were given are refused with the reason."""

import dataclasses
import random

import pytest
import torch
from msgspec.structs import replace

import engine_factory as made
from tessera.execute.memory import ready_programs
from tessera.execute.messages import Done, pack
from tessera.execute.runs import problem_of
from tessera.ir import Program, Trace

WIDTH = made.WIDTH


@pytest.fixture(scope="module")
def step() -> tuple[Trace, Program]:
    """The first step, whose output is on device 1."""
    plan = made.plan_of([made.scattered(random.Random(0), [0, 1])], 2)
    program = ready_programs(plan)[0][0]
    (name, _), *_ = program.outputs
    return plan.unit.graphs[0].trace, dataclasses.replace(program, outputs=((name, 1),))


RIGHT = Done(1, {"y": pack(torch.zeros(2, WIDTH))}, {}, [(0, 0.0, 1.0, 1.0)])


def test_a_right_answer_has_no_problem(step: tuple[Trace, Program]) -> None:
    """Also one that leaves out what nobody asked for, and one of a device that holds no output."""
    trace, program = step

    assert "" == problem_of(RIGHT, trace, program, 1, {0, 1})
    assert "" == problem_of(replace(RIGHT, outputs={}), trace, program, 1, {1}, ("y",))
    assert "" == problem_of(replace(RIGHT, outputs={}), trace, program, 0, {0})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (replace(RIGHT, outputs={}), "handed over nothing in place of 'y'"),
        (replace(RIGHT, outputs={"z": pack(torch.zeros(1))}), "'z' in place of 'y'"),
        (replace(RIGHT, outputs={"y": pack(torch.zeros(2, 3))}), r"\[2, 3\], not"),
        (replace(RIGHT, outputs={"y": pack(torch.zeros(2, WIDTH).double())}), "float64"),
        (replace(RIGHT, spans=[(10**6, 0.0, 1.0, 1.0)]), "launch beyond"),
        (replace(RIGHT, transfers=[(10**6, 0.0, 1.0)]), "transfer beyond"),
    ],
)
def test_a_wrong_answer_is_named(step: tuple[Trace, Program], wrong: Done, said: str) -> None:
    """What it says that cannot be, in words."""
    import re

    assert re.search(said, problem_of(wrong, *step, 1, {1}))


def test_an_answer_out_of_turn_is_named(step: tuple[Trace, Program]) -> None:
    """From one that has answered already, or has no part in the run."""
    assert "no part in" in problem_of(RIGHT, *step, 1, {0})
