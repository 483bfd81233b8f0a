"""The run log: one header line, then one line per event handled with the actions that followed. Written, read, never
interpreted.

| question | module |
|---|---|
| what is in a line? | `format` |
| how is it written, and which records does a sampled journal keep? | `writer` |
| how is it read, and what if it is broken? | `reader` |
"""

from testbed.journal.format import FORMAT, JournalError, JournalHeader, Record
from testbed.journal.reader import Records, read_journal, require_complete
from testbed.journal.writer import JournalWriter

__all__ = [
    "FORMAT",
    "JournalError",
    "JournalHeader",
    "JournalWriter",
    "Record",
    "Records",
    "read_journal",
    "require_complete",
]
