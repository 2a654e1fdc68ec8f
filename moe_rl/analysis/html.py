"""Parts of a page: escaped, self-contained, readable without a script."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c }
body { max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.7rem; margin-bottom: .3rem } h2 { margin-top: 3rem; border-bottom: 2px solid #ddd }
h3 { margin-top: 2.2rem } p, figcaption { max-width: 54rem } figure { margin: 1.2rem 0 2rem }
figure img { max-width: 100%; height: auto } figcaption, .note, small { color: #555 }
figcaption, .note { font-size: .9rem } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .88rem; margin: .6rem 0 }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #e4e4e4; text-align: left; vertical-align: top }
thead th { border-bottom: 2px solid #999; white-space: nowrap }
table.equal { table-layout: fixed; width: 100% } td small { display: block; white-space: nowrap }
code, pre { font-size: .85rem; background: #f4f4f4 }
pre { padding: .7rem; overflow-x: auto } .failed, .collapsed { color: #a40000 } .unfinished { color: #8a5a00 }
"""


def document(title: str, body: str) -> str:
    """The whole page around a body of HTML."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
{body}
</body></html>
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], layout: str = "") -> str:
    """A table of cells that are HTML already; the first cell of a row heads it."""
    top = f"<thead><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr></thead>" if head else ""
    lines = (f"<tr><th>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{layout}">{top}<tbody>{"".join(lines)}</tbody></table></div>'


def embedded(title: str, caption: str, file: Path) -> str:
    """A PNG file inside the page, under a heading."""
    image = base64.b64encode(file.read_bytes()).decode("ascii")
    return (
        f'<h3>{escape(title)}</h3><figure><img alt="{escape(title)}" '
        f'src="data:image/png;base64,{image}"><figcaption>{escape(caption)}</figcaption></figure>'
    )


def distinct(values: Iterable[str]) -> str:
    """Each value once, in the order they come."""
    return ", ".join(dict.fromkeys(values))


def commit(environment: dict[str, Any]) -> str:
    """The commit that a run was made from."""
    found = environment.get("git_commit")
    if not found:
        return "not recorded"
    return f"{found[:12]}{' with uncommitted changes' if environment.get('git_dirty') else ''}"


def machine(environment: dict[str, Any]) -> str:
    """What a run ran on, in a line."""
    return (
        f"{environment.get('platform', 'platform not recorded')}, {environment.get('cpu_count', '?')} CPUs, "
        f"torch threads {environment.get('torch_threads') or 'not set'}"
    )
