"""Conditions over columns, such as `subject == 'A' and quality > 0.5`: parsed, checked, and never executed as Python.

The grammar is a part of Python's: names of columns, numbers, text, `True`, `False`, `None`, comparisons, `in` a list,
`and`, `or`, `not`, and the arithmetic `+ - * / // %`. `column("my label")` names a column that is no Python name.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import OptionError

__all__ = ["Condition", "parse_condition"]

_MAX_CHARACTERS = 10_000

_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SIGNS: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that was checked: which columns it needs, and which items fulfil it."""

    text: str
    columns: tuple[str, ...]
    """Names of the columns, in the order of the text."""

    _tree: ast.expr

    @property
    def compared_names(self) -> list[str]:
        """Names that a value is compared with, as in `subject == A`: perhaps text without its quotes."""
        nodes = [node for node in ast.walk(self._tree) if isinstance(node, ast.Compare)]
        return [right.id for node in nodes for right in node.comparators if isinstance(right, ast.Name)]

    def evaluate(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """Return which items fulfil the condition; `columns` has an array for each of the names.

        A value that is missing (None, or NaN among numbers) fulfils `!= value` and `not in`, and no other comparison
        but `== None`.
        """
        if all(not len(column) for column in columns.values()):
            return np.zeros(0, np.bool_)  # of no items, what they hold is not known
        try:
            with np.errstate(all="ignore"):
                found = self._evaluate(self._tree, columns)
        except OptionError:
            raise
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise OptionError(f"Could not evaluate the condition {self.text!r}: {error}.") from error
        return self._as_mask(found, self._tree)

    def _evaluate(self, node: ast.expr, columns: Mapping[str, NDArray[Any]]) -> Any:
        name = _column_name(node)
        if name is not None or isinstance(node, ast.Constant):
            return node.value if isinstance(node, ast.Constant) else columns[name or ""]
        if isinstance(node, ast.BoolOp):
            masks = [self._as_mask(self._evaluate(each, columns), each) for each in node.values]
            return reduce(np.logical_and if isinstance(node.op, ast.And) else np.logical_or, masks)
        if isinstance(node, ast.UnaryOp):
            value = self._evaluate(node.operand, columns)
            if isinstance(node.op, ast.Not):
                return np.logical_not(self._as_mask(value, node.operand))
            return _SIGNS[type(node.op)](self._as_numbers(value, node.operand))
        if isinstance(node, ast.BinOp):
            left, right = (self._as_numbers(self._evaluate(one, columns), one) for one in (node.left, node.right))
            return _ARITHMETIC[type(node.op)](left, right)
        assert isinstance(node, ast.Compare), "parse_condition accepts no other nodes"
        return self._compare(node, columns)

    def _compare(self, node: ast.Compare, columns: Mapping[str, NDArray[Any]]) -> Any:
        masks = []
        left = node.left
        for compare, right in zip(node.ops, node.comparators, strict=True):
            value = self._evaluate(left, columns)
            if isinstance(compare, ast.In | ast.NotIn):
                among = _is_among(value, [_read_constant(each) for each in right.elts])  # type: ignore[attr-defined]  # checked
                masks.append(~among if isinstance(compare, ast.NotIn) else among)
            else:
                masks.append(self._compare_pair(_COMPARE[type(compare)], value, self._evaluate(right, columns), node))
            left = right
        return reduce(np.logical_and, masks)

    def _compare_pair(self, compare: Callable[[Any, Any], Any], left: Any, right: Any, node: ast.expr) -> Any:
        is_equality = compare in (operator.eq, operator.ne)
        if left is None or right is None:
            other = right if left is None else left
            missing = _is_missing(other) if isinstance(other, np.ndarray) else other is None
            if not is_equality:
                raise OptionError(f"None can only be compared with == and !=, got {self._show(node)!r}.")
            return missing if compare is operator.eq else np.logical_not(missing)
        left, right = _read_date(left, right), _read_date(right, left)
        kinds = {kind for kind in (_kind(left), _kind(right)) if kind != "mixed"}
        if len(kinds) > 1:
            raise OptionError(
                f"Only numbers are compared with numbers, and text with text: {self._show(node)!r} compares "
                f"{_kind(left)} with {_kind(right)}. Write text in quotes, and numbers without."
            )
        objects = [one for one in (left, right) if isinstance(one, np.ndarray) and one.dtype.hasobject]
        if is_equality or not objects:
            return compare(left, right)
        # The order of None and text is not defined: only what is there is compared.
        there = np.logical_and.reduce([~_is_missing(one) for one in objects])
        found = np.zeros(there.shape, np.bool_)
        left, right = (one[there] if isinstance(one, np.ndarray) and one.ndim else one for one in (left, right))
        found[there] = compare(left, right)
        return found

    def _as_mask(self, found: Any, node: ast.expr) -> NDArray[np.bool_]:
        if isinstance(found, bool | np.bool_) or (isinstance(found, np.ndarray) and found.dtype == np.bool_):
            return np.asarray(found)
        raise OptionError(
            f"A condition must be true or false for each item, but {self._show(node)!r} is not. Compare a column with "
            f"a value, such as {self.columns[0]} == 1."
        )

    def _as_numbers(self, value: Any, node: ast.expr) -> Any:
        if _kind(value) == "numbers":
            # As Python counts, not as a byte does: 200 + 100 is 300.
            return value.astype(np.int64) if isinstance(value, np.ndarray) and value.dtype.kind in "biu" else value
        raise OptionError(f"Arithmetic needs numbers, but {self._show(node)!r} holds {_kind(value)}.")

    def _show(self, node: ast.expr) -> str:
        return ast.get_source_segment(self.text, node) or self.text


def parse_condition(text: str) -> Condition:
    """Return the condition of a text; raise OptionError if it has anything but the grammar above.

    Examples
    --------
    >>> condition = parse_condition("subject in ('A', 'B') and quality > 0.5")
    >>> condition.columns
    ('subject', 'quality')
    >>> columns = {"subject": np.array(["A", "B", "C"], object), "quality": np.array([0.2, 0.9, 0.9])}
    >>> condition.evaluate(columns).tolist()
    [False, True, False]
    """
    if len(text) > _MAX_CHARACTERS:
        raise OptionError(f"A condition must have at most {_MAX_CHARACTERS:,} characters, got {len(text):,}.")
    stripped = text.strip()
    try:
        tree = ast.parse(stripped, mode="eval").body
        names = list(dict.fromkeys(_find_columns(tree, stripped)))
    except OptionError:  # says what is wrong with which part
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = str(error)
        if isinstance(error, SyntaxError):
            reason = f"{error.msg.rstrip('.')}. Compare with ==, and join by and, or, not"
            if "`" in text:
                reason += "; a name that is none of Python is column('my label')"
        raise OptionError(
            f"A condition must be an expression such as subject == 'A' and quality > 0.5, got {text!r}: {reason}."
        ) from error
    if not names:
        raise OptionError(f"A condition must name at least one column, got {text!r}.")
    return Condition(stripped, tuple(names), tree)


def _find_columns(node: ast.expr, text: str) -> list[str]:
    """Return the columns of an expression; raise OptionError if it has what conditions may not have."""
    name = _column_name(node)
    if name is not None:
        return [name]
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return []
    if isinstance(node, ast.BoolOp):
        return [name for each in node.values for name in _find_columns(each, text)]
    if isinstance(node, ast.UnaryOp) and (isinstance(node.op, ast.Not) or type(node.op) in _SIGNS):
        return _find_columns(node.operand, text)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _find_columns(node.left, text) + _find_columns(node.right, text)
    if isinstance(node, ast.Compare):
        names = _find_columns(node.left, text)
        for compare, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(compare, ast.In | ast.NotIn) and _is_list(right):
                continue
            if type(compare) not in _COMPARE:
                break
            names += _find_columns(right, text)
        else:
            return names
        if isinstance(compare, ast.Is | ast.IsNot):
            raise OptionError(f"Missing values are found by == None and != None, not by `is`, got {text!r}.")
        if isinstance(compare, ast.In | ast.NotIn):
            raise OptionError(f"`in` needs a list of values, such as label in (1, 2), got {text!r}.")
    shown = ast.get_source_segment(text, node) or text
    raise OptionError(
        f"A condition must consist of columns, values, comparisons, `in` a list, and, or, not, + - * / // %; "
        f"{shown!r} in {text!r} is something else. Use a function of columns for more."
    )


def _column_name(node: ast.expr) -> str | None:
    """Return the column that a node names: `a`, `a.b` or `column("any name")`; None if it is something else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _column_name(node.value)
        return None if inner is None else f"{inner}.{node.attr}"
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "column"
    if is_call and len(node.args) == 1 and not node.keywords:  # type: ignore[attr-defined]  # is_call checks it
        name = node.args[0]  # type: ignore[attr-defined]  # is_call checks it
        return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None
    return None


def _is_list(node: ast.expr) -> bool:
    if not isinstance(node, ast.Tuple | ast.List | ast.Set):
        return False
    values = [each.operand if isinstance(each, ast.UnaryOp) else each for each in node.elts]
    return all(isinstance(value, ast.Constant) for value in values)


def _read_constant(node: ast.expr) -> Any:
    return ast.literal_eval(node)


def _is_among(value: Any, wanted: list[Any]) -> NDArray[np.bool_]:
    if not isinstance(value, np.ndarray):
        raise OptionError(f"`in` needs a column on its left, got {value!r}.")
    kinds = {_kind(each) for each in wanted if each is not None}
    if _kind(value) != "mixed" and kinds - {_kind(value)}:
        raise OptionError(f"A column of {_kind(value)} cannot be in a list with {' and '.join(sorted(kinds))}.")
    if value.dtype.hasobject:
        chosen = set(wanted)
        return np.fromiter((each in chosen for each in value.tolist()), np.bool_, len(value))
    among = np.isin(value, [each for each in wanted if each is not None])
    return among | _is_missing(value) if None in wanted else among


def _is_missing(column: NDArray[Any]) -> NDArray[np.bool_]:
    if column.dtype.hasobject:
        return np.fromiter((each is None for each in column.tolist()), np.bool_, len(column))
    missing: NDArray[np.bool_] = np.zeros(column.shape, np.bool_)
    if column.dtype.kind in "Mmf":
        missing = (np.isnan if column.dtype.kind == "f" else np.isnat)(column)
    return missing


def _read_date(value: Any, other: Any) -> Any:
    """Return a text as a date if it is compared with dates: `day > '2026-11-17'`."""
    is_date = isinstance(value, str) and isinstance(other, np.ndarray) and other.dtype.kind == "M"
    return np.datetime64(value) if is_date else value


def _kind(value: Any) -> str:
    """Return what a value or column holds: numbers (and bools), text, dates, or mixed."""
    if not isinstance(value, np.ndarray):
        return "text" if isinstance(value, str) else "dates" if isinstance(value, np.datetime64) else "numbers"
    if value.dtype.kind in "USO":
        is_text = value.dtype.kind != "O" or all(each is None or isinstance(each, str) for each in value.tolist())
        return "text" if is_text else "mixed"
    return "numbers" if value.dtype.kind not in "Mm" else "dates"
