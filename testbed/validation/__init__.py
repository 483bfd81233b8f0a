"""How far a simulation is from the real run: what is compared, turn by turn and quantity by quantity.

| question | module |
|---|---|
| what is simulated against the real run? | `plan` |
| what is read from a run's journal? | `observed` |
| which quantities are compared, and how far may each be off? | `quantities` |
| which turns are the same turn? | `matched` |
| what came out: errors, spread, and where they come from | `result` |

It imports no backend: runs come as journals.
"""
