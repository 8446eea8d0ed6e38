"""Register, submit, evolve, watch, deploy, ask: on this machine, offline."""
