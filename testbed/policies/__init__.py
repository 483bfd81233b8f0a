"""One module per question that the core asks. A policy is a pure object: no clock, no I/O, chosen by `type:` in the
scenario.

| question | module |
|---|---|
| may another group start? | `admission` |
| how many may run now? | `concurrency` |
| which engine? | `routing` |
| which turn first, where not all may run? | `turn_order` |
| which programs run, pause, resume? | `programs` |
| when is experience stored, and when selectable? | `buffer` |
| which ready groups form the batch? | `selection` |
| what is too old, and then what? | `staleness` |
| when are weights published, by which path, under which rule? | `publication` |
| which pool does a job run on? | `placement` |
"""
