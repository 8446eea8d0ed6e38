"""Your own reward: a file with one function, run apart, proved before use.

`load_reward` makes a reward function for a trainer out of a reward file,
whose code runs in a process of its own with a deadline; `check_reward` tries
that, or any reward function, on the data that it is meant for. From a
terminal::

    python -m rewards.contract reward.py --data rows.jsonl

`reward_file` is the first, `check` the second: `probes` makes completions
from the golds of the data, `subjects` calls any kind of reward as TRL does,
`trial` keeps what came back, `verdicts` shows what it means.
"""

from rewards.contract.check import check_reward
from rewards.contract.reward_file import load_reward
from rewards.contract.verdicts import Verdict, Verdicts

__all__ = ["Verdict", "Verdicts", "check_reward", "load_reward"]
