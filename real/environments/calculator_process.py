"""The calculator's own process: evaluates arithmetic from a parsed tree, never code.

Numbers, brackets, + - * / // % **, and `ans`, the last result. Memory is limited here, time by the parent. Standard
library only, so that starting one per trajectory is cheap."""

from __future__ import annotations

import ast
import operator
import resource
from collections.abc import Callable
from typing import Any

from real.environments.serve import serve

MEMORY_BYTES = 512 * 2**20
MAX_EXPRESSION, MAX_RESULT = 200, 32
"""Characters."""
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class Calculator:
    """`ans` is what an environment keeps between the turns of a trajectory."""

    def __init__(self) -> None:
        self.ans: int | float = 0

    def __call__(self, expression: str) -> str:
        """The result, or `error: ` and why; at most `MAX_RESULT` characters."""
        try:
            if len(expression) > MAX_EXPRESSION:
                raise ValueError("too long")
            value = self._value(ast.parse(expression.strip(), mode="eval").body)
            text = f"{value:.10g}" if isinstance(value, float) else str(value)
            if len(text) > MAX_RESULT:
                raise ValueError("result too long")
            self.ans = value
            return text
        except SyntaxError:
            why = "not an expression"
        except ZeroDivisionError:
            why = "division by zero"
        except (MemoryError, OverflowError, RecursionError):
            why = "too large"
        except ValueError as error:
            why = str(error)
        return f"error: {why}"[:MAX_RESULT]

    def _value(self, node: ast.expr) -> int | float:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return value
            case ast.Name(id="ans"):
                return self.ans
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self._value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                result: int | float | complex = BINARY[type(op)](self._value(left), self._value(right))
                if isinstance(result, complex):
                    raise ValueError("not a real number")
                return result
        raise ValueError("not arithmetic")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    serve(Calculator())
