"""Depth exploration replayed without engines: traces of what exits said, exact ticks, time by measured costs, plans."""
