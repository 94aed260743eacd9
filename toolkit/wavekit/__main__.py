"""``python -m wavekit``: the command line, for launchers that start modules."""

from wavekit.commands.main import main

main()
