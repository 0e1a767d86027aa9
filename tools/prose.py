"""Rules for docstrings, messages and class names of the library, run by `make lint`."""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

OPENING = r"\A\s*(?:What|Which|Who|Why|Where|Whether|In|Of|For|By|How(?! (?:long|m|often)))\b"
BAD = re.compile(OPENING + r"|\b(?i:tells?|told|hears?|heard|anew|whoever)\b")
NEW = re.compile(r"_?[A-Z]\w*|__init__")  # An error, or an option with its help.
Function = ast.FunctionDef | ast.AsyncFunctionDef


def text(value: ast.expr) -> str:
    """Returns the text of a literal or f-string; each value in it, and anything else, is `x`."""
    if isinstance(value, ast.JoinedStr):
        return "".join(map(text, value.values))
    if isinstance(value, ast.BinOp):
        return text(value.left) + text(value.right)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else "x"


def prose(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and rule for docstrings, those of attributes too, and for messages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            for doc in (part.value for part in node.body if isinstance(part, ast.Expr)):
                for word in BAD.findall(text(doc)):
                    yield doc.lineno, f"docstring begins with or says {word}"
        if isinstance(node, ast.Call) and NEW.fullmatch(ast.unparse(node.func).split(".")[-1]):
            for literal in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if (words := len(text(literal).split())) > 25:
                    yield literal.lineno, f"message of {words} words, at most 25"


def twice(classes: dict[ast.ClassDef, Path]) -> Iterator[tuple[Path, int, str]]:
    """Yields classes of one name, and methods with the Raises section that their base's has."""
    names = Counter(node.name for node in classes)
    methods = [(c, m) for c in classes for m in c.body if isinstance(m, Function)]
    raising = {(c.name, m.name) for c, m in methods if "Raises:" in (ast.get_docstring(m) or "")}
    yield from ((classes[c], c.lineno, f"two of {c.name}") for c in classes if names[c.name] > 1)
    for node, method in methods:
        bases = {(re.sub(r"\[.*|.*\.", "", ast.unparse(b)), method.name) for b in node.bases}
        if (node.name, method.name) in raising and raising & bases:
            yield classes[node], method.lineno, "its base says what it raises"


tops = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
paths = {path for top in tops for path in Path(top).rglob("*.py")} - {*Path("distca/v1").iterdir()}
trees = {path: ast.parse(path.read_text()) for path in paths}
broken = [(path, *found) for path, tree in trees.items() for found in prose(tree)]
broken += twice({c: p for p, t in trees.items() for c in t.body if isinstance(c, ast.ClassDef)})
sys.exit("\n".join(f"{path}:{line}: {rule}" for path, line, rule in sorted(broken)) or 0)
