"""What a user writes: one typed, frozen, documented model per section of a scenario.

Start with `Scenario`. `testbed.scenario.load` reads files, `testbed.scenario.rules` refuses impossible combinations,
`testbed.scenario.study` reads a base scenario with variants.
"""

from testbed.scenario.scenario import Scenario

__all__ = ["Scenario"]
