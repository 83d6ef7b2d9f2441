"""--launches: whether a model's steps are planned as Inductor compiles them, or as the model calls them."""

from typing import Annotated

import typer

from tessera.errors import UnknownName

HELP = "Of a model: compiled, as people serve it, or eager. Compiled ones that are not known take a minute."
Launches = Annotated[str, typer.Option(help=HELP, show_default="compiled where they are known")]


def checked_launches(word: str) -> str:
    """The word, if it is one."""
    if word not in ("", "compiled", "eager"):
        raise UnknownName("kind of launches", word, ["compiled", "eager"])
    return word
