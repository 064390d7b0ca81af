# SPDX-License-Identifier: Apache-2.0
"""Settings from a Python file, which is read and not run: plain assignments, as the mapping that YAML has of them."""

import ast

from megatron.errors import UsageError


def compose_python(text: str, path: str):
    """The file's assignments as a mapping of PyYAML's nodes; None where there are none.

    Raises UsageError with the line of anything else than `name = value`, a value being a number, text, True, False, None, a
    list of numbers or texts, or a dict of values.
    """
    try:
        statements = ast.parse(text).body
    except SyntaxError as error:
        raise UsageError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    reader = _Reader(path)
    return reader.mapping([reader.assignment(node) for node in statements if not _is_docstring(node)])


class _Reader:
    def __init__(self, path: str):
        import yaml

        self.path, self.yaml = path, yaml

    def assignment(self, node: ast.stmt) -> tuple[str, ast.expr]:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            return node.targets[0].id, node.value
        raise self.refused(node)

    def mapping(self, pairs: list[tuple[str, ast.expr]]):
        if not pairs:
            return None
        nodes = [(self.scalar(name, value.lineno), self.value(value)) for name, value in pairs]
        return self.yaml.MappingNode("", nodes, start_mark=self.mark(pairs[0][1].lineno))

    def value(self, node: ast.expr):
        pairs = _items(node)
        if pairs is not None:
            if not all(isinstance(name, str) for name, _ in pairs):
                raise self.refused(node)
            return self.mapping(pairs)
        try:
            found = ast.literal_eval(node)
        except ValueError:
            raise self.refused(node) from None
        if found is None or isinstance(found, bool):
            return self.scalar({None: "null", True: "true", False: "false"}[found], node.lineno)
        if isinstance(found, (int, float, str)):
            return self.scalar(str(found), node.lineno, quoted=isinstance(found, str))
        if isinstance(found, (list, tuple)) and all(isinstance(one, (int, float, str)) for one in found):
            return self.yaml.SequenceNode("", [self.scalar(str(one), node.lineno) for one in found])
        raise self.refused(node)

    def scalar(self, text: str, line: int, quoted: bool = False):
        return self.yaml.ScalarNode("", text, start_mark=self.mark(line), style='"' if quoted else None)

    def mark(self, line: int):
        return self.yaml.Mark(self.path, 0, line - 1, 0, None, 0)

    def refused(self, node: ast.AST) -> UsageError:
        line = ast.unparse(node).splitlines()[0]
        return UsageError(
            f"{self.path}:{node.lineno}: `{line}` would have to be run, which nothing here does",
            "of Python files plain assignments are read: name = 1, name = [1, 2], name = dict(other=1)",
            "write the value itself; for another suite's file: "
            f"python -m megatron.tools.translate --from colossalai {self.path}",
        )


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _items(node: ast.expr) -> list[tuple[str | None, ast.expr]] | None:
    """(key, value) of `dict(...)` or `{...}`, None for a key that is no text; None of anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return [(one.arg, one.value) for one in node.keywords]
    if isinstance(node, ast.Dict):
        keys = [one.value if isinstance(one, ast.Constant) else None for one in node.keys]
        return list(zip(keys, node.values))
    return None
