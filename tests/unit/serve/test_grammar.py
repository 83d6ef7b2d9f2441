"""Answers of a form: masks of grammars, whatever the tokens are, and through losses of devices."""

import asyncio
import io
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

llguidance = pytest.importorskip("llguidance", reason="needs the extra 'grammar'")
jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")

from sampling import examples  # noqa: E402
from serving_factory import (  # noqa: E402
    GREEDY,
    SHAPE,
    Loss,
    ToyStepper,
    choose_rows,
    expected,
    random_ask,
    read,
    read_all,
    service_of,
    split_policy,
    wait_for,
    wait_for_masks,
)
from tessera.errors import AskError  # noqa: E402
from tessera.ir import Role  # noqa: E402
from tessera.serve import grammar as grammar_module  # noqa: E402
from tessera.serve import sequences  # noqa: E402
from tessera.serve.grammar import MAX_CHARS, Grammar, GrammarCompiler, Guide, open_grammars  # noqa: E402
from tessera.serve.records import Ask, Sampling, Shape, Token  # noqa: E402
from tessera.serve.sampling import Pick  # noqa: E402
from tessera.serve.service import Service  # noqa: E402
from tessera.serve.text import END, ByteText  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


class Words(ByteText):
    """Tokens of several bytes, one that is half a character, and no end."""

    end: tuple[int, ...] = ()
    words = (*(bytes([n]) for n in range(128)), b'{"', b'":', b'name"', b'"age":1', b"\xc3", b"\xa9", b"")

    def token_bytes(self, token: int) -> bytes:
        """By the table."""
        return self.words[token] if token < len(self.words) else b""


def made(schema: dict[str, Any], text: ByteText | None = None, vocab_size: int = SHAPE.vocab_size) -> Grammar:
    """The grammar of a schema."""
    compiler = GrammarCompiler(text or ByteText(), vocab_size)
    return compiler.compile(f"start: %json {json.dumps(schema)}", "response_format")


@pytest.mark.parametrize(("text", "vocab_size"), [(ByteText(), 258), (ByteText(), 300), (Words(), 140)])
def test_whatever_is_drawn_validates(text: ByteText, vocab_size: int) -> None:
    """From random logits, with tokens of bytes, of numbers and of words, with an end and without."""
    grammar = made(SCHEMA, text, vocab_size)
    generator = torch.Generator().manual_seed(0)
    for seed in range(5):
        pick = Pick.of(Ask((), 99, Sampling(1.0, seed=seed), grammar=grammar), ())
        numbers: list[int] = []
        while not pick.is_over:
            logits = torch.randn(1, vocab_size, generator=generator)
            (token,) = choose_rows(logits, [pick], [len(numbers)])
            assert token is not None
            numbers.append(token.number)
            pick.add(token.number)
        raw = b"".join(map(text.token_bytes, numbers))
        jsonschema.validate(json.loads(raw), SCHEMA)


def test_a_masked_row_changes_no_other() -> None:
    """Rows beside it are drawn as they are alone."""
    grammar = made(SCHEMA)
    logits = torch.randn(3, SHAPE.vocab_size, generator=torch.Generator().manual_seed(1))

    def plain(seed: int) -> Pick:
        return Pick.of(Ask((), 99, Sampling(1.0, seed=seed)), ())

    guided = Pick.of(Ask((), 99, Sampling(0.0), grammar=grammar), ())
    crowd = choose_rows(logits, [plain(1), guided, plain(2)])

    assert choose_rows(logits[:1], [plain(1)]) == crowd[:1]
    assert choose_rows(logits[2:], [plain(2)]) == crowd[2:]
    assert Token(ord("{")) == crowd[1]


def test_an_answer_is_over_where_its_grammar_is() -> None:
    """Without an end token, with finish_reason stop, also where the model's own end is not to be seen."""
    shape_of_answer = made({"enum": ["yes", "no"]})
    asks = [Ask((n,), 20, GREEDY, grammar=shape_of_answer, ignores_end=n % 2 == 0) for n in range(4)]
    with service_of(ToyStepper()) as service:
        found = wait_for(read_all(service, asks))

    assert all(told.text in ('"yes"', '"no"') for told in found)
    assert {"stop"} == {told.finish.reason for told in found}
    assert END not in found[0].numbers


def test_an_answer_that_is_too_long_is_cut() -> None:
    """Its text is the beginning of a form, and the reason says so."""
    ask = Ask((1,), 4, GREEDY, grammar=made(SCHEMA))
    with service_of(ToyStepper()) as service:
        (told,) = wait_for(read_all(service, [ask]))

    assert ("length", '{"na') == (told.finish.reason, told.text)


def test_a_form_survives_lost_devices() -> None:
    """After a restart it goes on where it was; beside answers of other forms and of none."""
    forms = [made(SCHEMA), made({"type": "array", "items": {"type": "boolean"}, "minItems": 3}), None]
    asks = [Ask((n, 9), 40, Sampling(1.0, seed=n), grammar=forms[n % 3]) for n in range(6)]
    with service_of(ToyStepper(losses={9: Loss(), 40: Loss()})) as service:
        found = wait_for(read_all(service, asks))
        retried = service.snapshot().retried

    assert retried
    assert [expected(ask) for ask in asks] == [told.what for told in found]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('start: %json {"type": "dog"}', "Invalid type: dog"),
        ('start: %json {"contains": 1}', "Unimplemented keys"),
        ('start: %json {"$ref": "http://example.org"}', "does not fetch"),
        ('start: %json {"type": "string", "pattern": "(?=a)b"}', "look-around, including look-ahead"),
        ("x" * (MAX_CHARS + 1), "characters"),
        ("nothing", "makes no grammar"),
    ],
)
def test_what_is_no_grammar_is_refused_by_its_field(source: str, said: str) -> None:
    """In one line; nothing is fetched."""
    with pytest.raises(AskError) as told:
        GrammarCompiler(ByteText(), 258).compile(source, "response_format")

    assert "response_format" == told.value.place
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def test_a_grammar_is_compiled_once() -> None:
    """The latest are kept; each guide of one follows its own answer."""
    compiler = GrammarCompiler(ByteText(), 258)

    async def several() -> list[Grammar]:
        sources = ["start: /[ab]{2}/", "start: /[cd]{2}/", "start: /[ab]{2}/"]
        return [await compiler.compiled(source, "x") for source in sources]

    first, second, again = wait_for(several())
    one, other = first.start(), again.start()
    one.add(ord("a"))
    one.add(ord("b"))

    assert first is again
    assert first is not second
    assert (True, False) == (one.is_over, other.is_over)


def test_a_grammar_that_becomes_too_large_ends_its_answer_alone() -> None:
    """In our words, as the request's fault; answers beside it go on."""
    wide = made({"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(1500)}})
    asks = [Ask((1,), 20, GREEDY, grammar=wide), Ask((2,), 20, GREEDY, ignores_end=True)]
    with service_of(ToyStepper()) as service:
        failed, told = wait_for(read_all(service, asks))

    assert "error" == failed.finish.reason
    assert failed.finish.is_refused
    assert "became too large to follow" in failed.finish.message
    assert expected(asks[1]) == told.what


def test_a_hard_mask_delays_no_other_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own answer sits steps out until the mask is there."""
    compute, is_held = grammar_module._compute_masks, threading.Event()
    hard = made({"enum": ["yes", "no"]})

    def slowly(guides: Sequence[Guide]) -> None:
        if any(id(guide) in marked for guide in guides):
            assert is_held.wait(20)
        compute(guides)

    marked: set[int] = set()
    monkeypatch.setattr(grammar_module, "_compute_masks", slowly)
    monkeypatch.setattr(Grammar, "start", marking(Grammar.start, hard, marked))
    plain, formed = Ask((2,), 20, GREEDY, ignores_end=True), Ask((3,), 40, GREEDY, grammar=made(SCHEMA))

    async def run(service: Service) -> list[object]:
        slow = asyncio.ensure_future(read(service, Ask((1,), 8, GREEDY, grammar=hard)))
        await asyncio.sleep(0.05)
        others = [(await read(service, plain)).what, (await read(service, formed)).what]
        assert not slow.done()
        is_held.set()
        return [*others, (await slow).finish.reason]

    with service_of(ToyStepper()) as service:
        found = wait_for(run(service))

    assert [expected(plain), expected(formed), "stop"] == found


@pytest.mark.parametrize(
    "shape",
    [SHAPE, replace(SHAPE, has_rows=True), replace(SHAPE, sizes=(2, 3), is_flat=False)],
    ids=["pages", "pages and rows", "rows"],
)
def test_steps_are_ordered_before_their_masks_are_known(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forms among plain answers, all of one length and of many: the answers are those without steps ahead."""
    wait_for_masks(monkeypatch)
    forms = [made(SCHEMA), made({"type": "array", "items": {"type": "boolean"}, "minItems": 3}), None]
    asks = [Ask((n, 9), 10 + 5 * n, Sampling(n % 2, seed=n), grammar=forms[n % 3]) for n in range(8)]
    found = []
    for stepper in (ToyStepper(shape, queues=False), ToyStepper(shape, queues=True)):
        with service_of(stepper) as service:
            found.append([told.what for told in wait_for(read_all(service, asks))])
    in_turn, ahead = found

    assert in_turn == ahead
    assert [expected(ask) for ask in asks] == ahead
    assert stepper.num_open > 20


def test_a_mask_that_is_late_delays_its_own_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step was ordered: that step goes on without it, and it reads its token again in a later one."""
    compute, is_held = grammar_module._compute_masks, threading.Event()
    held: list[Guide] = []

    def slowly(guides: Sequence[Guide]) -> None:
        if any(id(guide) in marked for guide in guides):
            calls.append(len(guides))
            if len(calls) == 4:  # in the middle of the answer
                held.extend(guides)
                assert is_held.wait(20)
        compute(guides)

    marked: set[int] = set()
    calls: list[int] = []
    hard = made(SCHEMA)
    monkeypatch.setattr(grammar_module, "_compute_masks", slowly)
    monkeypatch.setattr(Grammar, "start", marking(Grammar.start, hard, marked))
    late = Ask((1,), 40, GREEDY, grammar=hard)
    plain = [Ask((n,), 30, GREEDY, ignores_end=True) for n in range(2, 5)]

    async def run(service: Service) -> list[object]:
        reading = asyncio.ensure_future(read(service, late))
        others = [(await read(service, ask)).what for ask in plain]
        assert held
        assert not reading.done()
        is_held.set()
        return [(await reading).what, *others]

    stepper = ToyStepper(step_s=1e-3)
    with service_of(stepper) as service:
        found = wait_for(run(service))

    assert [expected(ask) for ask in (late, *plain)] == found
    assert stepper.num_open


@pytest.mark.parametrize("seed", range(examples(12, 2)))
def test_forms_survive_moves_losses_few_pages_and_late_masks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens to a sequence while a step is ahead of its masks, its answer is the same."""
    rng, compute = random.Random(seed), grammar_module._compute_masks

    def sometimes_slowly(guides: Sequence[Guide]) -> None:
        time.sleep(0.01 * (rng.random() < 0.2))
        compute(guides)

    monkeypatch.setattr(grammar_module, "_compute_masks", sometimes_slowly)
    monkeypatch.setattr(sequences, "PATIENCE_S", 2e-3)
    forms = [made(SCHEMA), made({"type": "array", "items": {"type": "boolean"}, "minItems": 3}), None]
    shape = replace(SHAPE, pool_tokens=16 * (5, 11)[seed % 2])
    stepper = (
        lambda: ToyStepper(shape, seed=seed, losses={rng.randrange(9, 60): Loss()}),
        lambda: ToyStepper(shape, seed=seed, plans=(split_policy("split", Role.ANSWERS, shape),)),
    )[seed // 2 % 2]()
    asks = [random_ask(rng, shape.capacity, grammar=rng.choice(forms)) for _ in range(9)]
    with service_of(stepper) as service:
        found = wait_for(read_all(service, asks))

    assert [expected(ask) for ask in asks] == [told.what for told in found]
    assert stepper.num_open


def marking(
    start: Callable[[Grammar], Guide], grammar: Grammar, marked: set[int]
) -> Callable[[Grammar], Guide]:
    def marks(self: Grammar) -> Guide:
        guide = start(self)
        if self is grammar:
            marked.add(id(guide))
        return guide

    return marks


def test_schema_that_refers_to_itself_alone_is_refused() -> None:
    """No text fits it, which the first mask shows."""
    with pytest.raises(AskError, match="no text fits it"):
        GrammarCompiler(ByteText(), 258).compile('start: %json {"$ref": "#"}', "response_format")


def test_library_that_does_not_load_is_left_off(monkeypatch: pytest.MonkeyPatch, logged: io.StringIO) -> None:
    """An optional feature never ends the service; a warning says why it is off."""
    monkeypatch.setattr(llguidance, "LLTokenizer", lambda *args, **options: 1 / 0)

    assert open_grammars(ByteText(), 258) is None
    assert "division by zero" in logged.getvalue()
