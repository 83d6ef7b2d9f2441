"""Plans whose lanes are of unlike batches: rules, figures and files."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from batches_factory import mixed_plan
from factories import make_chain, make_plan
from tessera.errors import ArtifactError, MismatchError, RuleBroken
from tessera.ir import Plan, Timeline, digest, load, need_one_batch, save, verify
from tessera.simulate import simulate


def header(path: Path) -> int:
    """The format that a file says it has."""
    return int(json.loads(path.read_bytes().split(b"\n")[0])["version"])


def test_a_larger_batch_counts_for_more() -> None:
    """Weights are batches over the first variant's, and rows those of all lanes."""
    plan = mixed_plan()

    assert [8, 2] == [plan.batch_of(lane) for lane in plan.lanes]
    assert [1.0, 0.25] == [plan.weight_of(lane) for lane in plan.lanes]
    assert plan.rows_per_s == pytest.approx(8e6 / 560 + 2e6 / 440)
    assert [plan.unit_of(lane) for lane in plan.lanes] == [v.unit for v in plan.every_variant]
    assert [0, 1] == [plan.first_step(lane) for lane in plan.lanes]


def test_files_keep_the_variants(tmp_path: Path) -> None:
    """A plan with unlike batches comes back equal, and says that older readers cannot take it."""
    plan = mixed_plan()
    save(plan, tmp_path / "x.plan")
    save(simulate(plan, 6), tmp_path / "x.timeline")

    assert plan == load(Plan, tmp_path / "x.plan")
    assert len(load(Timeline, tmp_path / "x.timeline").weights) == 6
    assert header(tmp_path / "x.plan") == header(tmp_path / "x.timeline") == 8


def test_files_without_variants_say_nothing_of_them(tmp_path: Path) -> None:
    """One batch: nothing in the body of others."""
    plan = make_plan([make_chain(3)], [[[0, 1, 0]]])
    save(plan, tmp_path / "x.plan")

    assert b"variant" not in (tmp_path / "x.plan").read_bytes()
    assert digest(plan) == digest(load(Plan, tmp_path / "x.plan"))


def test_files_of_formats_unknown_are_refused(tmp_path: Path) -> None:
    """The first format is too old, the next one too new."""
    save(mixed_plan(), tmp_path / "x.plan")
    raw = (tmp_path / "x.plan").read_bytes()
    for version, word in ((1, "old format 1"), (9, "reads up to 8")):
        (tmp_path / "y.plan").write_bytes(raw.replace(b'"version": 8', b'"version": %d' % version, 1))
        with pytest.raises(ArtifactError, match=word):
            load(Plan, tmp_path / "y.plan")


def test_rules_of_variants() -> None:
    """A lane of no variant, a variant of no lane, and variants that are no other batch are refused."""
    plan = mixed_plan()
    first = plan.lanes[0]
    broken = {
        "every lane follows a variant": replace(plan, lanes=(first, replace(plan.lanes[1], variant=2))),
        "each is followed by a lane": replace(plan, lanes=(first,)),
        "the same steps at different batches": replace(plan, variants=(plan.every_variant[0],)),
        "one price list per step": replace(
            plan, variants=(replace(plan.variants[0], costs=plan.every_variant[0].costs),)
        ),
    }
    for words, wrong in broken.items():
        with pytest.raises(RuleBroken, match=words):
            verify(wrong)


def test_variants_have_the_same_multiplicities() -> None:
    """A variant that runs its step more often is other work."""
    plan = mixed_plan()
    other = replace(plan.variants[0], unit=replace(plan.variants[0].unit, counts=(2,)))

    with pytest.raises(RuleBroken, match="the same steps"):
        verify(replace(plan, variants=(other,)))


def test_what_takes_one_batch_says_so() -> None:
    """With the batches, in one line with a remedy; plans of one batch pass."""
    need_one_batch(make_plan([make_chain(3)], [[[0, 1, 0]]]), "a service")

    with pytest.raises(
        MismatchError, match=r"lanes of batch 8, 2; a service takes one batch.*--batch-choices"
    ):
        need_one_batch(mixed_plan(), "a service")


def test_files_of_older_words_are_read(tmp_path: Path) -> None:
    """Before format 8 a plan had slots."""
    plan = mixed_plan()
    save(plan, tmp_path / "x.plan")
    head, _, body = (tmp_path / "x.plan").read_bytes().partition(b"\n")
    body = body.replace(b"microbatches", b"slots")
    facts = json.loads(head) | {"version": 7, "bytes": len(body), "sha256": sha256(body).hexdigest()}
    (tmp_path / "x.plan").write_bytes(json.dumps(facts).encode() + b"\n" + body)

    assert plan == load(Plan, tmp_path / "x.plan")
