"""All fields of a message in one tuple. It refuses to know which messages there are.

Where modules are compiled, reading one field is a look-up by its name, and so is every global that is not Final.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import astuple

fields_of: Final = astuple
"""In the order of the struct's definition."""
