"""Make `python -m rekindle` the same as `rekindle`.

Launchers that start Python modules need this file: `torchrun -m rekindle run train.py`.
"""

from rekindle.cli import main

if __name__ == "__main__":
    main(prog_name="rekindle")
