"""`python -m testbed.cli`."""

from testbed.cli import main

main()
