"""Objects that users give names to or get by ids, in one SQLite file: ``database``; ``sessions`` are one kind."""
