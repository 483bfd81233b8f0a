"""The published suite: what others measured, and how far the simulator is from it.

| question | module |
|---|---|
| what was published, under which conditions, fitted or predicted? | `tables` |
| how far off is the simulator, and is every sign right? | `results` |

Its tables are files of `testbed/data/published`, their scenarios are in `scenarios/published`.
"""
