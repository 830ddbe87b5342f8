"""`python -m rekindle` is `rekindle`, for launchers that start modules: `torchrun -m rekindle`."""

from rekindle.cli import main

if __name__ == "__main__":
    main(prog_name="rekindle")
