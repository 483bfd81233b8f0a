"""What `testbed calibrate` measures and what it makes of it: coefficients of one machine, with their intervals.

| question | module |
|---|---|
| which experiments on an engine? | `design` |
| what did a real run's journal say of trainer, weight updates and phase switches? | `phases` |
| how do coefficients follow from measurements? | `fit` |
| what does a profile say? | `profile` |

It imports no backend: measurements come as data.
"""
