"""The renderer of commands' records: labels, units, tables that fit, and JSON without NaN."""

import io
import json
from typing import Annotated

import pytest
from rich.console import Console
from scripts.schemas import record_types

from tessera.cli import COMMANDS
from tessera.cli.output import HIDDEN, Record, print_record, shown
from tessera.cli.plan_model import PolicyFigures
from tessera.cli.render import fields_of, label, number
from tessera.errors import TesseraError
from tessera.plan.explain import KernelUse
from tessera.plan.fluid import POLICIES

NAMES = ("data-parallel", "attention-ffn", "tensor-parallel")


class Row(Record, frozen=True):
    """A line of a table."""

    policy: str
    tokens_per_s: float
    latency_us: float | None = None
    why: str = ""


class Result(Record, frozen=True):
    """All kinds of fields."""

    model: str
    weight_bytes: int
    gain: float
    rows: Annotated[tuple[Row, ...], shown("policies")]
    secret: Annotated[int, HIDDEN] = 42
    notes: tuple[str, ...] = ()
    headline: str = ""
    failure: Annotated[str, HIDDEN] = ""

    def problem(self) -> TesseraError | None:
        """Fails if told to."""
        return TesseraError(self.failure) if self.failure else None


def text(record: Record, width: int = 80) -> str:
    """What people see."""
    out = io.StringIO()
    Console(file=out, width=width).print(record)
    return out.getvalue()


def result(**changes: object) -> Result:
    """A record with three rows."""
    rows = tuple(Row(policy=name, tokens_per_s=12345.6, latency_us=1250.0) for name in NAMES)
    made: dict[str, object] = {"model": "tiny", "weight_bytes": 15_000_000, "gain": 1.25, "rows": rows}
    return Result(**made | changes)  # type: ignore[arg-type]


def test_units_come_from_names() -> None:
    """Bytes, ratios, durations and rates are written for people; hidden fields are not."""
    shown_text = text(result(headline="It is faster.", notes=("One.", "Two.")))

    for part in ("15.0 MB", "1.250x", "12,346", "1.25 ms", "tokens/s", "Policies", "It is faster.", "Two."):
        assert part in shown_text
    assert "42" not in shown_text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_tables_fit_and_cut_no_name(width: int) -> None:
    """At every width all policies are whole and no line is too long."""
    rows = tuple(
        Row(policy=name, tokens_per_s=1e9, latency_us=1e9, why="because it is best by far " * 3)
        for name in NAMES
    )
    lines = text(result(rows=rows), width).splitlines()

    assert max(len(line.rstrip()) for line in lines) <= width
    assert all(any(name in line for line in lines) for name in NAMES)
    assert not any("…" in line for line in lines)


class Policies(Record, frozen=True):
    """The policies of a plan."""

    baselines: dict[str, PolicyFigures]


class Kernels(Record, frozen=True):
    """The kernels of a plan."""

    kernels: tuple[KernelUse, ...]


def test_seven_policies_are_a_table_in_pieces() -> None:
    """Not one block for each; every name is whole and in each piece."""
    made = PolicyFigures(
        tokens_per_s=10_587.2, usd_per_million_tokens=0.0898, joules_per_token=0.0618, tpot_ms=1250.0,
        ttft_ms=23_400.0, batch={"emu:h20": 320, "emu:l40s": 1232}, microbatches=2,
    )  # fmt: skip
    lines = text(Policies(baselines=dict.fromkeys(POLICIES, made))).splitlines()

    assert max(len(line.rstrip()) for line in lines) <= 80
    assert all(2 == sum(line.startswith(f"{name} ") for line in lines) for name in POLICIES)
    assert {"tokens/s", "320,", "1,232"} <= {word for line in lines for word in line.split()}


def test_long_names_are_one_table() -> None:
    """Two long columns are folded side by side; a row stays one row, with its time under a readable head."""
    uses = tuple(
        KernelUse(
            "aten._scaled_dot_product_flash_attention.default", f"model.layers.*.{name}", 4, (82.5,), (1.0,)
        )
        for name in ("self_attn.attention_of_tokens", "cross_attn.attention_of_images")
    )
    lines = text(Kernels(kernels=uses)).splitlines()

    assert max(len(line.rstrip()) for line in lines) <= 80
    assert ["kernel", "scope", "runs", "time", "share"] == lines[1].split()
    assert 2 == sum(line.rstrip().endswith("4  82.5 us  100 %") for line in lines)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0"),
        (1250.4, "1,250"),
        (0.00001234, "0.00001234"),
        (3, "3"),
        (12.3456, "12.35"),
        (2e6, "2,000,000"),
    ],
)
def test_numbers_have_no_exponent(value: float, written: str) -> None:
    """Four digits."""
    assert written == number(value)


def test_labels() -> None:
    """Names become words."""
    assert ["tokens/s", "latency", "USD/hour", "TTFT", "waiting"] == [
        label(name) for name in ("tokens_per_s", "latency_us", "usd_per_hour", "ttft_ms", "num_waiting")
    ]


def test_json_has_hidden_fields_and_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    """What is not a number is null."""
    print_record(result(gain=float("nan")), True)
    document = json.loads(capsys.readouterr().out)

    assert (42, None) == (document["secret"], document["gain"])


def test_a_failure_is_printed_and_raised(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures first, then the error."""
    with pytest.raises(TesseraError, match="it differs"):
        print_record(result(failure="it differs"), False)
    assert "data-parallel" in capsys.readouterr().out


def test_every_command_declares_its_record() -> None:
    """Records resolve, and so do their fields."""
    for function in COMMANDS:
        for record in record_types(function):
            assert fields_of(record)
