"""What a notebook reaches: modules of osprey by their import statements (nested ones too), and literal names."""

import ast
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def imports(tree: ast.AST) -> set[str]:
    """The osprey modules that a piece of code imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "osprey":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("osprey."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("osprey.")}
    return found


def code(notebook: Path) -> str:
    cells = json.loads(notebook.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def reached(notebook: Path, root: Path = ROOT) -> set[str]:
    """All osprey modules that running the notebook can import, itself or through others."""
    waiting, seen = imports(ast.parse(code(notebook))), set()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        waiting |= imports(ast.parse((root / "osprey" / f"{module}.py").read_text())) - seen
    return seen
