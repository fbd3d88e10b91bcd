"""``python -m dflash_local`` is ``dflash-local``."""

import sys

from dflash_local.cli import main

sys.exit(main())
