"""What the commands of `testbed.cli` share and no backend has a part in.

| question | module |
|---|---|
| may this be written there, and which folders are runs? | `folders` |
| how do several runs go on at once, and how do they end on Ctrl-C? | `jobs` |
| which scenarios does a command run, with which seeds? | `chosen` |
| what do finished runs say? | `recorded` |
| what is installed? | `installed` |
| which error ends a command with a message? | `errors` |
"""
