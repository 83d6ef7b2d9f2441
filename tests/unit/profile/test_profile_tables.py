"""Public tables price what they cover, say which and how far, and are not believed when they are wrong."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from profile_factories import TraceMaker, attention_trace, emulated, estimate, gemm_trace, unary_trace
from tables_factory import GEMM_SIZES, Factor, made_tables, write_table
from tessera.ir import Cost, Source, Trace
from tessera.profile import OpClass, Tables, coverage, notes, rejected_tables, works
from tessera.profile.fitted import Array, price_many
from tessera.profile.measured import combine
from tessera.profile.table_files import TableFile, Unusable, installed_root, read_rows
from tessera.profile.tables import installed_tables

pytest.importorskip("pyarrow", reason="tables are Parquet files")


def first(trace: Trace, tables: Tables | bool, gpu_name: str = "a100") -> Cost:
    """The cost of the first launch."""
    return estimate(trace, emulated(gpu_name), tables).costs[0][0]


def test_a_measured_point_is_priced_as_measured(tmp_path: Path) -> None:
    """A GEMM that stands in the table costs what the table says."""
    write_table(tmp_path, "a100", OpClass.GEMM, factor=lambda _: 1.3)
    trace = gemm_trace(256, 4096, 4096)
    cost, modelled = first(trace, made_tables(tmp_path)), first(trace, tables=False)

    assert cost.us == pytest.approx(1.3 * modelled.us, rel=1e-6)
    assert Source.TABLE is cost.source
    assert "gemm of sglang 1.0.0 (made_up), at a measured point" == cost.detail


def test_between_points_the_ratio_to_the_model_is_interpolated(tmp_path: Path) -> None:
    """Between a row that is 1.0 and one that is 1.4 times the model, a GEMM costs something between."""
    write_table(tmp_path, "a100", OpClass.GEMM, factor=lambda c: np.where(c["m"] > 256, 1.4, 1.0))
    ratios = [
        first(gemm_trace(m, 4096, 4096), made_tables(tmp_path)).us
        / first(gemm_trace(m, 4096, 4096), tables=False).us
        for m in (257, 512, 1000)
    ]

    assert 1.0 <= ratios[0] < 1.1 < ratios[1] < 1.3 < ratios[2] <= 1.4


def test_the_error_grows_with_the_distance_to_the_nearest_point(tmp_path: Path) -> None:
    """A hit, a near miss and a far one: each is less sure than the one before, and says how far it is."""
    noise = np.random.default_rng(0)
    write_table(tmp_path, "a100", OpClass.GEMM, factor=lambda c: np.exp(noise.normal(0, 0.1, len(c["m"]))))
    tables = made_tables(tmp_path)
    hit, near, far = (
        first(gemm_trace(m, n, 16384), tables) for m, n in ((256, 4096), (300, 4096), (8192, 16384))
    )

    assert hit.rel_error < near.rel_error <= far.rel_error
    assert "0.23 octaves" in near.detail
    assert "1.00 octaves" in far.detail


def test_leave_one_out_measures_the_noise_of_the_table(tmp_path: Path) -> None:
    """Times scattered by 20 % around the model cannot be interpolated to better than that."""
    noise = np.random.default_rng(1)
    write_table(tmp_path, "a100", OpClass.GEMM, factor=lambda c: np.exp(noise.normal(0, 0.2, len(c["m"]))))
    wide = made_tables(tmp_path).choice("a100", OpClass.GEMM, "bfloat16").source
    write_table(tmp_path, "l40s", OpClass.GEMM)
    exact = made_tables(tmp_path).choice("l40s", OpClass.GEMM, "bfloat16").source

    assert wide is not None
    assert exact is not None
    assert 0.12 < wide.errors[0] < 0.3
    assert exact.errors.max() < 1e-6


@pytest.mark.parametrize("shape", [(4096 * 3, 4096, 4096), (256, 16384 * 3, 4096), (256, 128, 4096)])
def test_nothing_is_extrapolated_beyond_a_factor_of_two(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    """A GEMM three times longer than any in the table is left to the model."""
    write_table(tmp_path, "a100", OpClass.GEMM)

    assert Source.FITTED is first(gemm_trace(*shape), made_tables(tmp_path)).source


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_other_dtypes_are_left_to_the_model(tmp_path: Path, dtype: str) -> None:
    """A table of bf16 says nothing about fp32."""
    write_table(tmp_path, "a100", OpClass.GEMM)

    assert Source.TABLE is not first(gemm_trace(256, 4096, 4096, dtype), made_tables(tmp_path)).source


def test_sources_are_mixed_per_launch(tmp_path: Path) -> None:
    """On one GPU a GEMM comes from the table and a softmax from the model, each tagged."""
    write_table(tmp_path, "a100", OpClass.GEMM)
    tables = made_tables(tmp_path)

    assert Source.TABLE is first(gemm_trace(256, 4096, 4096), tables).source
    assert Source.TABLE is not first(unary_trace("aten._softmax.default", 1 << 20), tables).source
    assert Source.TABLE is not first(gemm_trace(256, 4096, 4096), tables, "h20").source


def test_causal_prompts_are_priced_from_the_context_table(tmp_path: Path) -> None:
    """Causal attention is in the tables; attention over everything is not."""
    write_table(tmp_path, "a100", OpClass.PREFILL, factor=lambda _: 1.2)
    tables = made_tables(tmp_path)
    causal, full = (first(attention_trace(4, 16, 2048, 2048, c), tables) for c in (True, False))

    assert (Source.TABLE, Source.FITTED) == (causal.source, full.source)


def test_a_cache_that_fitted_the_l2_is_put_back_into_memory(tmp_path: Path) -> None:
    """A short KV cache was timed from the L2 cache; inside a step it comes from memory, at its cost."""
    write_table(tmp_path, "l40s", OpClass.DECODE)
    trace = attention_trace(4, 16, 1, 1024)
    cost, modelled = first(trace, made_tables(tmp_path), "l40s"), first(trace, tables=False, gpu_name="l40s")

    assert Source.TABLE is cost.source
    assert cost.us == pytest.approx(modelled.us, rel=0.01)
    assert cost.rel_error > 0.1


def experts_trace(experts: int, rows: int, n: int, k: int) -> Trace:
    """One grouped GEMM."""
    make = TraceMaker()
    x, weights, out = make.tensor((rows, k)), make.tensor((experts, k, n)), make.tensor((rows, n))
    make.launch("aten._grouped_mm.default", (x, weights), out)
    return make.done()


@pytest.mark.parametrize(("n", "k"), [(4096, 2048), (2048, 2048)], ids=["gate and up", "down"])
def test_both_gemms_of_an_expert_are_priced_by_the_fused_kernel(tmp_path: Path, n: int, k: int) -> None:
    """A layer that takes 1.5 times the model's time makes each of its GEMMs dearer by that, less surely."""
    write_table(tmp_path, "h200", OpClass.GROUPED, factor=lambda _: 1.5)
    trace = experts_trace(32, 256, n, k)
    cost, modelled = first(trace, made_tables(tmp_path), "h200"), price_many(works(trace), "h200")[0]

    assert Source.TABLE is cost.source
    assert cost.us == pytest.approx(1.5 * modelled.us, rel=1e-6)
    assert cost.rel_error >= 0.2


def test_many_rows_an_expert_are_left_to_the_model(tmp_path: Path) -> None:
    """Beyond 64 rows a group libraries differ by more than a model does."""
    write_table(tmp_path, "h200", OpClass.GROUPED)

    assert Source.TABLE is first(experts_trace(32, 32 * 64, 4096, 2048), made_tables(tmp_path), "h200").source
    assert (
        Source.TABLE
        is not first(experts_trace(32, 32 * 65, 4096, 2048), made_tables(tmp_path), "h200").source
    )


def test_experts_without_a_gate_are_left_out(tmp_path: Path) -> None:
    """A layer whose times would be impossible with a gate has none; its other rows go with it."""

    def ungated(c: dict[str, Array]) -> object:
        return np.where((c["hidden_size"] == 2048) & (c["inter_size"] == 2048), 0.5, 1.0)

    write_table(tmp_path, "h200", OpClass.GROUPED, factor=ungated)
    source = made_tables(tmp_path).choice("h200", OpClass.GROUPED, "bfloat16").source

    assert source is not None
    assert not ((source.surface.places[:, 1] == 11) & (source.surface.places[:, 2] == 11)).any()
    assert np.abs(source.surface.residual).max() < 1e-6


def too_fast(columns: dict[str, Array]) -> object:
    """Long GEMMs at three times the peak."""
    return np.where(columns["m"] > 64, 0.3, 1.0)


def linear(columns: dict[str, Array]) -> object:
    """Attention that grows with the length, and is slow enough to be possible."""
    return 0.6 * 16384 / columns["isl"]


def as_modelled(_: dict[str, Array]) -> object:
    """Nothing wrong with the times."""
    return 1.0


# sentence: class, factor, sizes, card, column left out
WRONG: dict[str, tuple[OpClass, Factor, tuple[list[int], ...] | None, str, str]] = {
    "faster than": (OpClass.GEMM, too_fast, None, "", ""),
    "grows with the length to the power of": (OpClass.PREFILL, linear, None, "", ""),
    "fewer than 300": (OpClass.GEMM, as_modelled, ([16], *GEMM_SIZES[1:]), "", ""),
    "timed on NVIDIA B200": (OpClass.GEMM, as_modelled, None, "B200", ""),
    "no column k": (OpClass.GEMM, as_modelled, None, "", "k"),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_wrong_table_is_passed_over_with_a_sentence(tmp_path: Path, sentence: str) -> None:
    """Each mechanical check names what is wrong, and the next stack is asked instead."""
    op, factor, sizes, card, drop = WRONG[sentence]
    preferred, second = {OpClass.GEMM: ("sglang", "vllm"), OpClass.PREFILL: ("vllm", "sglang")}[op]
    write_table(tmp_path, "a100", op, preferred, factor=factor, sizes=sizes, card=card, drop=drop)
    write_table(tmp_path, "a100", op, stack=second)
    choice = made_tables(tmp_path).choice("a100", op, "bfloat16" if op is OpClass.GEMM else "128")

    assert choice.source is not None
    assert second == choice.source.file.stack
    assert [sentence in reason for _, reason in choice.rejected] == [True]


def test_a_table_unlike_its_chip_is_passed_over(tmp_path: Path) -> None:
    """Four times faster than the same chip elsewhere is wrong, though no row is impossible."""
    write_table(tmp_path, "h200", OpClass.PREFILL, "vllm", "0.19.0")
    write_table(tmp_path, "h200", OpClass.PREFILL, "sglang", factor=lambda _: 4.0)
    write_table(tmp_path, "h100", OpClass.PREFILL, "vllm", factor=lambda _: 4.0)
    tables = made_tables(tmp_path)
    choice = tables.choice("h200", OpClass.PREFILL, "128")

    assert choice.source is not None
    assert "sglang 1.0.0" == choice.source.file.name
    assert ("prefill 128, vllm 0.19.0", choice.rejected[0][1]) in rejected_tables("h200", tables).items()
    assert "times faster than every other table of the GH100" in choice.rejected[0][1]


def test_a_few_impossible_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    """A zero and a time below what memory allows cost the table two rows, not its place."""

    def spoil(c: dict[str, Array]) -> object:
        odd = (c["n"] == 16384) & (c["k"] == 16384)
        return np.where(odd & (c["m"] == 4096), 0.1, np.where(odd & (c["m"] == 1), 0.0, 1.0))

    write_table(tmp_path, "a100", OpClass.GEMM, factor=spoil)
    source = made_tables(tmp_path).choice("a100", OpClass.GEMM, "bfloat16").source

    assert source is not None
    assert 2 == source.num_left_out


def test_a_broken_file_is_named_and_not_fatal(tmp_path: Path) -> None:
    """A truncated table costs its sentence in the notes, and the model prices the launch."""
    path = write_table(tmp_path, "a100", OpClass.GEMM)
    path.write_bytes(path.read_bytes()[:200])
    tables, trace = made_tables(tmp_path), gemm_trace(256, 4096, 4096)

    assert Source.FITTED is first(trace, tables).source
    said = notes(trace, emulated("a100"), tables)
    assert any("the gemm table of sglang 1.0.0 is not used: it cannot be read" in line for line in said)


def test_a_file_that_vanishes_is_unusable_and_no_crash(tmp_path: Path) -> None:
    """A table that is deleted after it was listed ends in a sentence."""
    path = write_table(tmp_path, "a100", OpClass.GEMM)
    path.unlink()

    with pytest.raises(Unusable, match="it cannot be read"):
        read_rows(TableFile("a100", OpClass.GEMM, "sglang", "1.0.0", path), "bfloat16", tmp_path / "c")


def test_a_second_reading_comes_from_the_store(tmp_path: Path) -> None:
    """What was read once is not read again, unless the file has changed."""
    path = write_table(tmp_path / "t", "a100", OpClass.GEMM)
    trace, cache = gemm_trace(256, 4096, 4096), tmp_path / "cache"
    before = first(trace, made_tables(tmp_path / "t", cache))
    kept = sorted(cache.iterdir())
    again = first(trace, made_tables(tmp_path / "t", cache))
    for entry in kept:
        entry.write_bytes(b"not an archive")
    repaired = first(trace, made_tables(tmp_path / "t", cache))
    write_table(tmp_path / "t", "a100", OpClass.GEMM, factor=lambda _: 2.0)

    assert kept == sorted(x for x in cache.iterdir() if x in kept)
    assert before == again == repaired
    assert path.exists()
    assert first(trace, made_tables(tmp_path / "t", cache)).us == pytest.approx(2 * before.us)


def test_the_newest_version_of_the_preferred_stack_is_taken(tmp_path: Path) -> None:
    """0.10.0 is newer than 0.9.0, and sglang's GEMMs come before vLLM's."""
    for stack, version in (("vllm", "9.0.0"), ("sglang", "0.9.0"), ("sglang", "0.10.0")):
        write_table(tmp_path, "a100", OpClass.GEMM, stack, version)
    source = made_tables(tmp_path).choice("a100", OpClass.GEMM, "bfloat16").source

    assert source is not None
    assert "sglang 0.10.0" == source.file.name


def test_without_the_package_prices_are_modelled_and_the_reader_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line that installs the extra is a note, never an error."""
    monkeypatch.setattr("tessera.profile.measured.installed_tables", lambda: None)
    trace = gemm_trace(256, 4096, 4096)

    assert Source.FITTED is combine(trace, emulated("a100"), {})[0].costs[0][0].source
    assert any('pip install "tessera-gpu[tables]"' in line for line in notes(trace, emulated("a100"), None))
    assert not any("pip install" in line for line in notes(trace, emulated("h20"), None))


def test_without_the_reader_prices_are_modelled_and_the_reader_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables without pyarrow are named as unreadable, and the model prices the launch."""
    write_table(tmp_path, "a100", OpClass.GEMM)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    tables, trace = made_tables(tmp_path), gemm_trace(256, 4096, 4096)

    assert Source.FITTED is first(trace, tables).source
    assert any('pip install "tessera-gpu[tables]"' in x for x in notes(trace, emulated("a100"), tables))


def test_coverage_lists_the_table_before_the_model(tmp_path: Path) -> None:
    """What `tessera gpus NAME` shows: the best source of a class first, the model behind it."""
    write_table(tmp_path, "a100", OpClass.GEMM)
    listed = coverage("a100", made_tables(tmp_path))
    gemms = [c for c in listed if c.op is OpClass.GEMM and c.dtypes == "16 bits"]

    assert [Source.TABLE, Source.FITTED] == [c.source for c in gemms]
    assert "points of sglang 1.0.0" in gemms[0].why


def test_the_package_is_found_without_running_it() -> None:
    """Looking for the tables imports nothing of the package, nor the reader, nor torch."""
    code = (
        "import sys; from tessera.profile import installed_tables; installed_tables();"
        "sys.exit(any(m in sys.modules for m in ('aiconfigurator_core', 'pyarrow', 'torch')))"
    )

    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode


needs_package = pytest.mark.skipif(installed_root() is None, reason="aiconfigurator-core is not installed")


@needs_package
def test_the_installed_tables_price_llama_shapes_on_both_gpus() -> None:
    """The projections of Llama-3-8B come from sglang's tables on A100 and L40S, with a stated error."""
    for n, k in ((6144, 4096), (28672, 4096), (4096, 14336)):
        for cost in estimate(gemm_trace(2048, n, k), emulated("a100", "l40s")).costs[0]:
            assert Source.TABLE is cost.source
            assert "sglang" in cost.detail
            assert cost.rel_error < 0.15


@needs_package
def test_the_installed_tables_say_that_large_gemms_are_not_faster_on_the_l40s() -> None:
    """As measured: 244 against 197 TFLOP/s, though the data sheets say the opposite."""
    a100, l40s = estimate(gemm_trace(8192, 8192, 8192), emulated("a100", "l40s")).costs[0]

    assert a100.us == pytest.approx(2 * 8192**3 / 244e6, rel=0.1)
    assert l40s.us == pytest.approx(2 * 8192**3 / 197e6, rel=0.1)
    assert installed_tables() is not None
