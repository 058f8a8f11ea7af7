"""Objects of clients, with a name or an id, in one SQLite file (``database``). ``sessions`` are one kind of them."""
