"""Faster than plain TRL, on the same work and with the same gradients.

    optimizations  what there is: a name for each, which a run lists
    decoding     completions from any causal model: shared prefill, plain loop
    dequantised  a copy of a 4-bit policy that need not unpack its weights
    trainer      the seam: all that is touched of `trl.GRPOTrainer`

`memory.resolve` leaves out what the machine has no memory for, and
`training.build_trainer` puts the rest to work. `benchmarks/grid_speed.py`
measures what they bring.
"""
