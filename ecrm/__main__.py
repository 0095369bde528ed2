"""`python -m ecrm` is the `ecrm` command."""

import sys

from ecrm.cli import main

sys.exit(main())
