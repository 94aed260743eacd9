"""Training of draft heads and early exits: texts the target wrote, its states on them, one loop, one kind of record."""
