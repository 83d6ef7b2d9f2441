"""The command line: one subcommand per stage, in the order of the flow, artifact in, artifact out.

A user's mistake ends in one line on standard error and exit code 2; an interrupt in exit code 130. Anything
else keeps its traceback, because it is a bug.
"""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import typer

from tessera import __version__
from tessera.cli import (
    advise,
    analyze,
    batch,
    bench,
    calibrate,
    capture,
    chat,
    demo,
    doctor,
    gpus,
    plan,
    profile,
    remote,
    report,
    run,
    serve,
    simulate,
    verify,
)
from tessera.cli.output import UsageError, printed, say
from tessera.cli.serve_options import hint, unknown_option
from tessera.errors import TesseraError

app = typer.Typer(
    name="tessera",
    help="Makes heterogeneous GPUs work as one: kernel-level placement of PyTorch inference.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: tuple[Callable[..., Any], ...] = (
    capture.capture, analyze.analyze, verify.verify, profile.profile, calibrate.calibrate, plan.plan,
    advise.advise, run.run, simulate.simulate, serve.serve, chat.chat, batch.batch, remote.worker,
    report.report, demo.demo, doctor.doctor, gpus.gpus,
)  # fmt: skip
SERVE_VARIABLES = {"auto_envvar_prefix": "TESSERA_SERVE"}
for function in COMMANDS:
    settings = SERVE_VARIABLES if function is serve.serve else {}
    # The whole first paragraph: click would cut it to one line.
    summary = " ".join((function.__doc__ or "").split("\n\n", 1)[0].split())
    app.command(short_help=summary, context_settings=settings)(printed(function))
app.add_typer(bench.app, name="bench")

INTERRUPTED = 130
# Set by the shell when it asks for completions.
COMPLETION = "_TESSERA_COMPLETE"


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"tessera {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", is_eager=True, callback=_show_version
    ),
) -> None:
    """Makes heterogeneous GPUs work as one: kernel-level placement of PyTorch inference."""


def main(argv: Sequence[str] | None = None) -> None:
    sys.exit(_main(argv))


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words and COMPLETION not in os.environ:
        typer.echo(files(__name__).joinpath("first_screen.txt").read_text("utf-8"), nl=False)
        return 0
    return run_app(app, words, "tessera")


def run_app(commands: typer.Typer, words: Sequence[str], name: str) -> int:
    command: Any = typer.main.get_command(commands)
    try:
        code = command.main(args=list(words), prog_name=name, standalone_mode=False)
    except UsageError as error:
        return _complain(_usage(error))
    except TesseraError as error:
        return _complain(str(error))
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else its rest fails again at the end
        place = f"{error.filename}: " if error.filename else ""
        return _complain(f"{place}cannot write: {error.strerror}. Make room, or write to another place.")
    if code == INTERRUPTED:
        _complain("interrupted; no process was left behind")
    return code if isinstance(code, int) else 0


def _complain(message: str) -> int:
    say(f"error: {message}")
    return 2


def _usage(error: Any) -> str:
    message = str(error.format_message())
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    if getattr(error, "option_name", None):
        options = [o for p in context.command.params for o in p.opts if o.startswith("--")]
        message = unknown_option(error.option_name, options)
    elif message.startswith("No such command"):
        word = message.split("'")[1]
        listed = context.command.list_commands(context)
        message = f"unknown command '{word}'; {hint(word, listed)}"
    return f"{message.rstrip('.')}{'' if message.endswith('?') else '.'} See: {context.command_path} --help"
