# SPDX-License-Identifier: Apache-2.0
"""Read settings from a Python file without running it: assignments of values, arithmetic, and earlier names."""

import ast
import operator
from dataclasses import dataclass, field

from megatron.errors import UsageError, numbered

ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
LARGEST = 2**64  # computed numbers stay below this: 9**9**9 is left as written


@dataclass
class PythonFile:
    """The statements of a Python file. assigned: names and values, with earlier names and arithmetic evaluated; others: all
    other statements; used: names that another line refers to."""

    assigned: list[tuple[str, ast.expr]] = field(default_factory=list)
    others: list[ast.stmt] = field(default_factory=list)
    used: set[str] = field(default_factory=set)


def read_assignments(text: str, path: str) -> PythonFile:
    """Parse the statements of a Python file. Raises UsageError for a syntax error."""
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise UsageError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    except ValueError as error:  # a zero byte
        raise UsageError(f"{path}: not Python: {error}") from None
    result = PythonFile()
    plain = _Plain(result.used)
    for node in body:
        [target, *others] = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        is_plain = isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and not others
        if is_plain and isinstance(target, ast.Name):
            plain.names[target.id] = plain.visit(node.value)
            result.assigned.append((target.id, plain.names[target.id]))
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # a docstring
            result.others.append(node)
    return result


class _Plain(ast.NodeTransformer):
    """Replaces names by their values, and arithmetic by its result.

    >>> ast.unparse(_Plain(set()).visit(ast.parse("4 * 2**5 + f(2 - 3)", mode="eval")))
    '128 + f(-1)'
    """

    def __init__(self, used: set[str]):
        self.names: dict[str, ast.expr] = {}
        self.used = used

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.names.get(node.id, node)
        if value is not node:
            self.used.add(node.id)
        return ast.copy_location(ast.Constant(value.value), node) if isinstance(value, ast.Constant) else value

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        left, right, compute = _number(node.left), _number(node.right), ARITHMETIC.get(type(node.op))
        if left is None or right is None or compute is None or isinstance(node.op, ast.Pow) and abs(right) > 64:
            return node
        try:
            result = compute(left, right)
        except ArithmeticError:
            return node
        small = isinstance(result, (int, float)) and abs(result) < LARGEST
        return ast.copy_location(ast.Constant(result), node) if small else node


def _number(node: ast.expr):
    """The value of a number, with or without a sign; None for anything else."""
    value = _literal(node)
    return value if type(value) in (int, float) else None


def _literal(node: ast.expr):
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):  # not a literal; {[1]: 2}
        return ...


def items(node: ast.expr) -> list[tuple[str | None, ast.expr]] | None:
    """The (key, value) pairs of `dict(...)` or `{...}`, with None for a key that is not text; None for anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return [(one.arg, one.value) for one in node.keywords]
    if isinstance(node, ast.Dict):
        keys = [getattr(one, "value", None) for one in node.keys]
        return [(key if isinstance(key, str) else None, value) for key, value in zip(keys, node.values)]
    return None


def compose_python(text: str, path: str):
    """Parse the file's assignments to a mapping of PyYAML's nodes; None if there are none.

    Its `helpers` are names that other lines use, which need not be settings.
    Raises UsageError with the lines of anything but `name = value`, where a value is a number, text, True, False, None, a
    list of numbers or texts, or a dict of values.
    """
    parsed, reader = read_assignments(text, path), _Nodes(path)
    root = reader.mapping(parsed.assigned)
    if refused := [*reader.refused, *parsed.others]:
        lines = [f"{path}:{node.lineno}: `{ast.unparse(node).splitlines()[0]}`" for node in refused]
        would = "would have to be run, but settings files are only read"
        raise UsageError(
            f"{lines[0]} {would}" if len(lines) == 1 else f"{len(lines)} lines {would}:{numbered(lines)}",
            "a Python file may have plain assignments: name = 1, name = [1, 2], name = dict(x=2**5), name = other",
            "write the value itself; for another suite's file: "
            f"python -m megatron.tools.translate --from colossalai {path}",
        )
    if root is not None:
        root.helpers = {name.lstrip("_") for name in parsed.used}
    return root


class _Nodes:
    def __init__(self, path: str):
        import yaml

        self.path, self.yaml, self.refused = path, yaml, []

    def mapping(self, pairs: list[tuple[str, ast.expr]]):
        if not pairs:
            return None
        nodes = [(self.scalar(name, value.lineno), self.value(value)) for name, value in pairs]
        return self.yaml.MappingNode("", nodes, start_mark=self.mark(pairs[0][1].lineno))

    def value(self, node: ast.expr):
        pairs = items(node)
        if pairs is not None and all(name is not None for name, _ in pairs):
            return self.mapping(pairs)
        literal = _literal(node)
        if literal is None or isinstance(literal, bool):
            return self.scalar({None: "null", True: "true", False: "false"}[literal], node.lineno)
        if isinstance(literal, (int, float, str)):
            return self.scalar(str(literal), node.lineno, quoted=isinstance(literal, str))
        if isinstance(literal, (list, tuple)) and all(isinstance(one, (int, float, str)) for one in literal):
            return self.yaml.SequenceNode("", [self.scalar(str(one), node.lineno) for one in literal])
        self.refused.append(node)
        return self.scalar("", node.lineno)

    def scalar(self, text: str, line: int, quoted: bool = False):
        return self.yaml.ScalarNode("", text, start_mark=self.mark(line), style='"' if quoted else None)

    def mark(self, line: int):
        return self.yaml.Mark(self.path, 0, line - 1, 0, None, 0)
