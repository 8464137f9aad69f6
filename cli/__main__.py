"""`python -m cli` is `areal-metrics`."""

from .app import main

if __name__ == "__main__":
    main()
