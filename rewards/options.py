"""Set the options of a reward function before a trainer gets it.

A trainer calls every reward function in the same way, with the completions
and the columns of the dataset; what else a function can be told, such as the
policy for reading an answer, must be fixed beforehand.
"""

import functools
import inspect

from rewards.batch import GOLD_COLUMNS, RewardError


def with_options(reward, **options):
    r"""Return the reward function `reward` with its options set.

    The options of a reward function are its keyword parameters that have a
    default and are no gold column. The result is called as `reward` is, pays
    in the same range, keeps its name, which TRL puts in its logs, and can be
    pickled where `reward` can. Raises RewardError for an option that `reward`
    does not have: its ``**kwargs`` would swallow a misspelt one in silence.

    >>> from rewards.five_part import correctness_reward
    >>> lenient = with_options(correctness_reward, policy="flexible")
    >>> lenient.__name__, lenient(["9 + 9 is 18."], answer=["#### 18"])
    ('correctness_reward', [2.0])

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
    bound = functools.partial(reward, **options)
    return functools.update_wrapper(bound, reward)


def options_of(reward):
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
        and parameter.name not in ("completions", *GOLD_COLUMNS)
    ]
