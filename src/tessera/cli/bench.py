"""tessera bench: measures what is built: a running server, the published evaluation."""

import typer

from tessera.cli import bench_paper, bench_serve

app = typer.Typer(
    help="Measure a running server, or make the published evaluation again.",
    no_args_is_help=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(bench_serve.serve)
app.command("paper")(bench_paper.paper)
