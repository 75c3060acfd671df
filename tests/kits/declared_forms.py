"""The functional forms in ``pipes/forms.py``, made from the constructors; run as a program it writes the file anew."""

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from tests.kits.forms import functional_forms
from torchdata_wds.pipes import forms

FILE = Path(inspect.getfile(forms))
WIDTH = 120

#: Types of the constructors that have a short name in the file.
SHORT_TYPES = {
    "Mapping[str, Mapping[str, Any]] | None": "StorageOptions",
    "str | Mapping[str, str] | storage.RewriteRules | None": "Rewrite",
}


def declared(text: str) -> dict[str, ast.FunctionDef]:
    """The forms of the package that the file declares, by name."""
    (pipe,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    (block,) = [node for node in pipe.body if isinstance(node, ast.If)]
    return {
        node.name: node for node in block.body if isinstance(node, ast.FunctionDef) and node.name in functional_forms
    }


def arguments_of(cls: Any) -> ast.arguments:
    """The arguments of a form: those of the constructor after the source; defaults that are names become ``...``."""
    (constructor,) = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__))).body
    assert isinstance(constructor, ast.FunctionDef)
    arguments = constructor.args
    del (arguments.posonlyargs if len(arguments.posonlyargs) > 1 else arguments.args)[1]
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg) and argument.annotation is not None:
            written = ast.unparse(argument.annotation)
            argument.annotation = ast.Name(SHORT_TYPES.get(written, written))
    for values in (arguments.defaults, arguments.kw_defaults):
        values[:] = [ast.Constant(...) if isinstance(value, ast.Name) else value for value in values]
    return arguments


def written(node: ast.FunctionDef) -> str:
    """A declaration in as few lines as it fits in; lines break between arguments."""
    returns, indent = ast.unparse(node.returns or ast.Constant(None)), " " * 8
    arguments = re.split(r", (?=/|\*|\w+:)", ast.unparse(node.args).replace("'", '"').replace("=", " = "))
    line = f"{indent}def {node.name}({', '.join(arguments)}) -> {returns}: ..."
    if len(line) <= WIDTH:
        return line + "\n"
    joined = ", ".join(argument.replace(" ", "\0") for argument in arguments)
    filled = textwrap.fill(joined, WIDTH, initial_indent=indent + "    ", subsequent_indent=indent + "    ")
    return f"{indent}def {node.name}(\n{filled}\n{indent}) -> {returns}: ...\n".replace("\0", " ")


def main() -> None:
    """Writes the arguments of all forms into the file; what each yields stays as it is written there."""
    lines = FILE.read_text().splitlines(keepends=True)
    for name, node in sorted(declared("".join(lines)).items(), key=lambda item: -item[1].lineno):
        node.args = arguments_of(functional_forms[name])
        lines[node.lineno - 1 : node.end_lineno] = [written(node)]
    FILE.write_text("".join(lines))


if __name__ == "__main__":
    main()
