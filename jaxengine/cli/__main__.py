"""`python -m jaxengine.cli`, the command where its script isn't on the path."""

from jaxengine.cli.main import main

raise SystemExit(main())
