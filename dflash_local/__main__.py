"""``python -m dflash_local`` is ``dflash-local``."""

import sys

from dflash_local.start import main

sys.exit(main())
