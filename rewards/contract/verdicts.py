"""What a check of a reward found, as plain data and as a table."""

import html
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

WIDTH = 79
_MARKS = {True: "yes", False: "NO", None: "-"}
_NAME, _MARK = 24, 5  # widths of the first two columns
_SHOWN_LINES = 6


@dataclass(frozen=True)
class Verdict:
    """One thing that was checked.

    Attributes:
        name: what a good reward does, such as "rewards right answers".
        passed: True, False, or None where it doesn't apply or couldn't be
            judged.
        seen: what was seen, with figures.
        completion: a completion that shows it, or "".
        advice: what to do, or "" where there is nothing to do.
    """

    name: str
    passed: bool | None
    seen: str
    completion: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Verdicts:
    """All that was checked of one reward; print it, or show it in a notebook.

    Attributes:
        reward: the name of the reward.
        form: the written form of an answer that scores best.
        rows: the verdicts, in order.

    >>> found = Verdicts("mine", "box", (Verdict("is finite", True, "72"),))
    >>> found.passed, found["is finite"].seen, found.failures
    (True, '72', ())
    """

    reward: str
    form: str
    rows: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Verdict, ...]:
        """The verdicts that failed."""
        return tuple(row for row in self.rows if row.passed is False)

    def __getitem__(self, name: str) -> Verdict:
        """Return the verdict of that name; KeyError when there is none."""
        return {row.name: row for row in self.rows}[name]

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.rows)

    def table(self) -> list[dict[str, Any]]:
        """Return the verdicts as a list of dicts, one for each."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        lines = [*textwrap.wrap(self._head(), WIDTH), ""]
        for row in self.rows:
            first = f"{row.name:<{_NAME}}{_MARKS[row.passed]:<{_MARK}}"
            lines += _wrapped(row.seen, first, " " * len(first)) or [first]
        for row in self.failures:
            lines += ["", f"{row.name}: NO"]
            lines += [f"  | {line}" for line in _shown(row)]
            lines += _wrapped(row.advice, "  ", "  ")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        heads = ("check", "passed", "what was seen",
                 "completion that shows it", "what to do")  # fmt: skip
        rows = "".join(
            _html_row(
                "td",
                html.escape(row.name),
                f"<b>{_MARKS[row.passed]}</b>",
                html.escape(row.seen),
                # notebooks set a table to the right, and pre never breaks
                '<pre style="white-space: pre-wrap; text-align: left">'
                + html.escape("\n".join(_shown(row)))
                + "</pre>",
                html.escape(row.advice),
            )
            for row in self.rows
        )
        return (
            f"<p>{html.escape(self._head())}</p><table><thead>"
            f"{_html_row('th', *heads)}</thead><tbody>{rows}</tbody></table>"
        )

    def _head(self) -> str:
        failed = len(self.failures)
        outcome = f"{failed} failed" if failed else "nothing failed"
        form = f"; best form: {self.form}" if self.form else ""
        return printable(
            f"{self.reward}: {len(self.rows)} checks, {outcome}{form}"
        )


def printable(text: str) -> str:
    r"""Return `text` without characters that would disturb a terminal.

    >>> printable("a\x1b[31m\tb\n")
    'a\\x1b[31m\\tb\n'
    """
    return "".join(
        c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text
    )


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        printable(text), WIDTH, initial_indent=first, subsequent_indent=others
    )


def _shown(row: Verdict) -> list[str]:
    """Return the first lines of the completion, shortened to the width."""
    lines = printable(row.completion).split("\n")[:_SHOWN_LINES]
    room = WIDTH - 4
    return [
        line if len(line) <= room else line[: room - 4] + " ..."
        for line in lines
        if row.completion
    ]


def _html_row(tag: str, *cells: str) -> str:
    style = 'style="text-align: left; vertical-align: top"'
    inside = "".join(f"<{tag} {style}>{cell}</{tag}>" for cell in cells)
    return f"<tr>{inside}</tr>"
