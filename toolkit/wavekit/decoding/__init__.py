"""The lattice decoder: token ids in, token ids out. Knows engines and buffers; no text, no files, no command."""
