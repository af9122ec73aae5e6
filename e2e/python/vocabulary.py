"""Prints the words that the openai package knows: the codes of errors, the
events of streams and the service tiers, one a line. Its argument is the folder
of a package; without one it is the one that is installed."""

import ast
import importlib.util
import pathlib
import sys

if len(sys.argv) > 1:
    package = pathlib.Path(sys.argv[1])
else:
    package = pathlib.Path(importlib.util.find_spec("openai").origin).parent
types = package / "types"


def texts(annotation):
    """The texts of all Literals in an annotation."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal":
            for text in ast.walk(node.slice):
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield text.value


def streams(path, name):
    """Whether a class is an event of a stream over HTTP."""
    folder = path.relative_to(types).parts[0]
    return name.endswith("Event") and (folder in ("responses", "audio") or folder.startswith("image_"))


words = set()
for path in sorted(types.rglob("*.py")):
    if path.stem.endswith("_param") or path.stem.endswith("_params"):
        fields = {"service_tier": "tier"}
    else:
        fields = {"service_tier": "tier", "code": "code"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "").endswith("ErrorCode") and "oauth" not in path.stem and node.value:
            words |= {f"code {text}" for text in texts(node.value)}
        if not isinstance(node, ast.ClassDef):
            continue
        for field in node.body:
            if not isinstance(field, ast.AnnAssign):
                continue
            name = getattr(field.target, "id", "")
            if name in fields:
                words |= {f"{fields[name]} {text}" for text in texts(field.annotation)}
            elif name == "type" and streams(path, node.name):
                words |= {f"event {text}" for text in texts(field.annotation)}
if len(words) < 50:
    sys.exit(f"only {len(words)} words in {types}: the package has another form")
print("\n".join(sorted(words)))
