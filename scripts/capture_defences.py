# mypy: disable-error-code="misc,import-not-found"
"""Which unsafe programs does each defence of capture alone refuse?

    python scripts/capture_defences.py [--json]

Each defence is switched off in turn, and the corpus of unsafe programs (tests/unit/capture/test_reads.py,
tests/host_reads_model.py) is captured. A program that is then recorded is one that only this defence
refuses. The table in docs/capture.md is made so. The exit status is 1 if a defence refuses nothing alone, or
if a program is recorded with all defences on.
"""

import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "unit" / "capture")]

import test_reads as corpus  # noqa: E402
import torch  # noqa: E402

import tessera  # noqa: E402
from tessera.capture import holders, operators, reads, record_step, recorder, rng  # noqa: E402
from tessera.errors import CaptureError  # noqa: E402
from tessera.ir import Step, Trace  # noqa: E402

record = importlib.import_module("tessera.capture.record")
Run = Callable[[], object]

# Defence -> what replaces it when it is off.
DEFENCES: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "exchanged methods": ((reads, "_READERS", ()),),
    "profiling hook": ((record, "calls_refused", nullcontext),),
    "Python state": ((holders.Before, "changed", lambda self: None),),
    "arrays over tensors": ((holders.PyState, "refuse_shared", lambda self, tensors: None),),
    "recording again": ((Trace, "__eq__", lambda one, other: True),),
    "operators that answer the host": ((operators, "_answers_the_host", lambda func: False),),
    "operators sized by values": ((operators, "_sizes_by_value", lambda func: False),),
    "tensors of earlier calls": (
        (recorder, "keep_apart", lambda storages: None),
        (recorder.Recorder, "examples", property(lambda self: (), lambda self, storages: None)),
    ),
    "caught refusals": ((operators, "insisting", nullcontext),),
    "generator states": ((rng.Draws, "_check", lambda self, name: None),),
}


class KeepsFirst(torch.nn.Module):
    """Keeps a tensor of its first call for later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.kept:
            self.kept.append(x * 2)
        return x + self.kept[0]


def seeding(x: torch.Tensor) -> torch.Tensor:
    """Seeds torch's generator."""
    torch.manual_seed(0)
    return x * torch.rand(8)


def programs() -> Iterator[tuple[str, Run]]:
    """Unsafe programs by name."""
    for way, read in corpus.NUMBERS.items():
        yield way, lambda read=read: tessera.capture(lambda x: x * read(x * 1), corpus.X)
    for way, read in corpus.TENSORS.items():
        yield (
            f"a tensor by {way}",
            lambda read=read: tessera.capture(lambda x: read(x * 1).sum() + x, corpus.X),
        )
    for how in corpus.KEPT:
        yield f"kept: {how}", lambda how=how: tessera.capture(corpus.Keeps(how), corpus.X)
    for how in corpus.REMEMBERED:
        yield f"remembered: {how}", lambda how=how: tessera.capture(corpus.Remembers(how), corpus.X)
    for (way, read), use in itertools.product(corpus.HIDDEN.items(), ("factor", "constant")):
        yield (
            f"read {way}, {use}",
            lambda read=read, use=use: tessera.capture(
                lambda x: corpus.USES[use](x, read(torch.tanh(x))), corpus.X
            ),
        )
    for name, device in itertools.product(
        ("summed", "branched", "masked", "counting", "chancy", "remembering"), ("cpu", "fake")
    ):
        step = Step(f"host_reads_model:{name}", "call", 1, 1)
        yield f"module {name} ({device})", lambda step=step, device=device: record_step(step, device)
    yield "a tensor kept from the first call", lambda: tessera.capture(KeepsFirst(), corpus.X)
    yield "seeding", lambda: tessera.capture(seeding, corpus.X)
    for test in ("what_another_thread_computes_is_no_constant", "an_array_over_a_state_is_refused_by_name",
                 "state_is_a_requests_own", "a_random_number_is_a_requests_own"):  # fmt: skip
        yield test.replace("_", " "), lambda test=test: _body(getattr(corpus, f"test_{test}"))


def _body(test: Callable[[], None]) -> None:
    """Runs a test of one capture; a capture that is not refused ends it with pytest's failure."""
    test()
    raise CaptureError("refused", "")


def recorded(replacements: tuple[tuple[Any, str, Any], ...]) -> list[str]:
    """Programs that are recorded with something replaced."""
    through = []
    for name, run in programs():
        corpus.CALLS.clear()
        with ExitStack() as stack:
            for owner, attribute, value in replacements:
                stack.enter_context(patch.object(owner, attribute, value))
            try:
                run()
            except CaptureError:
                continue
            except BaseException as error:  # noqa: BLE001  # pytest.fail is no Exception
                if "DID NOT RAISE" not in str(error):
                    continue  # refused by torch itself, or without the right line
            through.append(name)
    return through


def main() -> int:
    """Prints defence -> programs that only it refuses."""
    unsafe = recorded(())
    table = {name: recorded(replacements) for name, replacements in DEFENCES.items()}
    if "--json" in sys.argv:
        print(json.dumps({"none": unsafe, **table}, indent=1))
    else:
        for name, through in table.items():
            print(f"{name}: {len(through)}\n    {'; '.join(through)}")
    return int(bool(unsafe) or not all(table.values()))


if __name__ == "__main__":
    raise SystemExit(main())
