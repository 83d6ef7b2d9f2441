"""Artifacts on disk: what is saved comes back, and what is damaged is said to be so."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from factories import make_chain, make_plan
from sampling import examples
from tessera.analyze import build_graph
from tessera.errors import ArtifactError
from tessera.execute import lower
from tessera.ir import Costs, Graph, Plan, Program, Timeline, Trace, View, kind_of, load, save, verify
from tessera.ir.files import FORMAT_VERSION
from tessera.simulate import simulate


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """A saved trace."""
    path = tmp_path / "chain.trace"
    save(make_chain(3), path)
    return path


def test_every_artifact_comes_back_equal(tmp_path: Path) -> None:
    """Saving and loading any artifact gives an equal record with an equal hash."""
    plan = make_plan([make_chain(3)], [[[0, 1, 0]]])
    records: list[tuple[type, object]] = [
        (Trace, plan.unit.graphs[0].trace),
        (Graph, build_graph(make_chain(3))),
        (Costs, plan.costs[0]),
        (Plan, plan),
        (Program, lower(plan)[0][0]),
        (Timeline, simulate(plan, 2)),
    ]
    for cls, record in records:
        save(record, tmp_path / "file")
        loaded: object = load(cls, tmp_path / "file")

        assert record == loaded
        assert hash(record) == hash(loaded)


def test_arguments_keep_their_types() -> None:
    """1, 1.0, True, minus infinity and nested tuples are told apart in a file."""
    view = View(0, "float32", (2,), (1,))
    trace = make_chain(1)
    args = (1, 1.0, True, None, "mean", float("-inf"), (view, (2, 3)))
    launch = trace.launches[0]
    changed = type(launch)(launch.kernel, args, (), (), launch.accesses)

    again = msgspec.msgpack.decode(msgspec.msgpack.encode(changed), type=type(launch))

    assert [type(a) for a in args] == [type(a) for a in again.args]
    assert args == again.args


def test_a_truncated_file_is_said_to_be_truncated(trace_file: Path) -> None:
    """Losing the end of a file is one clear error with the place and the remedy."""
    trace_file.write_bytes(trace_file.read_bytes()[:-10])

    with pytest.raises(ArtifactError, match=r"chain\.trace: truncated.*tessera capture"):
        load(Trace, trace_file)


def test_bytes_at_the_end_of_a_file_are_said_to_be_added(trace_file: Path) -> None:
    trace_file.write_bytes(trace_file.read_bytes() + b"x")

    with pytest.raises(ArtifactError, match=r"chain\.trace: bytes were added.*tessera capture"):
        load(Trace, trace_file)


def test_a_changed_byte_is_found(trace_file: Path) -> None:
    """A file whose body was altered does not load."""
    raw = bytearray(trace_file.read_bytes())
    raw[-20] ^= 1
    trace_file.write_bytes(raw)

    with pytest.raises(ArtifactError, match="corrupted"):
        load(Trace, trace_file)


def test_a_foreign_file_is_named_as_such(tmp_path: Path) -> None:
    """Some other file is not taken for an artifact."""
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")

    with pytest.raises(ArtifactError, match="not a Tessera file"):
        load(Trace, path)
    assert kind_of(path) is None


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_another_format_is_refused(version: int, trace_file: Path) -> None:
    """A file of another version is refused before its body is read."""
    first, body = trace_file.read_bytes().split(b"\n", 1)
    head = json.loads(first) | {"version": version}
    trace_file.write_bytes(json.dumps(head).encode() + b"\n" + body)

    with pytest.raises(ArtifactError, match=rf"written in format {version}; this Tessera reads format"):
        load(Trace, trace_file)


def test_another_kind_of_artifact_is_named(trace_file: Path) -> None:
    """A trace where a plan is wanted says what it is."""
    with pytest.raises(ArtifactError, match="this is a trace file; a plan is expected"):
        load(Plan, trace_file)
    with pytest.raises(ArtifactError, match="this is a trace file; costs are expected"):
        load(Costs, trace_file)
    trace_file.write_bytes(trace_file.read_bytes().replace(b'"trace"', b'"service-plan"', 1))
    with pytest.raises(ArtifactError, match=r"service-plan file; a plan is expected\. Serve it"):
        load(Plan, trace_file)


def test_a_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    """A path that does not exist names the command that writes such a file."""
    with pytest.raises(ArtifactError, match=r"No such file.*tessera plan"):
        load(Plan, tmp_path / "none.plan")


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    """Writing into a folder that is not there is one error and no half file."""
    with pytest.raises(ArtifactError, match="cannot write"):
        save(make_chain(1), tmp_path / "no" / "folder.trace")
    assert [] == list(tmp_path.iterdir())


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    """A pipe, as /dev/null, is not replaced by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    save(make_chain(1), pipe)

    assert pipe.is_fifo()
    assert os.read(reader, 1 << 16).startswith(b'{"tessera":"trace"')
    os.close(reader)


def test_a_link_is_followed(trace_file: Path, tmp_path: Path) -> None:
    """The file that it leads to is written anew."""
    link = tmp_path / "link.trace"
    link.symlink_to(trace_file)
    save(make_chain(5), link)

    assert link.is_symlink()
    assert make_chain(5) == load(Trace, trace_file)


@pytest.mark.parametrize("cut", [0, 1, 40, 200])
def test_any_prefix_of_a_file_is_refused(trace_file: Path, cut: int) -> None:
    """However short the rest of a file is, it is an artifact error and nothing else."""
    trace_file.write_bytes(trace_file.read_bytes()[:cut])

    with pytest.raises(ArtifactError):
        load(Trace, trace_file)


def rewritten(path: Path, body: bytes) -> Path:
    """The file with another body, whose checksum is right."""
    head = json.loads(path.read_bytes().partition(b"\n")[0])
    head |= {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    path.write_bytes(json.dumps(head).encode() + b"\n" + body)
    return path


def with_view(**changes: Any) -> Trace:
    """A trace whose one argument is a view with other numbers."""
    trace = make_chain(1)
    view = View(0, "float32", (16,), (1,))
    launch = replace(trace.launches[0], args=(msgspec.structs.replace(view, **changes),))
    return replace(trace, launches=(launch,))


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": -(2**62)},
        {"offset": 1},
        {"shape": (10**15,)},
        {"shape": (10**15,), "stride": (0,)},
        {"shape": (-1,)},
        {"stride": (-1,)},
        {"stride": (2,)},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_a_view_that_cannot_be_is_refused_with_its_place(changes: dict[str, Any], tmp_path: Path) -> None:
    """Offset, shape and strides that leave the buffer of 64 bytes; the launch and the buffer are named."""
    verify(with_view())
    save(with_view(**changes), tmp_path / "x.trace")

    with pytest.raises(
        ArtifactError, match=r"every view lies inside its buffer \(launch 0: .*tessera capture"
    ):
        load(Trace, tmp_path / "x.trace")


@pytest.mark.parametrize("size_bytes", [-1, 10**15, 2**64 - 1])
def test_a_buffer_that_no_memory_holds_is_refused(size_bytes: int, tmp_path: Path) -> None:
    """Sizes are not negative, and not more than any machine has."""
    trace = make_chain(1)
    save(replace(trace, buffers=(replace(trace.buffers[0], size_bytes=size_bytes),)), tmp_path / "x.trace")

    with pytest.raises(ArtifactError, match="not a valid trace"):
        load(Trace, tmp_path / "x.trace")


@pytest.mark.parametrize(
    "body",
    [
        b'{"step": ' + b"9" * 100_000 + b"}",
        b"\x91" * 100_000,
        b"\x81\xa4step" * 50_000,
        b"\x81\xa3new" + b"\x91" * 100_000,
        b"\x90",
        b"\x81\xa4step\xdd\xff\xff\xff\xff",
        b"\x81\xa4step\xdf\xff\xff\xff\xff",
        b"\x81\xa1\xff\xc0",
        b"\xff",
        b"",
    ],
    ids=[
        "text",
        "deep list",
        "deep object",
        "deep unknown",
        "list",
        "long list",
        "long object",
        "no UTF-8",
        "int",
        "nothing",
    ],
)
def test_a_body_that_is_no_record_is_refused(trace_file: Path, body: bytes) -> None:
    """With the place and the remedy, in one line."""
    with pytest.raises(
        ArtifactError, match=r"^[^\n]*chain\.trace: not a valid trace[^\n]*tessera capture`\.$"
    ):
        load(Trace, rewritten(trace_file, body))


def test_a_header_that_is_none_is_refused(trace_file: Path) -> None:
    """Deep, or with a number that is too long."""
    for head in (b"[" * 100_000, b'{"tessera": ' + b"9" * 100_000 + b"}"):
        trace_file.write_bytes(head + b"\n{}")
        assert kind_of(trace_file) is None
        with pytest.raises(ArtifactError, match="not a Tessera file"):
            load(Trace, trace_file)


def leaves(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a document with each of its keys."""
    for key, value in list(document.items() if isinstance(document, dict) else enumerate(document)):
        yield document, key
        if isinstance(value, dict | list):
            yield from leaves(value)


@settings(max_examples=examples(150, 60), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_changed_value_gives_a_record_or_an_artifact_error(data: st.DataObject, tmp_path: Path) -> None:
    """Whatever stands in place of one value of a plan, nothing else is raised."""
    plan = make_plan([make_chain(2)], [[[0, 1]]])
    save(plan, tmp_path / "x.plan")
    document = msgspec.msgpack.decode((tmp_path / "x.plan").read_bytes().partition(b"\n")[2])
    places = list(leaves(document))
    holder, key = places[data.draw(st.integers(0, len(places) - 1))]
    wide = st.integers(-(2**63), 2**64 - 1)
    numbers = st.one_of(st.integers(-3, 3), wide, st.floats(), st.sampled_from([-(2**62), 10**15]))
    plain = st.one_of(numbers, st.none(), st.booleans(), st.text(max_size=3))
    holder[key] = data.draw(st.one_of(plain, st.lists(plain, max_size=2), st.dictionaries(st.text(), plain)))

    assert _is_read_or_refused(rewritten(tmp_path / "x.plan", msgspec.msgpack.encode(document)))


def _is_read_or_refused(path: Path) -> bool:
    """Refusals name the file."""
    try:
        return isinstance(load(Plan, path), Plan)
    except ArtifactError as error:
        return path.name in str(error)
