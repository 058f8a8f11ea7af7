"""Engine processes of one server: restarted when they die, their requests resumed. See ``fleet``."""
