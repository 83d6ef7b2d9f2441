"""Calls of tools: found in any text, in whatever pieces it comes; and forced by a grammar."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.serve.openai.tools import CLOSE, OPEN, FoundCalls, OutputPart, calls_form
from tessera.serve.text import ByteText

NAMES = ("weather", "add")
CALL = '{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}'
OTHER = '{"name": "unknown", "arguments": {}}'


def read(reader: FoundCalls, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and each call's name and arguments."""
    told = [x for piece in pieces for x in reader.feed(piece)] + reader.finish()
    text = ""
    calls: list[tuple[str, str]] = []
    for x in told:
        if x.call is None:
            text += x.text
        elif x.name:
            assert x.call == len(calls)
            calls.append((x.name, ""))
        else:
            assert x.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + x.text)
    assert reader.num_calls == len(calls)
    return text, calls


WEATHER = ("weather", '{"city": "Ulm", "days": 2}')


@pytest.mark.parametrize(
    ("said", "text", "calls"),
    [
        ("hello", "hello", []),
        ("  hello", "  hello", []),
        (CALL, "", [WEATHER]),
        (f"\n {CALL}\n", "", [WEATHER]),
        (f"[{CALL}, {CALL}]", "", [WEATHER, WEATHER]),
        (CALL.replace("arguments", "parameters"), "", [WEATHER]),
        ('{"name": "add"}', "", [("add", "{}")]),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", '{"a": 1}')]),
        (OTHER, OTHER, []),
        (f"[{CALL}, {OTHER}]", f"[{CALL}, {OTHER}]", []),
        ("[1, 2]", "[1, 2]", []),
        ("[]", "[]", []),
        ('{"name": ["weather"]}', '{"name": ["weather"]}', []),
        ("{broken", "{broken", []),
        (f'[{CALL}, {{"name": "ad', "", [WEATHER]),
        (f"[{CALL}] and more", f"[{CALL}] and more", []),
        (f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER]),
        (f"I look.\n<tool_call>{CALL}</tool_call>", "I look.\n", [WEATHER]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n", "", [WEATHER, WEATHER]),
        (f"<tool_call>{CALL}</tool_call> done", " done", [WEATHER]),
        (f"<tool_call>\n{CALL}", "", [WEATHER]),
        (f"<tool_call>{OTHER}</tool_call>", f"<tool_call>{OTHER}</tool_call>", []),
        ("a <tool_call", "a <tool_call", []),
        ("a <tool_call> b", "a <tool_call> b", []),
        ("[" * 5000, "[" * 5000, []),
    ],
)  # fmt: skip
def test_calls_are_found_where_the_model_may_choose(
    said: str, text: str, calls: list[tuple[str, str]]
) -> None:
    """A JSON object or list that names known tools, or such between tags; all else is text."""
    assert (text, calls) == read(FoundCalls(NAMES), [said])


@given(
    st.lists(st.sampled_from([OPEN, CLOSE, CALL, OTHER, " ", "x", "\n", "<", "["]), max_size=7),
    st.randoms(use_true_random=False),
)
def test_pieces_do_not_matter(parts: list[str], rng: random.Random) -> None:
    """However a text comes, the same is found in it."""
    said = "".join(parts)
    cuts = sorted(rng.randrange(len(said) + 1) for _ in range(5))
    pieces = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]

    assert read(FoundCalls(NAMES), [said]) == read(FoundCalls(NAMES), pieces)


def test_text_is_not_held_back_without_need() -> None:
    """Only what may be the beginning of a call."""
    reader = FoundCalls(NAMES)

    assert [OutputPart("see")] == reader.feed("see")
    assert [OutputPart(" ")] == reader.feed(" <tool")
    assert [OutputPart("<tool box")] == reader.feed(" box")


def test_the_grammar_of_calls_makes_calls() -> None:
    """Whatever is drawn by it is read as calls of these tools, whose arguments follow their schemas."""
    pytest.importorskip("llguidance", reason="needs the extra 'grammar'")
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    from tessera.serve.grammar import GrammarCompiler, prepare_masks

    number = {"type": "integer", "minimum": 0, "maximum": 9}
    schemas: dict[str, dict[str, Any]] = {
        "add": {
            "$defs": {"n": number},
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "weather": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
    grammar = GrammarCompiler(ByteText(), 258).compile(f"start: calls\n{calls_form(schemas, 3)}", "tools")
    rng, seen = random.Random(2), set()
    for _ in range(12):
        guide, numbers = grammar.start(), list[int]()
        while not guide.is_over:
            prepare_masks([guide], patience_s=None)
            assert guide.mask is not None
            numbers.append(rng.choice([n for n in range(258) if guide.mask[n // 32] >> n % 32 & 1]))
            guide.add(numbers[-1])
        text, calls = read(FoundCalls(schemas), [ByteText().decode(numbers)])
        assert "" == text
        assert 1 <= len(calls) <= 3
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[name])
            seen.add(name)

    assert set(schemas) == seen
