"""Reports: JSON, sentences, tables, explanations, and the cache by hash."""

import json
from pathlib import Path

import pytest

from ptx_factory import THREAD, make_module, pointers, report_of
from tessera_ptx import analyze, reports_for, store, to_json
from tessera_ptx.report import explain, rows, sentences

AXPY = make_module(
    pointers(0, 1)
    + THREAD
    + """add.s64 %rd30, %rd11, %rd20; add.s64 %rd31, %rd12, %rd20; ld.global.f32 %f1, [%rd30];
    ld.global.f32 %f2, [%rd31]; st.global.f32 [%rd31], %f1;""",
    name="k",
)
LOOP = make_module(
    pointers(0)
    + """ld.param.u32 %r9, [k_param_3]; mov.u32 %r5, 0;
    $L: ld.global.f32 %f1, [%rd11]; add.s64 %rd11, %rd11, 4; add.s32 %r5, %r5, 1;
    setp.lt.s32 %p1, %r5, %r9; @%p1 bra $L;"""
)


def test_json_has_the_published_form() -> None:
    """The JSON is {"kernels": [...]} with the fields users rely on, in their order."""
    kernel = json.loads(to_json(analyze(AXPY)))["kernels"][0]

    assert ["name", "arch", "movable", "why", "accesses", "symbols", "indirect"] == list(kernel)
    assert {"param": 0, "offset": 0, "read": True, "write": False, "atomic": False} == {
        k: v for k, v in kernel["accesses"][0].items() if k != "extent"
    }


def test_extent_in_json_is_an_expression() -> None:
    """The extent names thread, block and grid."""
    kernel = json.loads(to_json(analyze(AXPY)))["kernels"][0]

    assert "4*(tid.x + ntid.x*ctaid.x) + [0, 4)" == kernel["accesses"][1]["extent"]


def test_architecture_is_part_of_the_report() -> None:
    """Results are per kernel and architecture."""
    assert "sm_90a" == analyze(AXPY)[0].arch


def test_sentence_with_names() -> None:
    """With parameter names the sentence reads like the source."""
    assert ["k reads x, y; writes y"] == sentences(analyze(AXPY)[0], ["x", "y"])


def test_sentence_without_names() -> None:
    """Without names parameters are numbered."""
    assert ["k reads param 0, param 1; writes param 1"] == sentences(analyze(AXPY)[0])


def test_sentence_of_an_atomic_update() -> None:
    """An atomic is an update, not a read and a write."""
    report = report_of(pointers(0) + "red.global.add.f32 [%rd11], %f1;")

    assert ["k updates param 0"] == sentences(report)


def test_sentence_of_an_immovable_kernel_says_why() -> None:
    """The second sentence names the reason and its line."""
    said = sentences(report_of("st.global.f32 [g], %f1;", before=".visible .global .align 4 .f32 g;"))

    assert "k writes module variable g" == said[0]
    assert "k is immovable: line" in said[1]


def test_kernel_without_accesses_touches_no_memory() -> None:
    """A kernel may do nothing."""
    assert ["k touches no memory"] == sentences(report_of("mov.u32 %r1, 1;"))


def test_table_has_one_row_per_buffer() -> None:
    """Rows are kernel, buffer, access and bytes."""
    assert [("k", "x", "read"), ("k", "y", "read, write")] == [
        row[:3] for row in rows(analyze(AXPY)[0], ["x", "y"])
    ]


def test_explanation_shows_the_lines() -> None:
    """Every access is shown with the PTX that makes it."""
    shown = "\n".join(explain(analyze(AXPY)[0], AXPY, ["x", "y"]))

    assert "st.global.f32 [%rd31], %f1;" in shown


@pytest.mark.parametrize("text", [AXPY, LOOP])
def test_reports_survive_the_disk(text: str, tmp_path: Path) -> None:
    """What is read back equals what was analyzed."""
    store.forget()
    first = reports_for(text, directory=tmp_path)
    store.forget()

    assert 1 == len(list(tmp_path.iterdir()))
    assert first == reports_for(text, directory=tmp_path)


@pytest.mark.parametrize(
    "damage", ["", "{", '{"version": 1}', "[]", '{"version": 1, "kernels": [{"head": 3}]}', "\0"]
)
def test_damaged_cache_is_rewritten(damage: str, tmp_path: Path) -> None:
    """A file that is not a cache entry is ignored and replaced."""
    path = tmp_path / f"{store.key_of(AXPY)}.json"
    path.write_text(damage)
    store.forget()

    assert analyze(AXPY) == reports_for(AXPY, directory=tmp_path)
    assert "kernels" in json.loads(path.read_text())


def test_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """A cache path that is a file leaves the result alone."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    store.forget()

    assert analyze(AXPY) == reports_for(AXPY, directory=blocked)


def test_memory_cache_answers_without_analyzing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text is analyzed once."""
    store.forget()
    first = reports_for(AXPY)
    monkeypatch.setattr(store, "analyze", lambda text, file: pytest.fail("analyzed again"))

    assert first is reports_for(AXPY)


def test_reading_through_a_tensor_map_parameter() -> None:
    """A map by value stands for the buffer behind it."""
    report = report_of(
        """mov.b64 %rd3, k_param_0; cvta.param.u64 %rd14, %rd3;
        cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r9],
        [%rd14, {%r1, %r2}], [%r6];
        cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [k_param_1, {%r1, %r2}], [%r9];""",
        "b8[128] b8[128]",
    )

    assert [(0, True, False, True), (1, False, True, True)] == [
        (a.param, a.read, a.write, a.is_tensor_map) for a in report.accesses
    ]


def test_map_built_on_the_device_names_the_buffer_put_into_it() -> None:
    """The address put into a map in shared memory is followed to the copy in scratch memory."""
    report = report_of(
        pointers(0, 1, generic=True)
        + """mov.u32 %r7, smem; cvt.u64.u32 %rd7, %r7;
        tensormap.replace.tile.global_address.shared::cta.b1024.b64 [ %rd7 + 0 ], %rd1;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd2],
        [%rd7], 0x80;
        cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r9],
        [%rd2, {%r1, %r2}], [%r6];""",
        "ptr ptr",
        before=".extern .shared .align 16 .b8 smem[];",
    )

    assert {0: (True, False), 1: (True, True)} == {a.param: (a.read, a.write) for a in report.accesses}
    assert report.movable


def test_map_behind_a_pointer_is_indirect() -> None:
    """A map that was in memory before hides its buffer."""
    report = report_of(
        pointers(0, generic=True)
        + """cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [%r9],
        [%rd1, {%r1}], [%r6];"""
    )

    assert (("param", 0, 0),) == report.indirect[0].tables
