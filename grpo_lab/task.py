"""What a policy is to learn, and by what it is judged, as one thing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_lab.data import Splits
from grpo_lab.errors import LabError
from grpo_lab.evaluation import NUMBERS, READING, Grader


@dataclass(frozen=True)
class Task:
    """Questions, rewards and a grader that belong together.

    Rewards and grader have to read the reference answers and the tags that
    the system prompt asks for: numbers with `evaluation.NUMBERS`, which is the
    default, LaTeX with `evaluation.LATEX`.

    Attributes:
        splits: questions to train on and held-out ones, each as the messages
            that a policy is given; see `grpo_lab.data`.
        rewards: reward functions with TRL's signature.
        grader: how held-out answers are judged.

    Example:
        >>> from grpo_lab.data import load_splits
        >>> from rewards import FIVE_PART
        >>> task = Task(load_splits("pocket", train_rows=8), FIVE_PART)
        >>> task.system_prompt.splitlines()[0]
        'Respond in the following format:'
    """

    splits: Splits
    rewards: Sequence[Callable]
    grader: Grader = NUMBERS

    @property
    def system_prompt(self) -> str:
        """The system message of every prompt; "" if there is none."""
        first = self.splits.train[0]["prompt"][0]
        return first["content"] if first["role"] == "system" else ""

    @property
    def functions(self) -> list[Callable]:
        """All that a learner may have written, for whoever sends it on."""
        return [*self.rewards, self.grader.correct, self.grader.format_ok]

    def refuse_unreadable(self) -> None:
        """Refuse reference answers that the grader can't read.

        Raises:
            LabError: says how many, shows the first, and what to type.
        """
        answers = self.splits.train["answer"], self.splits.eval["answer"]
        unread = [
            one
            for some in answers
            for one in some
            if self.grader.correct("", one, READING) is None
        ]
        if unread:
            raise LabError(
                f"{len(unread)} reference answers can't be compared with an "
                f"answer, the first {unread[0][-60:]!r}. {self.grader.needs}"
            )
