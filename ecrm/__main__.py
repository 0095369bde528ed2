"""`python -m ecrm` is the `ecrm` command."""

import sys

from ecrm.cli.commands import main

sys.exit(main())
