"""Searches are bounded by work: the same problem has the same plan however slow the machine is."""

import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plan_factories import layered_case, random_case
from tessera import ir
from tessera.capture import outlines
from tessera.flow import make_unit, price
from tessera.plan.pricing import milp
from tessera.plan.problem import build
from tessera.plan.solve import PLANNERS, PlanConfig, solve
from tessera.profile import parse_devices, wire

# A process that imports no torch.
PLACES = """
import pickle, sys
from tessera.plan.pricing.milp import best_placement

with open(sys.argv[1], "rb") as file:
    problem = pickle.load(file)
for _ in range(2):
    sys.stdin.readline()
    print("begins", flush=True)
    column, bound_us = best_placement(problem, 2)
    print(list(column.labels), bound_us, flush=True)
"""


def test_a_process_that_stands_still_for_seconds_finds_the_same_placement(tmp_path: Path) -> None:
    """It is stopped within the solver for longer than the search takes: the program's first node, of a decode
    of Llama 3 8B on two cards, takes most of a second.
    """
    cluster = wire(parse_devices("emu:a100,emu:l40s"), ["pcie4"])
    trace = outlines.find(ir.Step("llama-3-8b", "decode", 16, 1280))
    assert trace is not None
    unit = make_unit([trace])
    problem = tmp_path / "problem"
    problem.write_bytes(pickle.dumps(build(unit, price(unit, cluster), cluster)))
    command = [sys.executable, "-c", PLACES, str(problem)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdin is not None
    assert worker.stdout is not None
    with worker:
        found = []
        for is_stopped in (False, True):
            print(file=worker.stdin, flush=True)
            assert "begins\n" == worker.stdout.readline()
            if is_stopped:
                time.sleep(0.1)
                os.kill(worker.pid, signal.SIGSTOP)
                time.sleep(4.0)
                os.kill(worker.pid, signal.SIGCONT)
            found.append(worker.stdout.readline())

    assert found[0].startswith("[")
    assert found[0] == found[1]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An hour passes whenever somebody looks at a clock."""
    hours = itertools.count()
    with monkeypatch.context() as patch:
        for name in ("monotonic", "perf_counter", "process_time", "time", "thread_time"):
            patch.setattr(time, name, lambda: 3600.0 * next(hours))
        yield


@pytest.mark.parametrize("policy", sorted({*PLANNERS} - {"cost", "energy"}))
def test_plans_do_not_depend_on_clocks(policy: str, request: pytest.FixtureRequest) -> None:
    case = layered_case(4)
    objective = ir.Objective(policy) if policy in list(ir.Objective) else ir.Objective.THROUGHPUT
    config = PlanConfig(objective, policy=policy)
    plan = solve(*case, config)

    request.getfixturevalue("hasty")
    assert plan == solve(*case, config)


def test_a_program_that_is_too_large_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The single placement is then the best coarse one."""
    case = random_case(0, num=5, devices=2)
    monkeypatch.setattr(milp, "MAX_ENTRIES", 10)

    assert milp.best_placement(build(*case)) is None
    plan = solve(*case, PlanConfig(ir.Objective.THROUGHPUT, policy="single-placement"))
    assert 1 == len(plan.lanes)
