"""Chat templates are strangers' programs: filled in as Hugging Face does, with limits of time and memory."""

import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="needs jinja2")

from tessera.errors import AskError
from tessera.serve import templates
from tessera.serve.templates import ChatTemplate

MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "What is 漢字? <b>"},
    {"role": "assistant", "content": "Characters."},
    {"role": "user", "content": "Thanks"},
]
VARIABLES = {
    "messages": MESSAGES,
    "tools": None,
    "documents": None,
    "add_generation_prompt": True,
    "bos_token": "<s>",
}
CHATML = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "system" and not loop.first %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
ODDER = """{{ bos_token }}{% set ns = namespace(n=0) %}
{% for m in messages %}
  {% set ns.n = ns.n + 1 %}
  {% if m.role == 'assistant' %}
    {% generation %}{{ m['content'] }}{% endgeneration %}
  {% else %}
    {{ m | tojson }} {{ m.content.split(' ')[-1] | upper }} {{ {'a': [1, 2.5, none]} | tojson(indent=2) }}
  {% endif %}
{% endfor %}
{{ ns.n }} {{ strftime_now('%Y') | length }} {{ tools is none }} {{ undefined_thing is defined }}
"""


@pytest.mark.parametrize("template", [CHATML, ODDER], ids=["chatml", "odder"])
def test_a_template_is_filled_in_as_hugging_face_does(template: str) -> None:
    """Letter by letter."""
    from transformers.utils.chat_template_utils import render_jinja_template

    options: dict[str, Any] = {"chat_template": template, "add_generation_prompt": True, "bos_token": "<s>"}
    rendered: Any = render_jinja_template([MESSAGES], **options)

    assert rendered[0][0] == ChatTemplate(template).render(VARIABLES)


HARMFUL = {
    "endless": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "than 1 s"),
    "a power": ("{{ nine ** (nine ** nine) }}", "than 1 s"),
    "a product": ("{{ 'a' * nine ** 11 }}", "too much memory"),
    "a format": ("{{ '%9999999999d' | format(1) }}", "too much memory"),
    "doubling": ("{% set n = namespace(x='a' * nine) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
                 "{% endfor %}{{ n.x | length }}", "memory|than 1 s"),
    "a long text": ("{{ 'a' * (nine * 2 ** 20) }}", "characters"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "no such thing": ("{{ messages.x.y }}", "no attribute"),
    "a zero": ("{{ 1 / (nine - 9) }}", "ZeroDivisionError"),
    "an escape": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
}  # fmt: skip


@pytest.fixture(scope="module")
def harmful() -> Iterator[ChatTemplate]:
    """Does what it is told to, with a short time limit."""
    cases = "".join(
        "{% if harm == '" + name + "' %}" + text + "{% endif %}" for name, (text, _) in HARMFUL.items()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "LIMIT_S", 1.0)
        yield ChatTemplate(cases + "fine")


@pytest.mark.parametrize("name", HARMFUL)
def test_a_harmful_template_is_refused_and_the_next_conversation_goes_on(
    name: str, harmful: ChatTemplate
) -> None:
    """Whatever it does, the answer is an error of the request; the process is there again."""
    with pytest.raises(AskError, match=HARMFUL[name][1]):
        harmful.render({"harm": name, "messages": [], "nine": 9})
    assert "fine" == harmful.render({"harm": ""})


def test_a_text_that_is_no_template_is_refused() -> None:
    """Each time, with its reason."""
    template = ChatTemplate("{% for %}")
    for _ in range(2):
        with pytest.raises(AskError, match="Expected an expression"):
            template.render({})


def test_a_template_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process has no key of the server, and ends with whoever started it."""
    monkeypatch.setenv("TESSERA_API_KEY", "secret")
    template = ChatTemplate("hello")
    child = template._child

    assert "hello" == template.render({})
    assert b"TESSERA" not in Path(f"/proc/{child.pid}/environ").read_bytes()
    del template
    deadline = time.monotonic() + 30
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.poll() is not None


def test_the_process_of_a_killed_server_ends_itself() -> None:
    """Nobody is left to end it, and its template does not end."""
    forever = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    here, there = multiprocessing.Pipe()
    command = [sys.executable, "-I", templates.__file__, str(there.fileno())]
    with subprocess.Popen(command, pass_fds=(there.fileno(),)) as child:
        here.send_bytes(forever.encode())
        here.send_bytes(b"{}")
        time.sleep(0.5)
        child.send_signal(signal.SIGSTOP)  # the time passes without it
        time.sleep(templates.ALARM_S)
        child.send_signal(signal.SIGCONT)

        assert child.wait(4.0 * templates.ALARM_S) == -signal.SIGALRM


def test_a_process_that_is_killed_from_outside_is_no_error_of_the_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one renders the same conversation."""
    monkeypatch.setattr(templates, "LIMIT_S", 30.0)
    template = ChatTemplate("{{ messages | length }}")
    child = template._child
    child.send_signal(signal.SIGSTOP)
    killer = threading.Timer(0.2, child.kill)
    killer.start()

    assert "4" == template.render(VARIABLES)
    killer.join()
    assert child.wait() == -signal.SIGKILL
