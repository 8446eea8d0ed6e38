"""Set the options of a reward function before a trainer gets it.

A trainer calls every reward function in the same way, with the completions
and the columns of the dataset; what else a function can be told, such as the
policy for reading an answer, must be fixed beforehand.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from rewards.batch import FROM_THE_TRAINER, GOLD_COLUMNS, RewardError


def with_options(reward: Any, **options: Any) -> Any:
    r"""Return the reward function `reward` with its options set.

    The options of a reward function are its keyword parameters that have a
    default and are nothing that a trainer sets. The result is called as
    `reward` is, pays in the same range, keeps its name and can be pickled
    where `reward` can. Raises RewardError for an option that `reward` does
    not have: its ``**kwargs`` would swallow a misspelt one in silence.

    All that a trainer logs of a reward stands under its name. So who trains
    with one function twice gives the result another `__name__`, and what the
    function itself logs (`rewards.health`) goes there, too.

    >>> from rewards.five_part import correctness_reward
    >>> lenient = with_options(correctness_reward, policy="flexible")
    >>> lenient.__name__, lenient(["9 + 9 is 18."], answer=["#### 18"])
    ('correctness_reward', [2.0])
    >>> lenient.__name__ = "lenient"
    >>> lenient(["18"], answer=["18"],
    ...         log_extra=lambda column, texts: print(column, texts))
    lenient/outcome ['right']
    lenient/answer ['18']
    [2.0]

    Source: `functools.partial`, which alone would lose the name.
    """
    known = options_of(reward)
    if unknown := sorted(set(options) - set(known)):
        raise RewardError(
            f"The reward {reward.__name__} has no option "
            f"{', '.join(map(repr, unknown))}. Its options are: "
            f"{', '.join(known) or 'none'}. Type one of these, or leave the "
            "option out."
        )
    bound = _Bound(reward, **options)
    # Not its attributes, which may be what only it can pickle.
    return functools.update_wrapper(bound, reward, updated=())


def options_of(reward: Any) -> list[str]:
    """Return the names of the options that a reward function has, a list.

    >>> from rewards.five_part import correctness_reward, integer_reward
    >>> options_of(correctness_reward)
    ['policy', 'prefilled']
    """
    return [
        parameter.name
        for parameter in inspect.signature(reward).parameters.values()
        if parameter.kind is not parameter.POSITIONAL_ONLY
        and parameter.default is not parameter.empty
        and parameter.name not in (*FROM_THE_TRAINER, *GOLD_COLUMNS)
    ]


class _Bound(functools.partial[Any]):
    """A reward with its options; logs under its own name."""

    __name__: str

    def __call__(self, *arguments: Any, **columns: Any) -> list[Any]:
        if self.__name__ != self.func.__name__:
            for log in ("log_metric", "log_extra"):
                if columns.get(log) is not None:
                    columns[log] = self._renaming(columns[log])
        return super().__call__(*arguments, **columns)

    def _renaming(self, log: Any) -> Callable[[str, Any], None]:
        def log_under_own_name(name: str, value: Any) -> None:
            reward, slash, what = name.partition("/")
            own = reward == self.func.__name__
            log(f"{self.__name__}{slash}{what}" if own else name, value)

        return log_under_own_name
