"""Command line: `hsap plan`, `hsap verify` and all others of `COMMANDS`, one command a file.

It starts without torch and numba.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from hsap.cli import (
    bench,
    check,
    data,
    doctor,
    estimate,
    export,
    plan,
    planners,
    prepare,
    replay,
    simulate,
    tune,
    verify,
    view,
)
from hsap.cli.exit import BAD_INPUT, INTERRUPTED, NOT_OK
from hsap.ir.check import one_line, printable

COMMANDS = (plan, verify, simulate, view, tune, estimate, planners, bench, doctor, check, replay, prepare, data, export)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code (`hsap.cli.exit`). Bad input is told in one paragraph."""
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that has no word for a character is no reason to end, least of all when hours of work are told.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = arguments.run(arguments)
        print(end="", flush=True)  # stdout may be None
    except BrokenPipeError:
        # The reader (head, less) has seen enough; the interpreter's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_OK
    except OSError as error:
        # Libraries raise some without a number, and writing to an open file raises one without a name.
        where = "" if error.filename is None else f"{one_line(error.filename)}: "
        told = f"{where}{one_line(error.strerror or error)}; check {'the path' if where else 'disk and path'}"
        print(f"hsap {arguments.command}: {told}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"hsap {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ValueError as error:
        told = getattr(arguments, "told", str)(printable(error))
        print(f"hsap {arguments.command}: {told}", file=sys.stderr)
        return BAD_INPUT
    return code


class _Parser(argparse.ArgumentParser):
    """Says in one paragraph what is wrong, without the usage before it, and names the help of the command meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse here what no flag takes: argparse would hand it to the outermost parser, which has another help."""
        namespace, rest = super().parse_known_args(args, namespace)
        if rest:
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            meant = {flag: difflib.get_close_matches(flag.partition("=")[0], known, 1, 0.8) for flag in rest}
            told = [f"; did you mean {names[0]}" for flag, names in meant.items() if flag.startswith("--") and names]
            self.error(f"unrecognized arguments: {' '.join(rest)}{''.join(told)}")
        return namespace, rest

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {one_line(message)}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("hsap", description="Plans for attention over packed sequences on many ranks.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser
