"""Measuring one machine's engines and trainer for the simulator.

| question | module |
|---|---|
| how long do an engine's steps and controls take? | `engine` |
| how long do a trainer's updates take? | `updates` |
| how much do engines and trainer slow each other down? | `beside` |
| in which order is everything measured? | `carry_out` |
"""
