"""The command line, as a user runs it, with real files; in a process of its own where that is the point."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from commands import answer, call, within_s
from sampling import num_layers, some_of
from tessera.cli import _main, app
from tessera.ir import Plan, Trace, load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifacts of the flow, made by the commands of the README."""
    path = tmp_path_factory.mktemp("flow")
    commands = [
        ["capture", "tiny-llama", "--batch", "2", "--context", "64", "-o", "decode.trace"],
        ["analyze", "decode.trace", "-o", "decode.graph"],
        ["profile", "decode.trace", "--devices", "emu:a100,emu:l40s", "-o", "decode.costs"],
        [
            "plan", "decode.trace", "--costs", "decode.costs", "--link", "pcie4",
            "--objective", "throughput", "-o", "decode.plan",
        ],
        ["simulate", "decode.plan", "--requests", "100", "--trace", "out.perfetto.json"],
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for words in commands:
            assert 0 == _main(words), words
    return path


def test_the_flow_writes_every_artifact(folder: Path) -> None:
    """Each command leaves the file it was told to write."""
    names = {"decode.trace", "decode.graph", "decode.costs", "decode.plan", "out.perfetto.json"}

    assert names <= {p.name for p in folder.iterdir()}


def test_a_command_is_a_process_of_its_own(folder: Path) -> None:
    """Started as a module in another folder, it reads the plan and prints one document."""
    words = [sys.executable, "-m", "tessera", "simulate", "decode.plan", "--requests", "3", "--json"]
    found = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)

    assert 0 == found.returncode, found.stderr
    assert "simulated" == json.loads(found.stdout)["clock"]


def test_run_verifies_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tessera run PLAN --verify` compares every bit and loses nothing."""
    found = answer("run", folder / "decode.plan", "--verify", "--requests", "4", capsys=capsys)

    assert found["verified"] is True
    assert (4, 0) == (found["requests"], found["lost"])
    assert ["emu:a100", "emu:l40s"] == [row["device"] for row in found["per_device"]]


def test_state_larger_than_a_pipe_does_not_stall_a_run(tmp_path: Path) -> None:
    """Megabytes of state travel both ways at once, with several requests in flight."""
    trace, plan = str(tmp_path / "x.trace"), str(tmp_path / "x.plan")
    assert 0 == _main(["capture", "tiny-llama", "--batch", "4", "--context", "512", "-o", trace])
    divide = ["--devices", "emu:a100,emu:l40s", "--policy", "data-parallel"]
    assert 0 == _main(["plan", trace, *divide, "-o", plan])
    with within_s(180):
        assert 0 == _main(["run", plan, "--verify", "--requests", "4"])


def test_capture_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The summary of a capture agrees with the trace it wrote."""
    path = tmp_path / "x.trace"
    found = answer("capture", "tiny-llama", "--step", "prefill", "--context", "8", "-o", path, capsys=capsys)
    trace = load(Trace, path)

    assert len(trace.launches) == found["launches"]
    assert {"views", "buffers", "edges", "state_bytes", "weight_bytes", "seconds"} <= found.keys()


def test_analyze_counts_hazards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The graph in figures."""
    found = answer("analyze", folder / "decode.trace", capsys=capsys)

    assert found["edges"] == sum(found["hazards"].values()) > 0
    assert 2 * num_layers() == found["buffers"]["state"]


def test_profile_tags_every_number(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each launch has a time, a source and an error on each device, and the times add up."""
    found = answer(
        "profile", folder / "decode.trace", "--devices", "emu:a100,emu:l40s",
        "-o", folder / "again.costs", capsys=capsys,
    )  # fmt: skip
    total = sum(row["costs"]["emu:a100"]["us"] for row in found["launches"])

    assert all({"us", "source", "rel_error"} <= row["costs"]["emu:l40s"].keys() for row in found["launches"])
    assert total == pytest.approx(found["total_us"]["emu:a100"])


def test_plan_is_never_below_a_baseline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The throughput plan reaches at least what every coarser policy reaches, and stays under its bound."""
    found = answer(
        "plan", folder / "decode.trace", "--devices", "emu:h20,emu:l40s", "-o", folder / "other.plan",
        capsys=capsys,
    )  # fmt: skip
    reached = [value for value in found["baselines"].values() if value is not None]

    assert max(reached) <= found["simulated"] <= found["throughput"] <= found["bound"] * (1 + 1e-6)
    assert found["baselines"]["prefill-decode"] is None  # a decode alone has no prefill


def test_simulate_reports_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A simulated run says that it is one, and no device is more than fully busy."""
    found = answer("simulate", folder / "decode.plan", "--requests", "20", capsys=capsys)

    assert "simulated" == found["clock"]
    assert all(0 <= u <= 1 + 1e-9 for u in found["utilisation"].values())


def test_the_perfetto_trace_is_json(folder: Path) -> None:
    """The file opens in Perfetto: a list of events with times."""
    events = json.loads((folder / "out.perfetto.json").read_text())["traceEvents"]

    assert sum(e["ph"] == "X" for e in events) > 100


def test_doctor_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """An extra that is not installed comes with the line that installs it."""
    found = answer("doctor", capsys=capsys)
    for extra in found["extras"]:
        assert extra["is_installed"] or extra["install"] == f'pip install "tessera-gpu[{extra["name"]}]"'
    assert found["versions"]["torch"]


def test_gpus_lists_sources(capsys: pytest.CaptureFixture[str]) -> None:
    """Every GPU has specifications and says where they come from."""
    found = {row["name"]: row for row in answer("gpus", capsys=capsys)["gpus"]}

    assert {"a100", "l40s", "h100", "h200"} <= found.keys()
    assert all(row["specs"]["spec_source"] for row in found.values())


@pytest.mark.parametrize(("words", "rates"), [([], "244 / 312"), (["a100"], "243.7")])
def test_gpus_prints_a_table(words: list[str], rates: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The tables for people show sustained and data-sheet rates in 80 columns."""
    code, out, _ = call("gpus", *words, capsys=capsys)

    assert 0 == code
    assert "a100" in out
    assert rates in out
    assert all(len(line) <= 80 for line in out.splitlines())


BAD = [
    (["capture", "tiny-lama"], "unknown model 'tiny-lama'; known: gpt-oss-20b, llama-3-8b"),
    (["capture", "tiny-llama", "--step", "denoise"], "known: call, decode, prefill, tokens"),
    (["capture", "tiny-llama", "--batch", "0"], "--batch"),
    (["capture", "tiny-llama", "--context", "100000"], "Use at most 4096"),
    (["capture", "tiny-llama", "--device", "cuda:99"], "--device fake"),
    (["capture", "tiny-llama", "--device", "tpu"], "unknown"),
    (
        ["capture", "tiny-llama", "--contxt", "8"],
        "'--contxt'; did you mean --context? See",
    ),
    (["capture", "tiny-llama", "--batch", "many"], "Invalid value for '--batch'"),
    (["plann"], "unknown command 'plann'; did you mean plan? See"),
    (["profile", "{decode.trace}", "--devices", "emu:a1000"], "unknown GPU 'a1000'; known: "),
    (["profile", "{decode.trace}", "--devices", "tpu:1"], "known: away, cpu, cuda, emu"),
    (["profile", "{decode.trace}", "--devices", "a100"], "Write emu:a100 to plan for it."),
    (["analyze", "{decode.trace}", "--explain", "mm"], "--explain: only the code of a PTX kernel"),
    (["analyze", "missing.ptx", "-o", "graph"], "--output: PTX has no graph"),
    (["demo", "--devices", "emu:a100"], "--devices: the demo divides work"),
    (["bench"], "Missing command. See: tessera bench --help"),
    (["plan", "{decode.trace}", "{decode.trace}", "--devices", "emu:a100"], "are the same decode"),
    (["plan", "{decode.trace}", "--devices", "emu:a100", "--counts", "0"], "--counts: a step cannot run 0"),
    (["profile", "missing.trace", "--devices", "emu:a100"], "missing.trace: cannot read: No such file"),
    (["plan", "{decode.trace}"], "no devices were named"),
    (["plan", "{decode.trace}", "--devices", "emu:a100,emu:l40s", "--link", "rope"], "unknown link 'rope'"),
    (
        ["plan", "{decode.trace}", "--costs", "{decode.costs}", "--objective", "joy"],
        "'joy' is not one of 'throughput', 'latency', 'cost', 'energy'",
    ),
    (["plan", "{decode.costs}", "--devices", "emu:a100"], "this is a costs file; a trace is expected"),
    (["plan", "{decode.trace}", "--costs", "{decode.costs}", "--counts", "two"], "not a list of counts"),
    (["run", "{decode.plan}", "--devices", "emu:h100,emu:l40s"], "the plan was made for emu:a100,emu:l40s"),
    (["run", "{decode.plan}", "--requests", "0"], "--requests"),
    (["run", "{decode.plan}", "--timeout", "-1"], "'--timeout': Input should be greater than"),
    (["worker", "--patience", "nan"], "--patience"),
    (["plan", "x.trace", "--tpot-ms", "nan"], "--tpot-ms: needs a model's name, not traces"),
    (["plan", "tiny-llama", "--tpot-ms", "nan"], "--tpot-ms: must be a finite number, got nan. Leave it out"),
    (["simulate", "{decode.plan}", "--requests", "-5"], "should be greater than or equal to 1"),
    (["simulate", "{out.perfetto.json}"], "not a Tessera file"),
    (["gpus", "a1000"], "unknown GPU 'a1000'"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(w) for w, _ in BAD])
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A user's mistake names its place and remedy, without a traceback, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    given = [str(folder / w[1:-1]) if w.startswith("{") else w for w in words]
    code, out, err = call(*given, capsys=capsys)

    assert 2 == code
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert "" == out
    assert [] == list(tmp_path.iterdir())


def test_no_arguments_print_five_things_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever types the name alone sees what people do with it, on one screen; it is no error."""
    code = _main([])
    out, err = capsys.readouterr()

    assert (0, "") == (code, err)
    shown = re.findall(r"  tessera (\w+)", out)
    assert ["demo", "plan", "advise", "serve", "chat", "capture", "plan", "run"] == shown
    assert set(shown) <= set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert len(out.splitlines()) < 24
    assert max(map(len, out.splitlines())) <= 80


def test_summaries_of_commands_are_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    code = _main(["--help"])
    out, _ = capsys.readouterr()

    assert 0 == code
    assert "..." not in out.split("Commands:")[1]
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "known"),
    some_of(
        [("tessera pl", "plan"), ("tessera plan --out", "--output-tokens"), ("tessera adv", "advise")],
        [("tessera plan --out", "--output-tokens"), ("tessera adv", "advise")],
    ),
)
def test_the_shell_completes_words(words: str, known: str) -> None:
    """As bash asks for it: without arguments, by the environment."""
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_TESSERA_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "tessera"]
    found = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=False)

    assert (0, "") == (found.returncode, found.stderr)
    assert known in found.stdout.split()
    assert all(word.startswith(words.rsplit(maxsplit=1)[-1]) for word in found.stdout.split())


@pytest.mark.parametrize(
    "words",
    [
        ("analyze", "decode.trace"),
        ("profile", "decode.trace", "--devices", "emu:a100"),
        ("plan", "decode.trace", "--costs", "decode.costs", "-o", "x.plan"),
        ("simulate", "decode.plan"),
        ("report", "."),
        ("doctor",),
    ],
)
def test_what_takes_long_says_what_it_is_doing(
    words: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In plain lines where standard error is no terminal, and nothing of it where the answer is."""
    monkeypatch.setattr("tessera.cli.output.QUIET_S", 0.0)
    monkeypatch.chdir(folder)
    code, out, err = call(*words, capsys=capsys)

    assert 0 == code, err
    assert err.startswith("tessera: ")
    assert "tessera: " not in out


def test_costs_of_another_trace_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prices are for one trace; another one needs its own."""
    other = tmp_path / "other.trace"
    answer("capture", "tiny-llama", "--batch", "3", "--context", "8", "-o", other, capsys=capsys)
    code, _, err = call("plan", other, "--costs", folder / "decode.costs", capsys=capsys)

    assert 2 == code
    assert "decode.costs: these are costs of another trace" in " ".join(err.split())


def test_a_corrupted_plan_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan with a flipped byte does not run."""
    raw = bytearray((folder / "decode.plan").read_bytes())
    raw[len(raw) // 2] ^= 1
    path = tmp_path / "bad.plan"
    path.write_bytes(raw)
    code, _, err = call("run", path, capsys=capsys)

    assert 2 == code
    assert "corrupted" in err


def test_steps_that_do_not_fit_together_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A decode must hold what its prefill leaves behind."""
    path = tmp_path / "prefill.trace"
    words = ("capture", "tiny-llama", "--step", "prefill", "--batch", "2", "--context", "8", "-o", path)
    answer(*words, capsys=capsys)
    code, _, err = call(
        "plan", path, folder / "decode.trace", "--devices", "emu:a100,emu:l40s", capsys=capsys
    )

    assert 2 == code
    assert "with one batch" in " ".join(err.split())


def test_a_plan_can_be_loaded_and_compared(folder: Path) -> None:
    """Equal plans are equal by value, so that they can be cached."""
    one, other = load(Plan, folder / "decode.plan"), load(Plan, folder / "decode.plan")

    assert one == other
    assert 1 == len({one, other})


def test_compiled_kernels_are_for_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inductor's Triton kernels make no sense on the CPU, and the message says what to use."""
    code, _, err = call("capture", "tiny-llama", "--compiled", "-o", tmp_path / "x.trace", capsys=capsys)

    assert 2 == code
    assert "Use --device fake or cuda:N" in " ".join(err.split())


def test_output_on_a_full_disk_is_an_error_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what to do."""
    with open("/dev/full", "w", encoding="utf-8") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        code = _main(["gpus", "--json"])

    assert 2 == code
    assert "error: cannot write: No space left on device. Make room" in capsys.readouterr().err


def test_no_summary_is_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of commands fits 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call("--help", capsys=capsys)

    assert 0 == code
    listed = out.partition("Commands:")[2]
    assert "batch" in listed
    assert [] == [line for line in listed.splitlines() if line.endswith("...") or len(line) > 80]
