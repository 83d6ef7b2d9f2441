"""How commands talk: one record on standard output, progress on standard error.

A command is a function that returns one frozen record; `printed` makes it a command of typer with `--json`.

- A command never prints to standard output and never declares `--json`.
- A command that goes on after its record (a service) is a generator and yields it; then the JSON is one line.
  Texts that it yields are for people only (the words of an answer).
- Types in records must be importable without torch.
"""

import functools
import inspect
import io
import math
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Generic, Self, TypeVar

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

from tessera.cli.render import parts_of
from tessera.errors import TesseraError, check_known
from tessera.ir.timeline import HIDDEN, shown

__all__ = [
    "FILE", "HIDDEN", "PER_TOKEN", "TO_FIRST", "Illustrated", "JsonOption", "Record", "UsageError",
    "arguments_of", "console", "excludes", "info", "limit_ms", "needs", "only_if", "option", "positive",
    "print_record", "printed", "progress", "say", "shown", "written",
]  # fmt: skip

# Seconds before the first plain line; between two lines of a counted job.
QUIET_S, PAUSE_S = 2.0, 10.0
FILE = {"exists": True, "dir_okay": False}
# Width of a record in a notebook.
PAGE_COLUMNS = 100
ONLY_NAMED, NO_DEFAULT = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
# Key of the option in the metadata of a field.
OPTION = "option"
# In click's context: (parameter, test, why) of options that are set.
CONDITIONS = "tessera.conditions"
PER_TOKEN = "per output token: median over the requests of every group"
TO_FIRST = "to the first token: median over requests"
# Base class of usage errors: some versions of typer have a click of their own.
UsageError: Any = typer.BadParameter.__mro__[1]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a command; notebooks show it as the terminal does."""

    @classmethod
    def of(cls, *sources: object, **values: Any) -> Self:
        """`values`, and fields of the same name in the first source that has them."""
        for source in sources:
            names = (name for name in cls.__struct_fields__ if name not in values and hasattr(source, name))
            values |= {name: getattr(source, name) for name in names}
        return cls(**values)

    def problem(self) -> TesseraError | None:
        """The error to raise after the record is printed."""
        return None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from parts_of(self)

    def _repr_html_(self) -> str:
        screen = Console(highlight=False, record=True, file=io.StringIO(), width=PAGE_COLUMNS)
        screen.print(self)
        return screen.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def info(help: str, *names: str, shown: str | bool = True, **more: Any) -> Any:
    """Option in an annotated type: of several commands, or without a default."""
    return typer.Option(*names, help=help, show_default=shown, **more)


def option(default: Any, help: str, *names: str, **more: Any) -> Any:
    """The default of a command's parameter, or of a field of its options."""
    return field(default=default, metadata={OPTION: info(help, *names, **more)})


JsonOption = Annotated[bool, info("Print one JSON document instead of tables.", "--json")]
R_co = TypeVar("R_co", bound=Record, covariant=True)


@dataclass(frozen=True)
class Illustrated(Generic[R_co]):
    """A record, and what is printed for people before it."""

    record: R_co
    pictures: tuple[RenderableType, ...]


def printed(function: Callable[..., Any]) -> Callable[..., None]:
    """A parameter that is a dataclass stands for its fields, one option each."""
    parameters: list[inspect.Parameter] = []
    configs: dict[str, tuple[Any, list[str]]] = {}
    for parameter in inspect.signature(function).parameters.values():
        config: Any = parameter.annotation
        if is_dataclass(config) and isinstance(config, type):
            configs[parameter.name] = config, [one.name for one in fields(config)]
            parameters += [_parameter(one.name, one.type, one) for one in fields(config)]
        else:
            parameters.append(_parameter(parameter.name, config, parameter.default))

    @functools.wraps(function)
    def command(*, ctx: typer.Context, as_json: bool, **kwargs: Any) -> None:
        _check(ctx)
        for name, (config, names) in configs.items():
            kwargs[name] = config(**{field: kwargs.pop(field) for field in names})
        started_s = time.perf_counter()
        result: Any = function(**kwargs)
        if isinstance(result, Generator):
            for record in result:
                if not isinstance(record, str):
                    print_record(record, as_json, is_line=True)
                elif not as_json:
                    typer.echo(record, nl=False)
        elif result is not None:
            print_record(result, as_json, seconds=time.perf_counter() - started_s)

    parameters += [_parameter("as_json", JsonOption, False), _parameter("ctx", typer.Context, NO_DEFAULT)]
    command.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """`default` may be a dataclass's field, or the field that `option` makes."""
    if isinstance(default, Field):
        kind = Annotated[kind, default.metadata[OPTION]] if default.metadata else kind
        default = default.default
    return inspect.Parameter(name, ONLY_NAMED, default=default, annotation=kind)


def arguments_of(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a command from `values`, with the types, limits and conditions of its command line; None:
    the default.
    """
    arguments: dict[str, Any] = {}

    @functools.wraps(function)
    def keep(**kwargs: Any) -> None:
        arguments.update(kwargs)

    app = typer.Typer(add_completion=False)
    app.command(function.__name__)(printed(keep))
    command: Any = typer.main.get_command(app)
    parameters = {param.name: param for param in command.params if param.name != "as_json"}
    words = {}
    for name, value in values.items():
        check_known("option", name, parameters)
        if value is not None:
            words[name] = _words(value, parameters[name].multiple or parameters[name].nargs != 1)
    try:
        with command.context_class(command, info_name=function.__name__) as context:
            for param in sorted(command.params, key=lambda param: not param.is_eager):
                param.handle_parse_result(context, words, [])
            command.invoke(context)
    except UsageError as error:
        raise TesseraError(str(error.format_message())) from None
    return arguments


def _words(value: Any, is_list: bool) -> str | list[str]:
    if not is_list:
        return str(value)
    return [str(item) for item in (value if isinstance(value, list | tuple) else [value])]


def written(what: str, default: str) -> Any:
    return option(None, f"The {what} to write.", "-o", "--output", shown=default)


def limit_ms(of: str, condition: Callable[..., Any] | None = None) -> Any:
    def checked(ctx: typer.Context, param: typer.CallbackParam, value: float | None) -> float | None:
        limit = positive(param, value)
        return limit if condition is None else condition(ctx, param, limit)

    return option(None, f"Limit of milliseconds {of}.", shown="no limit", callback=checked)


def print_record(
    result: "Record | Illustrated[Record]", as_json: bool, is_line: bool = False, seconds: float = 0.0
) -> None:
    """`seconds`: time of the command, for a record with that field."""
    record, pictures = (result.record, result.pictures) if isinstance(result, Illustrated) else (result, ())
    if seconds and "seconds" in record.__struct_fields__:
        record = msgspec.structs.replace(record, seconds=round(seconds, 3))
    if as_json:
        document = msgspec.json.encode(record, enc_hook=str)
        typer.echo((document if is_line else msgspec.json.format(document, indent=2)).decode())
    else:
        out = console()
        for part in (*pictures, record):
            out.print(part)
    if problem := record.problem():
        raise problem


def only_if(test: Callable[[dict[str, Any]], Any], why: str) -> Callable[..., Any]:
    """Callback of an option that makes sense only if all parameters pass a test."""

    def note(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
        source = ctx.get_parameter_source(param.name or "")
        if source and source.name != "DEFAULT":
            ctx.meta.setdefault(CONDITIONS, []).append((param, test, why))
        return value

    return note


def _check(ctx: typer.Context) -> None:
    """When all values are known: words, variables, those of a configuration file, or Python's."""
    for param, test, why in ctx.meta.get(CONDITIONS, ()):
        if not test(ctx.params):
            raise TesseraError(why, "Leave it out, or see --help.", option_name(param))
    for param in ctx.command.params:
        value = ctx.params.get(param.name)
        if isinstance(value, float) and not math.isfinite(value):
            message = f"must be a finite number, got {value:g}"
            raise TesseraError(message, "Leave it out, or see --help.", param.opts[0])


def needs(other: str) -> Callable[..., Any]:
    """Callback of an option that makes sense only with another."""
    return only_if(lambda params: params.get(other), f"needs --{other.replace('_', '-')}")


def excludes(other: str, why: str) -> Callable[..., Any]:
    """Callback of an option that makes no sense with another."""
    return only_if(lambda params: not params.get(other), why)


def option_name(param: typer.CallbackParam) -> str:
    return next((word for word in param.opts if word.startswith("--")), param.opts[0])


def positive(param: typer.CallbackParam, value: float | None) -> float | None:
    if value is not None and value <= 0:
        raise TesseraError(f"must be above 0, got {value:g}", "See --help.", option_name(param))
    return value


def console() -> Console:
    return Console(highlight=False)


def say(text: str) -> None:
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """The yielded function sets the text of the bar and advances it by one.

    Without a terminal: plain lines after the first seconds; for a counted job, the latest now and then.
    """
    screen = Console(stderr=True)
    if not screen.is_terminal:
        lines = _Lines(label, total)
        try:
            yield lines.advance
        finally:
            lines.end()
        return
    columns = SpinnerColumn(), *Progress.get_default_columns()[:-1], TimeElapsedColumn()
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(label, total=total)

        def advance(what: str) -> None:
            bar.update(task, description=what, advance=1)

        yield advance


class _Lines:
    def __init__(self, label: str, total: int | None) -> None:
        self._total, self._num_done, self._next_s = total, 0, 0.0
        self._what, self._said = label, ""
        self._lock = threading.Lock()
        self._is_late = False
        self._timer = threading.Timer(QUIET_S, self._begin)
        self._timer.daemon = True
        self._timer.start() if QUIET_S else self._begin()

    def advance(self, what: str) -> None:
        with self._lock:
            self._num_done += 1
            self._what = what
            self._say()

    def end(self) -> None:
        self._timer.cancel()

    def _begin(self) -> None:
        with self._lock:
            self._is_late = True
            self._say()

    def _say(self) -> None:
        now_s = time.monotonic()
        is_soon = self._total is not None and now_s < self._next_s
        if not self._is_late or self._what == self._said or is_soon:
            return
        self._said, self._next_s = self._what, now_s + PAUSE_S
        counted = "" if self._total is None else f" ({self._num_done} of {self._total})"
        print(f"tessera: {self._what}{counted}", file=sys.stderr, flush=True)
