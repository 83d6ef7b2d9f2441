"""Makes the pictures of the README from a real run of the demo.

    python scripts/picture.py [--browser chromium]

docs/demo.svg is what `tessera demo` printed, recorded by its own console. docs/timeline.png is the top of the
page it wrote, photographed by a browser without a window; without one of that name it is left as it is.
Every figure in both comes from the run; running this again makes them again.
"""

import argparse
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

from tessera.cli import _main, output

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("tessera-demo")
WIDTH = 108  # columns; the widest table of the demo takes 97
PAGE_PIXELS = (1060, 1500)

# Rich's own format loads a font from the network, which GitHub's image proxy refuses; any monospaced font
# will do, because every run of text carries its length.
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> int:
    """Runs the demo once and writes what it showed."""
    parser = argparse.ArgumentParser(description="Make the README's pictures from a run of the demo.")
    parser.add_argument("--browser", default="chromium", help="what photographs the page")
    browser = shutil.which(parser.parse_args().browser)
    with chdir(ROOT):
        code = draw_terminal(Path("docs/demo.svg"))
        if code == 0 and browser:
            photograph(browser, FOLDER / "report.html", Path("docs/timeline.png"))
        elif code == 0:
            print("no browser of that name: docs/timeline.png is left as it is", file=sys.stderr)
    return code


def draw_terminal(path: Path) -> int:
    """Runs `tessera demo` on a recording console; the exit code of the demo."""
    screen = Console(record=True, width=WIDTH, highlight=False, force_terminal=True, color_system="truecolor")
    screen.print("$ tessera demo", style="bold")
    with mock.patch.object(output, "console", return_value=screen):
        code = _main(["demo", "-o", str(FOLDER)])
    if code == 0:
        screen.save_svg(
            str(path), title="tessera demo", theme=DIMMED_MONOKAI, code_format=SVG, unique_id="demo"
        )
    return code


def photograph(browser: str, page: Path, path: Path) -> None:
    """The top of a page as a picture."""
    size = ",".join(str(n) for n in PAGE_PIXELS)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={size}"]
    command = [browser, *options, f"--screenshot={path.resolve()}", page.resolve().as_uri()]
    subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
