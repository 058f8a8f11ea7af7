"""Engine processes behind one address: restarted when they die, their requests resumed. See ``fleet``."""
