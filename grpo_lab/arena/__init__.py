"""Register, submit, evolve, watch, deploy, ask: on this machine, offline.

The workflow of AgileRL's Arena with the same nouns, verbs and files:

    client       LocalArena, with every verb; `cli` is the same in a terminal
    store        what is registered: a directory each below the arena's home
    datasets     rows with a category, checked and copied
    manifest     the form of a training manifest, read and checked
    lint         what in it would waste the budget
    submission   what is proved before an experiment may start
    experiment   an experiment's directory: what it is, how it stands
    job          its process, which outlives whoever submitted it
    population   the training of all members, which a kill does not hurt
    train_member the part of it that needs the base model
    evolution    who survives and what is changed: plain data and chance
    records      what came of it, read back without the training libraries
    deployments  which policies are served, and their servers
    serving      a checkpoint merged, compared with its adapter, and asked
"""

from grpo_lab.arena.client import LocalArena

__all__ = ["LocalArena"]
