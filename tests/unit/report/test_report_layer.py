"""The placement of one layer."""

import pytest
from rich.console import Console, RenderableType

from report_factory import A100, L40S, VALUE_BYTES, Work, make_graph, make_plan, make_work
from tessera.ir import verify
from tessera.report import layer_picture
from tessera.report.picture import Crossing, layer_of


def text_of(shown: RenderableType, width: int = 100, encoding: str = "utf-8") -> str:
    """What a plain terminal shows."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        options = console.options.update(width=width)
        options.encoding = encoding
        for segment in console.render(shown, options):
            console.out(segment.text, end="")
    return capture.get()


def test_the_middle_layer_stands_for_all() -> None:
    """The third of four equal layers is shown, with all of its launches."""
    layer = layer_of(make_graph().trace)

    assert layer is not None
    assert ("model.layers.2", 16, 4) == (layer.scope, len(layer.launches), layer.num_alike)


def test_unlike_layers_do_not_stand_for_the_others() -> None:
    """A first layer of another make is not the one shown, and does not count as alike."""
    odd = (("model.layers.0.conv", "aten.convolution.default", 1.0, 1.0),) * 40
    layer = layer_of(make_graph(work=(*odd, *make_work()[17:])).trace)

    assert layer is not None
    assert ("model.layers.2", 3) == (layer.scope, layer.num_alike)


def test_nested_lists_do_not_hide_the_layers() -> None:
    """Experts inside a layer are a list too; the layers, which hold more launches, win."""
    work = tuple(
        (f"blocks.{n}.experts.{e}", "aten.mm.default", 1.0, 1.0)
        for n in range(3)
        for e in range(4)
        for _ in range(3)
    )
    layer = layer_of(make_graph(work=work).trace)

    assert layer is not None
    assert "blocks.1" == layer.scope


def test_no_repeated_layer_shows_the_whole_step() -> None:
    """A model without a module list is shown whole, and the picture says so."""
    work = (("encoder", "aten.mm.default", 1.0, 2.0), ("decoder", "aten.add.Tensor", 1.0, 2.0))
    text = text_of(layer_picture(make_plan(work=work), 0, 1))

    assert "no layer repeats" in text
    assert "encoder" in text
    assert "decoder" in text


def test_picture_names_devices_and_kernels() -> None:
    """The columns are the devices; the blocks name the kernels."""
    text = text_of(layer_picture(make_plan(), 0, 1))

    assert all(word in text for word in ("emu:a100", "emu:l40s", "sdpa_flash", "mlp.gate_proj", "52.0 us"))


def test_title_is_whole_on_a_narrow_terminal() -> None:
    """The lane and its share stand at the end of the title, which wraps and is not cut."""
    text = text_of(layer_picture(make_plan(), 0, 1), width=60)

    assert "of the work)" in " ".join(text.split())


def test_rows_keep_every_launch_in_order() -> None:
    """Merging loses no launch, and time is that of the chosen device."""
    shown = layer_picture(make_plan(), 0, 1)

    assert 16 == sum(row.num_launches for row in shown.rows)
    assert ["input_layernorm", "self_attn.q_proj"] == [row.module for row in shown.rows[:2]]
    assert (92.0, 168.0) == shown.us


def test_consecutive_launches_of_one_module_are_one_row() -> None:
    """The three kernels of the attention itself are one block, the longest first."""
    row = next(row for row in layer_picture(make_plan(), 0, 1).rows if row.module == "self_attn")

    assert ("sdpa_flash_attention, mul +1", 3, A100) == (row.text, row.num_launches, row.device)


def test_crossings_carry_their_bytes() -> None:
    """A value read on another device crosses once, before its reader."""
    arrivals = [c for row in layer_picture(make_plan(), 0, 1).rows for c in row.arrivals]

    assert [Crossing(L40S, A100, VALUE_BYTES), Crossing(A100, L40S, VALUE_BYTES)] == arrivals
    assert 2 == text_of(layer_picture(make_plan(), 0, 1)).count("65.5 KB")


def test_nothing_crosses_on_one_device() -> None:
    """The lane that stays on one device shows no arrow."""
    text = text_of(layer_picture(make_plan(), 1, 1))

    assert "nothing crosses" in text
    assert "▶" not in text


def test_what_leaves_the_layer_is_counted() -> None:
    """A value whose reader is in the next layer, elsewhere, leaves."""
    work: Work = tuple(
        (f"layers.{n}.{child}", "aten.mm.default", 1.0, 1.0)
        for n in range(3)
        for child in ("mlp", "self_attn", "self_attn")
    )

    assert (Crossing(A100, L40S, VALUE_BYTES),) == layer_picture(make_plan(work=work), 0, 1).leaving


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_ping_pong_layer_stays_short(width: int) -> None:
    """A hundred moves between the devices fit 35 lines; what is left out is counted."""
    work: Work = tuple(
        (f"layers.{n}.{part}.{k}", "aten.mm.default", 1.0, 1.0)
        for n in range(2)
        for k in range(50)
        for part in ("self_attn", "mlp")
    )
    plan = make_plan(work=work)
    verify(plan)
    lines = text_of(layer_picture(plan, 0, 1), width).splitlines()

    assert len(lines) <= 35
    assert any("74 launches between" in line for line in lines)
    assert all(len(line) <= max(width, 26 + 2 * 12 + 9) for line in lines)


def test_picture_without_unicode() -> None:
    """On an ASCII terminal the picture is ASCII."""
    assert text_of(layer_picture(make_plan(), 0, 1), encoding="ascii").isascii()
