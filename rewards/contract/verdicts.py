"""What a check of a reward found, as plain data and as a table.

`rewards.contract.check_reward` fills it in; here is how it is shown: in 79
columns by `str`, as rows by `table`, and in a notebook as HTML.
"""

import html
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

WIDTH = 79
_MARKS = {True: "yes", False: "NO", None: "-"}
_NAME, _MARK = 22, 5  # widths of the first two columns
_SHOWN_LINES = 6


@dataclass(frozen=True)
class Verdict:
    """One thing that was checked.

    Attributes:
        name: what a good reward does, such as "pays for right".
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
    """All that was checked of one reward.

    Attributes:
        reward: the name of the reward.
        form: the written form of an answer that it pays best for.
        rows: the verdicts, in order.

    >>> found = Verdicts("mine", "box", (Verdict("is finite", True, "72"),))
    >>> found.passed, found["is finite"].seen, found.failures
    (True, '72', ())
    >>> found.table()[0]["name"]
    'is finite'
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
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name!r}; there are {[r.name for r in self.rows]}")

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.rows)

    def table(self) -> list[dict[str, Any]]:
        """Return the verdicts as a list of dicts, one for each."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        lines = [*textwrap.wrap(_head(self), WIDTH), ""]
        for row in self.rows:
            lines += _row_lines(row)
        for row in self.failures:
            lines += ["", f"{row.name}: NO"] + _detail_lines(row)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        heads = ("check", "passed", "what was seen",
                 "completion that shows it", "what to do")  # fmt: skip
        rows = [
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
        ]
        return (
            f"<p>{html.escape(_head(self))}</p><table><thead>"
            f"{_html_row('th', *heads)}</thead>"
            f"<tbody>{''.join(rows)}</tbody></table>"
        )


def printable(text: str) -> str:
    r"""Return `text` without characters that would disturb a terminal.

    >>> printable("a\x1b[31m\tb\n")
    'a\\x1b[31m\\tb\n'
    """
    return "".join(
        c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text
    )


def _head(verdicts: Verdicts) -> str:
    failed = len(verdicts.failures)
    outcome = f"{failed} failed" if failed else "nothing failed"
    form = f"; best paid form: {verdicts.form}" if verdicts.form else ""
    return printable(
        f"{verdicts.reward}: {len(verdicts.rows)} checks, {outcome}{form}"
    )


def _row_lines(row: Verdict) -> list[str]:
    room = WIDTH - _NAME - _MARK
    seen = textwrap.wrap(printable(row.seen), room) or [""]
    first = f"{row.name:<{_NAME}}{_MARKS[row.passed]:<{_MARK}}{seen[0]}"
    return [first] + [" " * (_NAME + _MARK) + more for more in seen[1:]]


def _html_row(tag: str, *cells: str) -> str:
    style = 'style="text-align: left; vertical-align: top"'
    inside = "".join(f"<{tag} {style}>{cell}</{tag}>" for cell in cells)
    return f"<tr>{inside}</tr>"


def _shown(row: Verdict) -> list[str]:
    """Return the first lines of the completion, cut to the width."""
    lines = printable(row.completion).split("\n")[:_SHOWN_LINES]
    return [_cut(line) for line in lines] if row.completion else []


def _detail_lines(row: Verdict) -> list[str]:
    lines = ["  | " + line for line in _shown(row)]
    return lines + textwrap.wrap(
        printable(row.advice),
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
    )


def _cut(line: str, room: int = WIDTH - 4) -> str:
    return line if len(line) <= room else line[: room - 4] + " ..."
