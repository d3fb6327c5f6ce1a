"""`python -m mlxbatch` is `mlxbatch`."""

import sys

from mlxbatch.cli.main import main

sys.exit(main())
