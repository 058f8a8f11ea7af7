"""The engine processes of one server: dead processes are restarted, and their requests resume. See ``fleet``."""
