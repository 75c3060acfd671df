"""What all web pages of the program share: a head that forbids scripts and remote content, colours, and escaping."""

from html import escape

from torchdata_wds.cli.terminal import printable

# The page itself forbids scripts and remote content, in case a mistake here lets one through.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #141414; --faint: #666; --line: #ddd; --damaged: #960000 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #ececec; --faint: #a3a8ae; --line: #373b41; --damaged: #ff8a80 }
}
body { margin: 1.5em; font: 14px/1.4 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
h1 { font-size: 1.2em; overflow-wrap: anywhere }
table { border-collapse: collapse; font-size: .9em } td, th { padding: .1em .8em .1em 0; vertical-align: top }
th { text-align: left } .damaged { color: var(--damaged) }
"""
PAGE_END = "</body>\n</html>\n"


def page_start(title: str, style: str) -> str:
    """Returns the page up to its heading; `style` is its own part of the style sheet."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        f"<title>{page_text(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n"
        f"<body>\n<h1>{page_text(title)}</h1>\n"
    )


def page_text(text: str) -> str:
    """Escapes text for any place in a page, including attributes."""
    return escape(printable(text), quote=True)
